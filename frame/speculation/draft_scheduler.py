"""`DraftScheduler`: drafts of running requests, from the drafter to their verification (vLLM:
`propose_draft_token_ids`; SGLang: the EAGLE worker).

Implements `Speculation` for the scheduler. Works on arrays by slot. An error of the drafter ends
its use, not a request. Must not know a drafter by name, pages or the queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from frame.core.blame import describe, remedy
from frame.core.interfaces.batch import DraftOrder, SlotSetup
from frame.core.interfaces.device_drafter import DeviceDrafter
from frame.core.interfaces.drafter import MAX_STEPS, Drafter, Drafts, TreeShape
from frame.core.scheduling.request_slots import GRAMMAR, RequestTable
from frame.core.scheduling.running import StepRecord
from frame.core.scheduling.step_features import Speculation, StepGrammars
from frame.speculation.draft_lengths import DraftLengths

log = logging.getLogger(__name__)

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start."""

    num_drafts: int = 0  # rows with a draft
    num_drafted: int = 0  # tokens
    num_accepted: int = 0  # tokens
    seconds: float = 0.0  # in the drafter
    accepted_at: list[int] = field(default_factory=list)  # drafts whose token number i (from 0) was accepted


class DraftScheduler(Speculation):
    """The drafter and the slots that it drafts for. Without a drafter `is_active` is false, and no
    method is called."""

    def __init__(self, table: RequestTable, vocab_size: int, grammars: StepGrammars, *, may_overlap: bool = False) -> None:
        """may_overlap: see `SchedulerConfig.overlaps_drafts`."""
        self.stats = SpeculationStats()
        self._lengths = DraftLengths(table.num_slots, 0, is_adaptive=False)
        self._length: int | None = None  # the draft length of the next step; None: not chosen yet
        self._committed: tuple[int, int, float] | None = None  # the last step, if it had decodes only: number, length, time
        self._may_overlap = may_overlap
        self._on_device = np.zeros(table.num_slots, np.int32)  # by slot: tokens of the draft after its last scheduled token
        self._table = table
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._drafter: Drafter | None = None
        self._num_steps = 0
        self.tree: TreeShape | None = None  # None: drafts are chains
        self._last_token = np.zeros(table.num_slots, np.int32)  # by slot: the last committed output token
        self._max_tokens = np.zeros(table.num_slots, np.int32)  # by slot: maximum tokens of a draft; 0 without a request
        self._accepted_at = np.zeros(0, np.int64)  # of the step being committed: rows whose draft was accepted at each position, or node

    @property
    def is_active(self) -> bool:
        return self._drafter is not None

    @property
    def num_ahead(self) -> int:
        ahead = self._num_steps if self.tree is None else self.tree.num_extended + 1
        return ahead if isinstance(self._drafter, DeviceDrafter) else 0

    def enable(self, drafter: Drafter, num_steps: int, *, is_adaptive: bool = False, tree: TreeShape | None = None) -> None:
        self.tree = tree
        self._drafter, self._num_steps = drafter, num_steps
        self._lengths = DraftLengths(self._table.num_slots, num_steps, is_adaptive=is_adaptive, has_trees=tree is not None)
        self._accepted_at = np.zeros(num_steps, np.int64)
        self.stats.accepted_at = [0] * num_steps

    def update(self, setups: Sequence[SlotSetup], released: Sequence[int]) -> int:
        drafter = self._drafter
        if drafter is None:
            return 0
        length, self._length = self._choose_length(), None
        began = time.perf_counter()
        try:
            for slot in released:
                self._max_tokens[slot] = 0
                self._lengths.reset(slot)
                drafter.remove_slot(slot)
            for setup in setups:
                requested = setup.params.num_speculative_tokens
                self._max_tokens[setup.slot] = MAX_STEPS if requested is None else requested
                drafter.add_slot(self._with_keys(setup))
        except Exception as error:  # noqa: BLE001 - the output does not depend on drafts
            self._disable(drafter, error)
        self.stats.seconds += time.perf_counter() - began
        return length

    @property
    def next_length(self) -> int:
        return self._choose_length()

    def needs_order(self, *, has_prompts: bool) -> bool:
        """Whether a device drafter does anything after this step. In steps of decodes it stores no
        keys while the next steps have no drafts; drafts after them lack these keys, which may make
        them worse."""
        return self.num_ahead > 0 and (self._choose_length() > 0 or has_prompts or not self._lengths.is_idle)

    @property
    def overlaps(self) -> bool:
        return self._may_overlap and self.num_ahead > 0

    @property
    def may_draft(self) -> bool:
        return self._drafter is not None and self._choose_length() > 0

    def propose(self, slots: np.ndarray) -> Drafts | None:
        drafter, a = self._drafter, self._table.arrays
        if drafter is None or not slots.size or not self._choose_length():
            return None
        limits = np.minimum(np.minimum(self._lengths.limit(slots), self._max_tokens[slots]), self._choose_length())
        room = np.minimum(a.max_num_tokens[slots] - a.num_tokens[slots], limits)
        can_draft = (room > 0) & (a.num_committed_tokens[slots] + 1 == a.num_tokens[slots])
        chosen = np.flatnonzero(can_draft)
        if not chosen.size:
            return None
        began = time.perf_counter()
        try:
            drafts = _cut_placeholders(drafter.propose_tokens(slots[chosen], room[chosen]))
            self._check(drafts, room[chosen])
        except Exception as error:  # noqa: BLE001 - as above
            self._disable(drafter, error)
            return None
        finally:
            self.stats.seconds += time.perf_counter() - began
        drafts = self._grammars.trim_drafts(self._table, slots[chosen], drafts)
        if not drafts.counts.any():
            return None
        counts = np.zeros(len(slots), np.int32)
        counts[chosen] = drafts.counts
        return Drafts(drafts.token_ids, counts, drafts.parents)

    def note_order(self, slots: np.ndarray, order: DraftOrder | None) -> None:
        self._on_device[slots] = 0 if order is None else order.num_tokens

    def count_device_drafts(self, slots: np.ndarray) -> Drafts | None:
        if not slots.size or not self._choose_length():
            return None
        a, length = self._table.arrays, self._choose_length()
        limits = np.minimum(np.minimum(self._lengths.limit(slots), self._max_tokens[slots]), length)
        counts = np.minimum(np.minimum(a.max_num_tokens[slots] - a.num_tokens[slots], limits), self._on_device[slots]).clip(0)
        for i in np.flatnonzero(a.special[slots] & GRAMMAR).tolist():
            forced = getattr(self._table.get_request(int(slots[i])).grammar, "forced", ())  # the first one may be in flight
            counts[i] *= self.tree is None and len(forced) < 2
        return Drafts(np.zeros(int(counts.sum()), np.int32), counts.astype(np.int32)) if counts.any() else None

    def mask_device_drafts(self, slots: np.ndarray) -> np.ndarray | None:
        first = np.flatnonzero(np.diff(slots, prepend=-1))
        rows, counts = slots[first], np.diff(first, append=len(slots)) - 1
        chosen = (counts > 0) & (self._table.arrays.special[rows] & GRAMMAR != 0)
        if not chosen.any():
            return None
        rows, counts = rows[chosen], counts[chosen].astype(np.int32)
        drafts = Drafts(_NO_TOKENS, np.zeros_like(counts)) if self._drafter is None else self._drafter.propose_tokens(rows, counts)
        for slot in rows[drafts.counts < counts].tolist():  # the model of the drafter has failed
            if (request := self._table.requests[slot]) is not None:
                self._grammars.stop_request(request)
        limits = np.full(self._table.num_slots, MAX_STEPS + 1, np.int32)
        limits[rows] = self._grammars.trim_drafts(self._table, rows, drafts, is_late=True).counts + 1
        return limits

    def bound_accepted(self, counts: np.ndarray) -> np.ndarray:
        return counts if self.tree is None else np.minimum(counts, self.tree.depth)

    def fill_rows(self, slots: np.ndarray, drafts: Drafts) -> np.ndarray:
        ends = np.cumsum(drafts.counts + 1)
        firsts = ends - drafts.counts - 1
        token_ids = np.empty(int(ends[-1]), np.int32)
        is_drafted = np.ones(len(token_ids), np.bool_)
        is_drafted[firsts] = False
        token_ids[firsts] = self._last_token[slots]
        token_ids[is_drafted] = drafts.token_ids
        return token_ids

    def observe(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        drafter = self._drafter
        if drafter is None or not slots.size:
            return
        self._last_token[slots] = token_ids[np.arange(len(slots)), counts - 1]
        began = time.perf_counter()
        try:
            drafter.observe_tokens(slots, token_ids, counts)
        except Exception as error:  # noqa: BLE001 - as above
            self._disable(drafter, error)
        self.stats.seconds += time.perf_counter() - began

    def store(self, slots: np.ndarray, drafts: np.ndarray | None) -> None:
        if drafts is None:
            self._may_overlap = False
        elif isinstance(self._drafter, DeviceDrafter):
            self._drafter.store_drafts(slots, drafts)

    def record_step(self, record: StepRecord, now: float) -> None:
        length, drafts = record.draft_length, record.num_drafts
        rows = record.num_decodes if drafts is None else record.num_decodes + int(np.count_nonzero(drafts))
        self._lengths.observe(rows, length, self._accepted_at)
        self._accepted_at[:] = 0
        before, self._committed = self._committed, None
        if rows == len(record.slots):
            self._committed = (record.step, length, now)
            is_typical = length > 0 or not record.is_followed  # a length of 0 in use has an idle drafter
            if is_typical and before is not None and before[:2] == (record.step - 1, length):
                self._lengths.record(rows, length, 0 if drafts is None else int(drafts.sum()), now - before[2])

    def count(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, nodes: np.ndarray | None = None) -> None:
        has_draft = drafted > 0
        chosen = None if nodes is None else nodes[:, 1:][np.arange(1, nodes.shape[1]) <= accepted[:, None]]
        stats, drafted, accepted = self.stats, drafted[has_draft], accepted[has_draft]
        self._lengths.count(slots[has_draft], drafted, accepted)
        stats.num_drafts += len(accepted)
        stats.num_drafted += int(drafted.sum())
        stats.num_accepted += int(accepted.sum())
        for place in range(int(accepted.max(initial=0))):
            self._accepted_at[place] = np.count_nonzero(accepted > place)
            stats.accepted_at[place] += int(self._accepted_at[place])
        if chosen is not None:
            self._accepted_at[:] = np.bincount(chosen - 1, minlength=self._num_steps)

    def describe_load(self) -> dict[str, Any]:
        stats = self.stats
        return {
            "num_drafts": stats.num_drafts,
            "drafted_tokens": stats.num_drafted,
            "accepted_tokens": stats.num_accepted,
            "accepted_at": list(stats.accepted_at),
            "drafter_seconds": round(stats.seconds, 6),
        }

    def _choose_length(self) -> int:
        if self._length is None:
            num_rows = self._table.num_slots - self._table.num_free
            self._length = self._lengths.choose(num_rows) if self._max_tokens.any() else 0
        return self._length

    def _with_keys(self, setup: SlotSetup) -> SlotSetup:
        """The setup with the cache keys of placeholders, so that different media are no equal
        context."""
        request = self._table.requests[setup.slot]
        if request is None or request.prompt_keys is None:
            return setup
        return replace(setup, token_ids=request.content_keys(setup.token_ids))

    def _check(self, drafts: Drafts, room: np.ndarray) -> None:
        """Raise ValueError for drafts that cannot be verified."""
        counts, token_ids = drafts.counts, drafts.token_ids
        if len(counts) != len(room) or (counts < 0).any() or (counts > room).any():
            raise ValueError(f"it drafted {counts.tolist()} tokens for {len(room)} slots, which may have {room.tolist()}")
        if len(token_ids) != int(counts.sum()):
            raise ValueError(f"it returned {len(token_ids)} tokens for drafts of {int(counts.sum())}")
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self._vocab_size:
            raise ValueError(f"it drafted a token outside of the vocabulary of {self._vocab_size} tokens")
        parents = drafts.parents
        if parents is None:
            return
        if self.tree is None:
            raise ValueError("it drafted a tree, and this engine verifies chains alone")
        if len(parents) != len(token_ids) or (parents < 0).any() or (parents > drafts.offsets).any():
            raise ValueError("it drafted a tree in which a token does not follow an earlier one of its draft")

    def _disable(self, drafter: Drafter, error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"
        log.error("%s failed and is not used any more: %s; %s", describe(drafter), problem, remedy(drafter), exc_info=error)
        self._drafter = None


def _cut_placeholders(drafts: Drafts) -> Drafts:
    """The drafts up to the first placeholder, which a drafter has copied from a prompt."""
    is_placeholder = drafts.token_ids < -1  # as cache keys are; -1 is a fault of the drafter
    if not is_placeholder.any() or len(drafts.token_ids) != int(drafts.counts.sum()):
        return drafts
    counts = drafts.counts.copy()
    np.minimum.at(counts, np.repeat(np.arange(len(counts)), drafts.counts)[is_placeholder], drafts.offsets[is_placeholder])
    return drafts.shorten(counts)
