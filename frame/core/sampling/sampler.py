"""The sampler: turns the logits of a step into tokens, batched on the device.

Order: log-probabilities come from the model's unchanged logits, as in the OpenAI API. Then logits
processors and the grammar mask (which sets logits to -inf, so their order does not matter);
temperature; top-k; top-p over the tokens that top-k keeps; min-p. Each filter is a threshold on the
logit and keeps ties. Tokens are drawn by a Gumbel race (`gumbel_race`). No row depends on another
row. Used by the model runner. Must not know a request: a `SamplingPlan` describes the work of a
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from frame.core.interfaces.device_operations import DeviceOperations, DrawsBySlot
from frame.core.sampling import gumbel_race
from frame.core.sampling.sampling_metadata import PARAMETERS, SamplingArrays

if TYPE_CHECKING:
    from frame.core.sampling.logits_pipeline import ProcessorPlan, Processors
    from frame.core.sampling.sampling_metadata import DrawArrays, FilterArrays, SamplingPlan

SamplingTensors = SamplingArrays[torch.Tensor]

_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf).astype(np.float32)
_MIN_BLOCKED_VOCAB = 8192  # vocabulary size from which a maximum per group of tokens is faster
_MIN_LOG2_WEIGHT = -115.0  # base-2 logarithm of the smallest relative weight; smaller weights become 0
_FIRST_CANDIDATES = 256  # candidates of the first top-p search
_CANDIDATE_FACTOR = 16  # factor of candidates for each further search; the last one uses the whole vocabulary


@dataclass(frozen=True, slots=True)
class Sampled:
    """Device tensors of one step, one entry per sampling row; log-probabilities only for
    `SamplingPlan.logprob_rows`."""

    token_ids: torch.Tensor  # int64 [rows]
    best: torch.Tensor  # float32 [rows]; the greatest logit, not finite if the row's logits are invalid
    logprobs: torch.Tensor | None = None  # float32 [n]
    top_ids: torch.Tensor | None = None  # int64 [n, k]
    top_logprobs: torch.Tensor | None = None  # float32 [n, k]
    listed_logprobs: torch.Tensor | None = None  # float32 [n, m]; of `SamplingArrays.listed_ids`


class Sampler:
    """Samples the tokens of a step. Has no state except its logits processors."""

    def __init__(
        self, processors: Processors, operations: DeviceOperations, rows: DrawsBySlot | None = None, *, in_graphs: bool = True
    ) -> None:
        """rows: draws the tokens in place of `operations`. in_graphs: whether CUDA graphs draw
        tokens, by `operations`."""
        self.processors = processors
        self.operations = operations
        self.in_graphs = in_graphs
        self._rows = rows
        # plans must come from a `SamplingTable` with the same value
        self.by_row = rows is not None or operations.draw_filtered is not None

    def sample(self, logits: torch.Tensor, plan: SamplingPlan, processing: ProcessorPlan | None, tensors: SamplingTensors) -> Sampled:
        """logits: [rows, vocab] of any float dtype; may change in place. Computes in float32."""
        if not self.by_row:
            logits = logits.float()
        raw, rows = None, tensors.logprob_rows
        if rows is not None:
            is_changed = processing is not None or tensors.grammar is not None
            raw = logits
            if len(rows) != plan.num_rows:
                raw = logits.index_select(0, rows)
            elif is_changed:
                raw = logits.clone()
        choose = self._choose_by_row if self.by_row else self._choose
        token_ids, best = choose(logits, plan, processing, tensors)
        if raw is None or rows is None:
            return Sampled(token_ids, best)
        chosen = token_ids if len(raw) == plan.num_rows else token_ids.index_select(0, rows)
        return Sampled(token_ids, best, *self._score(raw, chosen, plan, tensors.listed_ids))

    def add_logprobs(self, sampled: Sampled, logits: torch.Tensor, plan: SamplingPlan, tensors: SamplingTensors) -> Sampled:
        """`sampled` with the log-probabilities that the plan asks for, under logits [rows, vocab]
        that nothing has changed."""
        rows = tensors.logprob_rows
        if rows is None:
            return sampled
        token_ids = sampled.token_ids.index_select(0, rows).clamp_(min=0)  # -1: not drawn
        scores = self._score(logits.index_select(0, rows), token_ids, plan, tensors.listed_ids)
        return Sampled(sampled.token_ids, sampled.best, *scores)

    def _score(
        self, logits: torch.Tensor, chosen: torch.Tensor, plan: SamplingPlan, listed_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The log-probabilities in `Sampled` of logits [n, vocab] and chosen ids [n]."""
        logprobs, top_ids, top_logprobs = self.operations.compute_logprobs(logits, chosen, plan.num_top_logprobs)
        if listed_ids is None:
            return logprobs, top_ids, top_logprobs, None
        normaliser = logits.gather(1, chosen.unsqueeze(1)).float() - logprobs.unsqueeze(1)
        return logprobs, top_ids, top_logprobs, logits.gather(1, listed_ids).float() - normaliser

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile the kernels for every kind of row, except those of logits processors, which
        warm-up steps compile. logits: [rows, vocab] of the model's dtype, with any values."""
        if not self.by_row:
            return
        rows = len(logits)
        each = {"temperature": 1.0, "top_p": 0.5, "log_min_p": -9.0}
        params = {name: torch.full((rows,), value, device=logits.device) for name, value in each.items()}
        params["key"] = torch.arange(rows, device=logits.device)
        params["top_k"] = torch.full((rows,), 2, dtype=torch.int32, device=logits.device)
        for scores in (logits, logits.float()) if self._rows is None else ():  # logits processors change a float32 copy
            self._draw(scores, {name: params[name] for name in PARAMETERS[:2]})
            self._draw(scores, params)
        for num_top in (0, 2):
            self.operations.compute_logprobs(logits, torch.zeros_like(params["key"]), num_top)
        words = torch.full((rows, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=logits.device)
        self.operations.mask_logits(logits, torch.arange(rows, device=logits.device), words)

    def _choose(
        self, logits: torch.Tensor, plan: SamplingPlan, processing: ProcessorPlan | None, tensors: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if processing is not None and tensors.processing is not None:
            self.processors.apply(logits, processing, tensors.processing)
        if tensors.grammar is not None:
            apply_grammar(logits, tensors.grammar.rows, tensors.grammar.mask)
        draw = tensors.draw
        if draw is None:
            best, token_ids = row_max(logits)
            return token_ids, best
        heights = gumbel_race.find_heights(logits)
        best, token_ids = row_max(logits, heights)
        limits = _limit_rows(logits, best, plan, draw, tensors.filters)
        drawn = gumbel_race.draw(logits, heights, draw.temperature, draw.key, draw.rows, limits)
        return drawn if draw.rows is None else token_ids.index_copy(0, draw.rows, drawn), best

    def _choose_by_row(
        self, logits: torch.Tensor, plan: SamplingPlan, processing: ProcessorPlan | None, tensors: SamplingTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With `draw_filtered`. Masks are exact in any dtype and are written into the logits; rows
        with logits processors are sampled from a float32 copy."""
        if tensors.grammar is not None:
            self.operations.mask_logits(logits, tensors.grammar.rows, tensors.grammar.mask)
        params, slots = tensors.list_parameters(), tensors.slots
        if processing is None or tensors.processing is None:
            return self._draw(logits, params, slots)
        rows = tensors.processing.rows
        scores = logits.index_select(0, rows).float()
        self.processors.apply(scores, processing, tensors.processing, changed_only=True)
        # a row's last draw counts, so the rows of logits processors are drawn last
        every = None if len(rows) == plan.num_rows else self._draw(logits, params, slots)
        some = slots if slots is None or self._rows is None else slots.index_select(0, rows)
        token_ids, best = self._draw(scores, {name: each.index_select(0, rows) for name, each in params.items()}, some)
        if every is None:
            return token_ids, best
        return every[0].index_copy_(0, rows, token_ids), every[1].index_copy_(0, rows, best)

    def _draw(
        self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """params: those of every row. slots: of every row; only `rows` needs them."""
        if self._rows is not None:
            assert slots is not None, "the runner sets the slots of the rows"
            return self._rows.draw_with_maxima(logits, params, slots)
        if "top_k" in params and self.operations.draw_filtered is not None:
            return self.operations.draw_filtered(logits, params, None, None)
        return self.operations.draw_plain(logits, params["temperature"], params["key"], None)


def draw_plain(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `DeviceOperations.draw_plain`. keys: of `draw_keys`."""
    logits = logits.float()
    heights = gumbel_race.find_heights(logits)
    best, likeliest = row_max(logits, heights)
    is_drawn = temperature > 0.0
    drawn = gumbel_race.draw(logits, heights, torch.where(is_drawn, temperature, 1.0), keys)
    token_ids = torch.where(is_drawn, drawn, likeliest)
    if last_tokens is not None:
        table, slots = last_tokens
        table.index_copy_(0, slots, token_ids)
    return token_ids, best


def row_max(logits: torch.Tensor, heights: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(greatest value, its first index) of each row, [rows, vocab] -> [rows] each. NaN counts as
    the greatest value. heights: `gumbel_race.find_heights` of the logits, if known."""
    vocab = logits.shape[1]
    if logits.is_cuda or (vocab < _MIN_BLOCKED_VOCAB):
        values, ids = logits.max(dim=-1)
        return values, ids
    values, group = (gumbel_race.find_heights(logits) if heights is None else heights).max(dim=-1)
    columns = group.unsqueeze(1) * gumbel_race.GROUP + torch.arange(gumbel_race.GROUP, device=logits.device)
    inside = logits.gather(1, columns.clamp_(max=vocab - 1)).max(dim=-1).indices
    return values, group * gumbel_race.GROUP + inside


def apply_grammar(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """Set the logits of tokens that the mask forbids to -inf, in place. rows: int64 [m]. mask:
    int32 [m, ceil(vocab / 32)]; a set bit allows the token."""
    added = _find_addends(mask, logits.shape[1])
    if len(rows) == len(logits):
        logits.add_(added)
    else:
        logits.index_add_(0, rows, added)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """See `DeviceOperations.mask_logits`."""
    mask = torch.where((rows >= 0).unsqueeze(1), mask, -1)
    logits.index_add_(0, rows.clamp(min=0), _find_addends(mask, logits.shape[1]).to(logits.dtype))


def _find_addends(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """0 for each allowed token and -inf for the others, float32 [m, vocab]."""
    # each byte of the mask selects a row of eight addends from a table: ten times as fast on CPUs
    # as single bits
    if mask.device.type == "cpu":  # numpy's gather has less overhead
        return torch.from_numpy(_ADDED.take(mask.numpy().view(np.uint8), axis=0).reshape(len(mask), -1))[:, :vocab]
    values, bits = torch.arange(256, device=mask.device).unsqueeze(1), torch.arange(8, device=mask.device)
    table = torch.zeros(256, 8, device=mask.device).masked_fill_((values >> bits) & 1 == 0, -torch.inf)
    return F.embedding(mask.view(torch.uint8).int(), table).view(len(mask), -1)[:, :vocab]


def _limit_rows(
    logits: torch.Tensor, best: torch.Tensor, plan: SamplingPlan, draw: DrawArrays[torch.Tensor], filters: FilterArrays[torch.Tensor] | None
) -> torch.Tensor | None:
    """The smallest (logit - greatest logit) / temperature that the filters of each drawn row keep,
    float32 [drawn]; None: no row has a filter."""
    limits = None
    if filters is not None:
        rows, some, temperature = draw.rows, filters.rows, draw.temperature
        if some is not None:
            temperature = temperature.index_select(0, some)
            rows = some if rows is None else rows.index_select(0, some)
        if rows is not None:
            logits, best = logits.index_select(0, rows), best.index_select(0, rows)
        scaled = (logits - best.unsqueeze(1)).div_(temperature.unsqueeze(1))  # <= 0
        limits = thresholds(scaled, plan, filters)
        if some is not None:
            limits = limits.new_full((plan.num_drawn,), -torch.inf).index_copy_(0, some, limits)
    if draw.log_min_p is not None:
        limits = draw.log_min_p if limits is None else torch.maximum(limits, draw.log_min_p)
    return limits


def thresholds(scaled: torch.Tensor, plan: SamplingPlan, filters: FilterArrays[torch.Tensor]) -> torch.Tensor:
    """The smallest scaled logit that top-k and top-p keep, float32 [filtered].

    scaled: [filtered, vocab], changed in place; the greatest value of each row is 0. Exponentials
    are to base 2: on CPUs `exp` is slow for minus infinity, `exp2` is not.
    """
    vocab = scaled.shape[1]
    count = plan.max_top_k
    if plan.has_unlimited:  # only on the CPU can the values decide how many candidates top-p needs
        count = vocab if scaled.is_cuda else max(_FIRST_CANDIDATES, count)
    mass = filters.top_p  # read only for top-p without top-k
    if plan.has_unlimited:
        scaled = F.threshold(scaled, _MIN_LOG2_WEIGHT, -torch.inf, inplace=True)  # denormal weights are slow on CPUs
        mass = scaled.exp2().sum(dim=-1).double()
    return _limits(scaled, mass, filters.top_k, filters.top_p, min(count, vocab))


def _limits(scaled: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, count: int) -> torch.Tensor:
    """The thresholds, from the `count` greatest values of each row; rows whose top-p needs more are
    searched again with more."""
    vocab = scaled.shape[1]
    values = scaled.topk(count, dim=-1).values if count < vocab else scaled.sort(dim=-1, descending=True).values
    has_k = top_k > 0
    last = torch.where(has_k, top_k, vocab).clamp_(max=count).sub_(1).unsqueeze(1)
    limit = values.gather(1, last).squeeze(1).masked_fill_(~has_k, -torch.inf)
    weights = values.double().exp2_()
    cumulated = weights.cumsum(dim=-1)
    required = top_p * torch.where(has_k, cumulated.gather(1, last).squeeze(1), mass)
    size = ((cumulated - weights) < required.unsqueeze(1)).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = values.gather(1, torch.minimum(size, last + 1) - 1).squeeze(1)
    limit = torch.maximum(limit, nucleus.masked_fill_(top_p >= 1.0, -torch.inf))
    if count < vocab and not scaled.is_cuda:
        short = (~has_k & (top_p < 1.0) & (cumulated[:, -1] < required)).nonzero().squeeze(1)
        if len(short):
            more = count * _CANDIDATE_FACTOR if count * _CANDIDATE_FACTOR < vocab // 2 else vocab
            limit[short] = _limits(scaled[short], mass[short], top_k[short], top_p[short], more)
    return limit


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `DeviceOperations.compute_logprobs`."""
    logits = logits.float()
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen.squeeze(1), top.indices, top.values - normaliser


def compute_logprobs_by_row(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `DeviceOperations.compute_logprobs`. The bits of a row do not depend on the others, as
    those of exponentials of several rows at once do."""
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), top.indices, top.values


TORCH = DeviceOperations(draw_plain=draw_plain, mask_logits=mask_logits, compute_logprobs=compute_logprobs)
TORCH_BY_ROW = DeviceOperations(draw_plain=draw_plain, mask_logits=mask_logits, compute_logprobs=compute_logprobs_by_row)
