"""Sampling parameters by request slot, and the plan of one step's sampling as host arrays.

The host decides which work a step has (sampling, filters, log-probabilities), so that the device is
never queried. It also makes the key of each row's draw, a counter-based hash of (seed, position).
The sampler hashes the noise of each token id from the key, so a token depends on its seed, position
and distribution only. For `SamplingPlanner` and the sampler. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

import numpy as np

from frame.core.sampling.batch_layout import A

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ScheduledBatch, SlotSetup
    from frame.core.sampling.batch_layout import BatchLayout
    from frame.core.sampling.logits_pipeline import ProcessorArrays

_ROW = np.dtype(
    [
        ("temperature", "f4"),  # multiplied by ln 2: the sampler uses powers of 2
        ("top_p", "f4"),
        ("log_min_p", "f4"),  # base-2 logarithm
        ("top_k", "i4"),  # 0: off
        ("seed", "u8"),  # hashed
        ("logprobs", "i2"),  # -1: none
        ("prompt_logprobs", "i2"),  # -1: none
    ]
)
PARAMETERS = ("temperature", "key", "top_k", "top_p", "log_min_p")  # of a draw by row; the last three are present together
_GREEDY_BELOW = 1e-5  # lower temperatures count as 0: a division by them overflows
_MIN_TOP_P = 1e-6  # keeps only the likeliest token, as any smaller value does; values below 1e-38 are 0 on the device


@dataclass(slots=True)
class DrawArrays(Generic[A]):
    """The parameters of the draws: of the drawn rows, or of every row if `SamplingPlan.by_row`."""

    temperature: A  # float32 [n]; times ln 2; 0: greedy
    key: A  # int64 [n]
    rows: A | None = None  # int64 [n]; the drawn rows; None: every row has parameters
    log_min_p: A | None = None  # float32 [n]; None: no row uses min-p


@dataclass(slots=True)
class FilterArrays(Generic[A]):
    """The top-k and top-p of the filtered rows, or of every row if `SamplingPlan.by_row`."""

    top_k: A  # integer [n]; 0: off
    top_p: A  # [n]
    rows: A | None = None  # int64 [n]; indices of the filtered rows among the drawn ones; None: all are


@dataclass(slots=True)
class GrammarArrays(Generic[A]):
    """The rows that a grammar mask limits."""

    rows: A  # int64 [n]
    mask: A  # int32 [n, ceil(vocab / 32)]; a set bit allows the token


@dataclass(slots=True)
class SamplingArrays(Generic[A]):
    """What the sampler reads of one step, on the host or on the device."""

    slots: A | None = None  # int64 [rows]; None: the samples are those of the batch's rows, in order
    draw: DrawArrays[A] | None = None  # None: all rows are greedy
    filters: FilterArrays[A] | None = None  # None: no row uses top-k or top-p
    logprob_rows: A | None = None  # int64 [n]; rows with log-probabilities; None: no row has any
    listed_ids: A | None = None  # int64 [n, m]; of `logprob_rows`: tokens with log-probabilities, filled up with 0; None: there are none
    grammar: GrammarArrays[A] | None = None  # None: no row is limited
    processing: ProcessorArrays[A] | None = None  # None: no row uses a logits processor

    def list_parameters(self) -> dict[str, A]:
        """The parameters of a `SamplingPlan` with `by_row`, by the names of `PARAMETERS`."""
        if self.draw is None:
            return {}
        named = {"temperature": self.draw.temperature, "key": self.draw.key}
        if self.filters is not None and self.draw.log_min_p is not None:
            named |= {"top_k": self.filters.top_k, "top_p": self.filters.top_p, "log_min_p": self.draw.log_min_p}
        return named


@dataclass(slots=True, kw_only=True)
class SamplingPlan:
    """The sampler's work in one step.

    Rows are the step's samples, in order. A row is drawn (temperature above 0) or greedy; some
    drawn rows are filtered by top-k or top-p. Each parameter in `arrays` covers the rows that use
    it, or every row if `by_row`.
    """

    slots: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]; of the tokens to sample
    num_drawn: int
    num_filtered: int  # of the drawn rows
    max_top_k: int  # of the filtered rows; 0: none uses top-k
    has_unlimited: bool  # a filtered row uses top-p without top-k
    has_min_p: bool
    num_top_logprobs: int
    by_row: bool  # whether the parameters in `arrays` cover every row
    arrays: SamplingArrays[np.ndarray]
    # what a decode graph draws with: temperature (0: greedy) and key of each sampling row, and the
    # filters if a row has one; empty: the sampler draws the tokens
    draws: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def logprob_rows(self) -> np.ndarray | None:
        return self.arrays.logprob_rows

    @property
    def is_plain(self) -> bool:
        """Whether temperature, key and filters by row are the only parameters of the step."""
        filters = self.num_filtered or self.has_min_p
        return (self.by_row or not filters) and self.logprob_rows is None and self.arrays.grammar is None


class SamplingTable:
    """Sampling parameters by slot, on the host. Call `update` before a step's `plan`."""

    def __init__(self, num_slots: int, *, by_row: bool = False) -> None:
        """by_row: plans contain each parameter for every row, see `Sampler.by_row`."""
        self._by_row = by_row
        self._rows = np.zeros(num_slots, _ROW)
        self._prompts: dict[int, np.ndarray] = {}
        self._with_states: set[int] = set()  # slots whose requests return hidden states
        self._listed_ids: dict[int, tuple[int, ...]] = {}  # `logprob_token_ids` of the slots with any

    def update(self, setups: Sequence[SlotSetup], released: Sequence[int]) -> None:
        """Store the parameters of new slots; drop the prompts of released ones."""
        for slot in released:
            self._prompts.pop(slot, None)
            self._with_states.discard(slot)
            self._listed_ids.pop(slot, None)
        if not setups:
            return
        rows = np.array([_row(setup) for setup in setups], _ROW)
        rows["seed"] = _mix(rows["seed"])
        self._rows[[setup.slot for setup in setups]] = rows
        for setup in setups:
            if setup.params.prompt_logprobs is not None:
                self._prompts[setup.slot] = setup.token_ids[: setup.prompt_len]
            if setup.params.return_hidden_states:
                self._with_states.add(setup.slot)
            if setup.params.logprob_token_ids:
                self._listed_ids[setup.slot] = setup.params.logprob_token_ids

    def prompt(self, slot: int) -> np.ndarray:
        """The prompt of a slot with prompt log-probabilities, int32."""
        return self._prompts[slot]

    def returns_states(self, slot: int) -> bool:
        """Whether the slot's request returns hidden states."""
        return slot in self._with_states

    def num_top_prompt_logprobs(self, slot: int) -> int:
        return int(self._rows["prompt_logprobs"][slot])

    def plan_drafts(self, slots: np.ndarray, positions: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """What a device drafter draws with: temperature of each slot, float32 [n] (0: greedy), and
        the keys of `width` positions from `positions` on, int64 [n, width]. slots: int64 [n]."""
        rows = self._rows.take(slots)
        keys = _keys(rows["seed"][:, None], positions[:, None] + np.arange(width))
        return np.ascontiguousarray(rows["temperature"]), keys

    def begin_step(self, batch: ScheduledBatch, layout: BatchLayout, *, draws: bool) -> SamplingPlan:
        """`update`, and the plan of the step. draws: a decode graph draws the tokens of a step that
        `is_plain`."""
        self.update(batch.setups, batch.released)
        slots, positions = layout.sample_slots, layout.sample_positions
        plan = self.plan_samples(slots, positions, batch.grammar_mask)
        if draws and plan.is_plain:
            if plan.by_row:
                plan.draws = plan.arrays.list_parameters()
            else:
                rows = self._rows.take(slots)
                plan.draws = {"temperature": rows["temperature"], "key": _keys(rows["seed"], positions)}
        return plan

    def plan_samples(self, slots: np.ndarray, positions: np.ndarray, mask: np.ndarray | None) -> SamplingPlan:
        """Build the plan of samples in these slots at these positions, both int64 [n]. mask: int32
        [n, words], or None."""
        rows = self._rows.take(slots)  # for structured arrays, many times as fast as indexing
        (drawn,) = rows["temperature"].nonzero()
        (logprob_rows,) = (rows["logprobs"] >= 0).nonzero()
        chosen = rows if len(drawn) == len(rows) else rows.take(drawn)
        (filtered,) = ((chosen["top_k"] > 0) | (chosen["top_p"] < 1.0)).nonzero()
        has_min_p = bool(len(drawn)) and bool(np.isfinite(chosen["log_min_p"]).any())
        top_k = chosen["top_k"][filtered] if len(filtered) else np.empty(0, np.int32)
        draw = filters = None
        if self._by_row:
            draw = DrawArrays(np.ascontiguousarray(rows["temperature"]), _keys(rows["seed"], positions))
            if has_min_p or len(filtered):
                draw.log_min_p = np.ascontiguousarray(rows["log_min_p"])
                filters = FilterArrays(np.ascontiguousarray(rows["top_k"]), np.ascontiguousarray(rows["top_p"]))
        elif len(drawn):
            draw = DrawArrays(np.ascontiguousarray(chosen["temperature"]), _keys(chosen["seed"], positions[drawn]))
            if len(drawn) != len(slots):
                draw.rows = drawn
            if has_min_p:
                draw.log_min_p = np.ascontiguousarray(chosen["log_min_p"])
            if len(filtered):
                some = None if len(filtered) == len(drawn) else filtered
                filters = FilterArrays(top_k.astype(np.int64), chosen["top_p"][filtered].astype(np.float64), some)
        arrays = SamplingArrays(
            draw=draw,
            filters=filters,
            logprob_rows=logprob_rows if len(logprob_rows) else None,
            listed_ids=self._list_ids(slots[logprob_rows]) if self._listed_ids else None,
            grammar=None if mask is None else find_limited_rows(mask),
        )
        return SamplingPlan(
            slots=slots,
            positions=positions,
            num_drawn=len(drawn),
            num_filtered=len(filtered),
            max_top_k=int(top_k.max()) if len(filtered) else 0,
            has_unlimited=len(filtered) > 0 and bool((top_k == 0).any()),
            has_min_p=has_min_p,
            num_top_logprobs=int(rows["logprobs"].max()) if len(logprob_rows) else 0,
            by_row=self._by_row,
            arrays=arrays,
        )

    def _list_ids(self, slots: np.ndarray) -> np.ndarray | None:
        """The `logprob_token_ids` of these slots, int64 [n, m], filled up with 0; None: none has
        any."""
        listed = [self._listed_ids.get(slot, ()) for slot in slots.tolist()]
        if not (width := max(map(len, listed), default=0)):
            return None
        ids = np.zeros((len(listed), width), np.int64)
        for row, each in zip(ids, listed, strict=True):
            row[: len(each)] = each
        return ids


NUM_FIRST_WORDS = 8  # of a mask that are checked before all others


def find_limited_rows(mask: np.ndarray) -> GrammarArrays[np.ndarray] | None:
    """The rows that a grammar mask limits; None: it limits none."""
    # most masks forbid the special tokens, which are the last ones, or one of the first
    is_limited = (mask[:, -1] != -1) | (mask[:, :NUM_FIRST_WORDS] != -1).any(axis=1)
    others = np.flatnonzero(~is_limited)
    is_limited[others] = np.bitwise_and.reduce(mask[others], axis=1) != -1
    rows = np.flatnonzero(is_limited)
    if len(rows) == len(mask):  # nothing to copy
        return GrammarArrays(rows, mask)
    return GrammarArrays(rows, mask[rows]) if len(rows) else None


def draw_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The key of the draw of each pair, 64 random bits as int64: the finaliser of splitmix64
    (Steele et al. 2014) over seed and position. Whatever draws a token for a seed and a position
    uses this key."""
    return _keys(_mix(seeds.astype(np.uint64)), positions)


def _keys(mixed_seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    mixed = _mix(mixed_seeds + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))  # unsigned arrays wrap around
    return mixed.view(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _row(setup: SlotSetup) -> tuple[float, float, float, int, int, int, int]:
    params = setup.params
    return (
        params.temperature * math.log(2.0) if params.temperature >= _GREEDY_BELOW else 0.0,
        max(params.top_p, _MIN_TOP_P),
        math.log2(params.min_p) if params.min_p > 0.0 else -math.inf,
        max(params.top_k, 0),
        setup.seed & 0xFFFF_FFFF_FFFF_FFFF,
        -1 if params.logprobs is None else params.logprobs,
        -1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )
