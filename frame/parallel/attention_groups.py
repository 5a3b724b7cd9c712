"""Steps of attention groups: `GroupRunner` runs the batch of its rank's group, padded so that all
groups compute equal numbers of tokens, and `LeadingGroupRunner` joins the groups' results.

A group without requests computes padding alone. The sizes follow from the batches of all groups,
which every rank gets, so no rank waits for another one to learn them. Must not know a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.runner import DeviceLost, ModelRunner, PendingStep, UnsampledStep, WrappedRunner
from frame.parallel.rank_channels import BatchSender, GrammarMask, ResultReceiver
from frame.parallel.rank_watch import RankWatch
from frame.parallel.tp_follower import LeadingRunner, watch_wait

_NO_TOKENS = np.empty(0, np.int32)


def pad_group(groups: Sequence[ScheduledBatch | None], number: int, padding_slot: int, max_context: int) -> ScheduledBatch:
    """The batch of group `number`, with as many tokens as those of the other groups.

    If no group has a prompt, decodes in the padding slot are added, so that all groups replay the
    same graph. Otherwise each group gets prompts in the padding slot, of at most `max_context`
    tokens, and at least one if it has none of its own. None of the added rows samples.
    """
    batch = groups[number]
    padded = _idle_batch(groups) if batch is None else batch
    sizes = [0 if each is None else int(each.num_scheduled.sum()) for each in groups]
    prompts = [each is not None and len(each.slots) > each.num_decodes for each in groups]
    if not any(prompts):
        missing = max(sizes) - sizes[number]
        return _add_rows(padded, padding_slot, np.ones(missing, np.int32), is_decode=True)
    missing = max(size + (not has_prompt) for size, has_prompt in zip(sizes, prompts, strict=True)) - sizes[number]
    lengths = [min(max_context, missing - start) for start in range(0, missing, max_context)]
    return _add_rows(padded, padding_slot, np.array(lengths, np.int32), is_decode=False)


def _idle_batch(groups: Sequence[ScheduledBatch | None]) -> ScheduledBatch:
    step = max(each.step for each in groups if each is not None)
    nothing: dict[str, Any] = dict.fromkeys(("slots", "num_computed", "num_scheduled", "token_ids"), _NO_TOKENS)
    return ScheduledBatch(step=step, num_decodes=0, samples=np.empty(0, np.bool_), new_pages=np.empty((0, 3), np.int32), **nothing)


def _add_rows(batch: ScheduledBatch, slot: int, lengths: np.ndarray, *, is_decode: bool) -> ScheduledBatch:
    """The batch with rows of these numbers of tokens in `slot` behind its own."""
    rows = len(lengths)
    if not rows:
        return batch
    nothing = np.zeros(rows, np.bool_)
    arrays = {name: getattr(batch, name) for name in ("prompt_logprobs", "skip_kv_store")}
    flags = {name: np.concatenate((array, nothing)) for name, array in arrays.items() if array is not None}
    return replace(
        batch,
        num_decodes=batch.num_decodes + (rows if is_decode else 0),
        slots=np.concatenate((batch.slots, np.full(rows, slot, np.int32))),
        num_computed=np.concatenate((batch.num_computed, np.zeros(rows, batch.num_computed.dtype))),
        num_scheduled=np.concatenate((batch.num_scheduled, lengths.astype(batch.num_scheduled.dtype))),
        token_ids=batch.token_ids if is_decode else np.concatenate((batch.token_ids, np.zeros(lengths.sum(), batch.token_ids.dtype))),
        samples=np.concatenate((batch.samples, nothing)),
        **flags,
    )


class GroupRunner(WrappedRunner):
    """One rank's runner of group `number`."""

    def __init__(self, runner: ModelRunner, number: int, padding_slot: int, max_context: int) -> None:
        super().__init__(runner)
        self._number = number
        self._padding_slot = padding_slot
        self._max_context = max_context

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        return super().launch(pad_group(batch.groups, self._number, self._padding_slot, self._max_context))


class LeadingGroupRunner(LeadingRunner):
    """Rank 0's runner, of group 0. `results`: those of each other group."""

    def __init__(
        self, runner: GroupRunner, followers: BatchSender, results: Sequence[ResultReceiver], watch: RankWatch | None = None
    ) -> None:
        super().__init__(runner, followers, None, watch)
        self._group_results = results

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        step = GroupedStep(super().launch(batch), batch, self._group_results, self._watch)
        return UnsampledGroupedStep(step, self._followers) if batch.has_deferred_grammar_mask else step

    def close(self) -> None:
        super().close()
        for each in self._group_results:
            each.close()


class GroupedStep:
    """A step of all groups; `local` is that of group 0."""

    def __init__(self, local: PendingStep, batch: ScheduledBatch, results: Sequence[ResultReceiver], watch: RankWatch | None) -> None:
        self.local = local
        self.batch = batch
        self._results = results
        self._watch = watch

    def wait(self) -> StepResult:
        results = [self.local.wait()]
        idle = _idle_batch(self.batch.groups).step
        try:
            with watch_wait(self._watch, "the results of groups"):
                for batch, receiver in zip(self.batch.groups[1:], self._results, strict=True):
                    results.append(receiver.receive(idle if batch is None else batch.step))
        except Exception as error:
            raise DeviceLost(f"step {self.batch.step} failed in an attention group: {error}") from error
        return StepResult(step=self.batch.step, token_ids=_NO_TOKENS, groups=results)


class UnsampledGroupedStep(UnsampledStep):
    """A step in which the tokens of some groups are drawn with a deferred mask."""

    def __init__(self, step: GroupedStep, followers: BatchSender) -> None:
        self._step = step
        self._followers = followers

    def sample(self, mask: np.ndarray | None) -> None:
        start = 0
        for number, batch in enumerate(self._step.batch.groups):
            if batch is None:
                continue
            rows = slice(start, start := start + int(batch.samples.sum()))
            if not batch.has_deferred_grammar_mask:
                continue
            group_mask = None if mask is None else mask[rows]
            if number:
                self._followers.send_order(GrammarMask(group_mask, number))
            elif isinstance(self._step.local, UnsampledStep):
                self._step.local.sample(group_mask)

    def wait(self) -> StepResult:
        return self._step.wait()
