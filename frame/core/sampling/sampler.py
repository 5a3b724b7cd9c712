"""Logits -> tokens, batched on the device. Knows no request: a `SamplingPlan` says which work the
step has.

Order: log-probabilities are those of the model's own logits (before anything below), as the OpenAI
API means them; then logits processors and the grammar (whose mask sets logits to -inf, so the two
may be applied in either order); temperature; top-k; top-p over what top-k left; min-p. Every filter
is one threshold on the logit, ties at it are kept, and the token is drawn by inverse CDF in
vocabulary order. No row depends on another row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from frame import kernels
from frame.core.sampling.sampling_metadata import PARAMETERS

if TYPE_CHECKING:
    from frame.core.sampling.logits_pipeline import ProcessorPlan, Processors
    from frame.core.sampling.sampling_metadata import SamplingPlan

Tensors = Mapping[str, torch.Tensor]

_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf).astype(np.float32)
_BLOCK = 128  # columns; large vocabularies are searched by blocks first
_BLOCKS_PAY = 8192  # vocabulary from which a blocked maximum is faster than a plain one
_NOTHING = -115.0  # powers of 2 below this are taken for 0: less than 1e-34 of the likeliest token's
_FIRST_TOP_P = 256  # candidates tried for top-p,
_MORE = 16  # times as many where these were not enough, and in the end all


@dataclass(frozen=True, slots=True)
class Sampled:
    """Device tensors of one step, one entry a sampling row; the log-probabilities are of
    `SamplingPlan.logprob_rows` only."""

    token_ids: torch.Tensor  # int64 [rows]
    best: torch.Tensor  # float32 [rows]; the greatest logit: not finite when the row's logits are broken
    logprobs: torch.Tensor | None = None  # float32 [n]
    top_ids: torch.Tensor | None = None  # int64 [n, k]
    top_logprobs: torch.Tensor | None = None  # float32 [n, k]


class Sampler:
    """Turns a step's logits into tokens. Stateless but for its processors."""

    def __init__(self, processors: Processors, *, use_triton: bool = False) -> None:
        """`use_triton`: on a device where kernels run, with plans of a
        `SamplingTable(by_row=True)`."""
        self._processors = processors
        self.use_triton = use_triton

    def sample(self, logits: torch.Tensor, plan: SamplingPlan, processing: ProcessorPlan | None, tensors: Tensors) -> Sampled:
        """logits [rows, vocab], which may be changed in place; float32 arithmetic whatever their
        type."""
        if not self.use_triton:
            logits = logits.float()
        raw = None
        if plan.logprob_rows is not None:
            is_changed = processing is not None or "grammar_mask" in tensors
            raw = logits
            if len(plan.logprob_rows) != plan.num_rows:
                raw = logits.index_select(0, tensors["logprob_rows"])
            elif is_changed:
                raw = logits.clone()
        choose = self._choose_by_kernels if self.use_triton else self._choose
        token_ids, best = choose(logits, plan, processing, tensors)
        if raw is None:
            return Sampled(token_ids, best)
        chosen = token_ids if len(raw) == plan.num_rows else token_ids.index_select(0, tensors["logprob_rows"])
        return Sampled(token_ids, best, *logprobs(raw, chosen, plan.num_top_logprobs))

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile the kernels for every kind of row; those of processors are compiled by idle
        steps. logits [rows, vocab] of any values, of the model's type."""
        if not self.use_triton:
            return
        from frame.kernels.sampling.logit_changes import apply_token_mask

        rows = len(logits)
        each = {"temperature": 1.0, "top_p": 0.5, "log_min_p": -9.0}
        params = {name: torch.full((rows,), value, device=logits.device) for name, value in each.items()}
        params["uniform"] = torch.full((rows,), 0.5, dtype=torch.float64, device=logits.device)
        params["top_k"] = torch.full((rows,), 2, dtype=torch.int32, device=logits.device)
        for scores in (logits, logits.float()):  # a copy of the latter type is what processors change
            token_ids, _ = draw_by_kernels(scores, {name: params[name] for name in PARAMETERS[:2]})
            draw_by_kernels(scores, params)
        for num_top in (0, 2):
            logprobs(logits, token_ids, num_top)
        words = torch.full((rows, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=logits.device)
        apply_token_mask(logits, torch.arange(rows, device=logits.device), words)

    def _choose(
        self, logits: torch.Tensor, plan: SamplingPlan, processing: ProcessorPlan | None, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if processing is not None:
            self._processors.apply(logits, processing, tensors)
        if "grammar_mask" in tensors:
            apply_grammar(logits, tensors["grammar_rows"], tensors["grammar_mask"])
        best, token_ids = row_max(logits)
        if plan.num_drawn:
            rows = tensors.get("drawn_rows")
            drawn = draw(_weights(logits, best, rows, plan, tensors), tensors["uniform"])
            token_ids = drawn if rows is None else token_ids.index_copy(0, rows, drawn)
        return token_ids, best

    def _choose_by_kernels(
        self, logits: torch.Tensor, plan: SamplingPlan, processing: ProcessorPlan | None, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks are exact in any type and are written into the logits; rows with processors are
        drawn from a float32 copy."""
        from frame.kernels.sampling.logit_changes import apply_token_mask

        if "grammar_mask" in tensors:
            apply_token_mask(logits, tensors["grammar_rows"], tensors["grammar_mask"])
        params = {name: tensors[name] for name in PARAMETERS if name in tensors}
        if processing is None:
            return draw_by_kernels(logits, params)
        rows = tensors["processor.rows"]
        scores = logits.index_select(0, rows).float()
        self._processors.apply(scores, processing, tensors, changed_only=True)
        token_ids, best = draw_by_kernels(scores, {name: each.index_select(0, rows) for name, each in params.items()})
        if len(rows) == plan.num_rows:
            return token_ids, best
        every_id, every_best = draw_by_kernels(logits, params)
        return every_id.index_copy_(0, rows, token_ids), every_best.index_copy_(0, rows, best)


def draw_by_kernels(
    logits: torch.Tensor,
    params: Tensors,
    plain: tuple[torch.Tensor, torch.Tensor] | None = None,
    last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids int64, greatest logits float32) of logits [rows, vocab]; `params` of every row as
    in `SamplingPlan.arrays`. Can be captured, as its work does not depend on the values. `plain`:
    what `draw_plain` gave for the same `last_tokens`, which is written over."""
    from frame.kernels.sampling.filtering import Filters, sample_filtered
    from frame.kernels.sampling.sampling import sample_unfiltered

    if "top_k" in params:
        return sample_filtered(logits, Filters(**params), plain, last_tokens)
    return sample_unfiltered(logits, params["temperature"], params["uniform"], last_tokens)


def draw_plain(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids int64, greatest logits float32) of rows that want no more than a temperature; 0:
    the likeliest token. The work does not depend on the values, so that it can be captured. logits
    [rows, vocab], temperature float32 [rows], uniform float64 [rows]. `last_tokens`: a table of
    token ids int64 [slots], and each row's slot int64 [rows], where its token is written too."""
    if kernels.can_use_triton(logits.device):
        from frame.kernels.sampling.sampling import sample_unfiltered

        return sample_unfiltered(logits, temperature, uniform, last_tokens)
    logits = logits.float()
    best, likeliest = row_max(logits)
    is_drawn = temperature > 0.0
    scaled = (logits - best.unsqueeze(1)).div_(torch.where(is_drawn, temperature, 1.0).unsqueeze(1))
    weights = F.threshold(scaled, _NOTHING, -torch.inf, inplace=True).exp2_()
    missing = -weights.shape[1] % _BLOCK
    drawn = draw(F.pad(weights, (0, missing)) if missing else weights, uniform)
    token_ids = torch.where(is_drawn, drawn, likeliest)
    if last_tokens is not None:
        table, slots = last_tokens
        table.index_copy_(0, slots, token_ids)
    return token_ids, best


def row_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(greatest value, its first index) of each row, [rows, vocab] -> [rows] twice. A NaN counts as
    the greatest."""
    rows, vocab = logits.shape
    if vocab < _BLOCKS_PAY or vocab % _BLOCK or logits.is_cuda:
        values, ids = logits.max(dim=-1)
        return values, ids
    blocks = logits.view(rows, -1, _BLOCK)
    values, block = blocks.amax(dim=-1).max(dim=-1)
    inside = blocks[torch.arange(rows), block].max(dim=-1).indices
    return values, block * _BLOCK + inside


def apply_grammar(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """Ban what the mask forbids. rows int64 [m]; mask int32 [m, ceil(vocab / 32)], a set bit is
    allowed."""
    # eight tokens a byte, by a table of what each of its 256 values adds: ten times as fast on CPUs
    # as bits one by one
    if mask.device.type == "cpu":  # where numpy's own gather has less to do before it begins
        added = torch.from_numpy(_ADDED.take(mask.numpy().view(np.uint8), axis=0).reshape(len(mask), -1))[:, : logits.shape[1]]
    else:
        values, bits = torch.arange(256, device=mask.device).unsqueeze(1), torch.arange(8, device=mask.device)
        table = torch.zeros(256, 8, device=mask.device).masked_fill_((values >> bits) & 1 == 0, -torch.inf)
        added = F.embedding(mask.view(torch.uint8).int(), table).view(len(mask), -1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.add_(added)
    else:
        logits.index_add_(0, rows, added)


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF in column order: weights [rows, columns], not normalised, columns a multiple of
    the block; uniform float64 [rows].

    Never returns a column of weight 0, unless a whole row is 0 (or NaN).
    """
    blocks = weights.view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    cumulated = sums.cumsum(dim=-1)
    goal = cumulated[:, -1] * uniform
    block = _column(cumulated, goal)
    rest = goal - (cumulated - sums).gather(1, block.unsqueeze(1)).squeeze(1)
    inside = blocks.gather(1, block.view(-1, 1, 1).expand(-1, 1, _BLOCK)).squeeze(1).double()
    return block * _BLOCK + _column(inside.cumsum(dim=-1), rest)


def _column(cumulated: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulated weight is above the goal; at most the last column of any
    weight, where rounding puts the goal at the very end."""
    passed = (cumulated <= goal.unsqueeze(1)).sum(dim=-1)
    return torch.minimum(passed, (cumulated < cumulated[:, -1:]).sum(dim=-1))


def _weights(logits: torch.Tensor, best: torch.Tensor, rows: torch.Tensor | None, plan: SamplingPlan, tensors: Tensors) -> torch.Tensor:
    """Weights of the drawn rows' tokens at their temperature, the likeliest has 1; 0 where a filter
    cuts. [drawn, vocab rounded up to the block]. Everything is in powers of 2: `exp2` is fast where
    `exp` is not (at minus infinity)."""
    if rows is not None:
        logits, best = logits.index_select(0, rows), best.index_select(0, rows)
    scaled = (logits - best.unsqueeze(1)).div_(tensors["temperature"].unsqueeze(1))  # at most 0
    scaled = F.threshold(scaled, _NOTHING, -torch.inf, inplace=True)  # or their powers are denormal numbers: slow on CPUs
    is_filtered = plan.num_filtered > 0 or plan.has_min_p
    weights = scaled.exp2() if is_filtered else scaled.exp2_()
    limit = None
    if plan.num_filtered:
        some = tensors.get("filtered_rows")
        if some is None:
            limit = thresholds(scaled, weights, plan, tensors)
        else:
            found = thresholds(scaled.index_select(0, some), weights.index_select(0, some), plan, tensors)
            limit = scaled.new_full((len(scaled),), -torch.inf).index_copy_(0, some, found)
    if plan.has_min_p:
        limit = tensors["log_min_p"] if limit is None else torch.maximum(limit, tensors["log_min_p"])
    if limit is not None:
        weights.mul_(torch.ge(scaled, limit.unsqueeze(1), out=torch.empty_like(scaled)))  # no bool: several times as fast
    missing = -weights.shape[1] % _BLOCK
    return F.pad(weights, (0, missing)) if missing else weights


def thresholds(scaled: torch.Tensor, weights: torch.Tensor, plan: SamplingPlan, tensors: Tensors) -> torch.Tensor:
    """The least scaled logit that top-k and top-p keep, float32 [filtered]. scaled [filtered,
    vocab], each row's greatest is 0; `weights` is 2 to its power."""
    vocab = scaled.shape[1]
    count = plan.max_top_k
    if plan.has_unlimited:  # how many top-p needs is known after a look at the values, which only the CPU has for nothing
        count = vocab if scaled.is_cuda else max(_FIRST_TOP_P, count)
    return _limits(scaled, weights.sum(dim=-1).double(), tensors["top_k"], tensors["top_p"], min(count, vocab))


def _limits(scaled: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, count: int) -> torch.Tensor:
    """The limits from the `count` greatest values of each row, and from more of them for the rows
    whose top-p needs more."""
    vocab = scaled.shape[1]
    values = scaled.topk(count, dim=-1).values if count < vocab else scaled.sort(dim=-1, descending=True).values
    has_k = top_k > 0
    last = torch.where(has_k, top_k, vocab).clamp_(max=count).sub_(1).unsqueeze(1)
    limit = values.gather(1, last).squeeze(1).masked_fill_(~has_k, -torch.inf)
    weights = values.double().exp2_()
    cumulated = weights.cumsum(dim=-1)
    wanted = top_p * torch.where(has_k, cumulated.gather(1, last).squeeze(1), mass)
    size = ((cumulated - weights) < wanted.unsqueeze(1)).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = values.gather(1, torch.minimum(size, last + 1) - 1).squeeze(1)
    limit = torch.maximum(limit, nucleus.masked_fill_(top_p >= 1.0, -torch.inf))
    if count < vocab and not scaled.is_cuda:
        short = (~has_k & (top_p < 1.0) & (cumulated[:, -1] < wanted)).nonzero().squeeze(1)
        if len(short):
            more = count * _MORE if count * _MORE < vocab // 2 else vocab
            limit[short] = _limits(scaled[short], mass[short], top_k[short], top_p[short], more)
    return limit


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probability of `token_ids` [n], ids [n, k] and log-probabilities [n, k] of the `num_top`
    likeliest) under logits [n, vocab]."""
    if kernels.can_use_triton(logits.device):
        from frame.kernels.sampling.logprobs import compute_logprobs

        return compute_logprobs(logits, token_ids, num_top)
    logits = logits.float()
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - normaliser
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen.squeeze(1), top.indices, top.values - normaliser
