"""`GroupedScheduler`: the schedulers of attention groups as one, for the engine's loop.

Each group has requests, slots and pages of its own. A step has one batch of each group, None for
one that has nothing to run; all ranks get all of them, so that they know the step's sizes. Must not
touch a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.sampling import Grammar
from frame.core.messages import Finish, FinishReason, Generate, StepTokens
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.request_outline import join_outlines
from frame.core.scheduling.scheduler import FailedRequests, Scheduler
from frame.parallel.replica_choice import ReplicaChooser, sum_loads

ALLOWED = -1  # a word of a grammar mask that allows all tokens


class GroupedScheduler:
    """Has the methods of `Scheduler` that the engine calls. A request stays in the group that it
    was given to, which `chooser` names."""

    def __init__(self, schedulers: Sequence[Scheduler], chooser: ReplicaChooser) -> None:
        self.config = schedulers[0].config
        self._schedulers = schedulers
        self._chooser = chooser
        self._step = 0

    def add_request(self, message: Generate, grammar: Grammar | None = None, arrival: float | None = None) -> Finish | None:
        """See `Scheduler.add_request`."""
        home = next((each for each in self._schedulers if each.has_request(message.rid)), None)
        if home is None:
            loads = {number: each.num_requests for number, each in enumerate(self._schedulers)}
            space = message.namespace + message.adapter
            home = self._schedulers[self._chooser.choose_replica(message.token_ids, space, loads, message.media)]
        return home.add_request(message, grammar, arrival)

    def abort(self, rids: Sequence[str], reason: FinishReason = "abort") -> None:
        for each in self._schedulers:
            each.abort(rids, reason)

    def abort_all(self, reason: FinishReason = "abort") -> None:
        for each in self._schedulers:
            each.abort_all(reason)

    def drain_outputs(self) -> StepTokens | None:
        outputs = [ended for each in self._schedulers if (ended := each.drain_outputs()) is not None]
        return join_tokens(outputs) if outputs else None

    def close(self) -> None:
        for each in self._schedulers:
            each.close()

    # steps ----------------------------------------------------------------------------------------

    def schedule_batch(self, now: float | None = None) -> ScheduledBatch | None:
        """The next step of all groups; None when no group has anything to run."""
        groups = [each.schedule_batch(now) for each in self._schedulers]
        batches = [group_batch for group_batch in groups if group_batch is not None]
        if not batches:
            return None
        batch = join_rows(batches)
        self._step += 1
        return msgspec.structs.replace(batch, step=self._step - 1, groups=groups)

    def poll_tiers(self, now: float) -> None:
        for each in self._schedulers:
            each.poll_tiers(now)

    def fill_deferred_mask(self, batch: ScheduledBatch) -> np.ndarray | None:
        """The masks of the groups whose masks are deferred, one after another; rows of the others
        allow all tokens."""
        pairs = [(each, group_batch) for each, group_batch in zip(self._schedulers, batch.groups, strict=True) if group_batch is not None]
        masks = [each.fill_deferred_mask(group_batch) if group_batch.has_deferred_grammar_mask else None for each, group_batch in pairs]
        width = max((mask.shape[1] for mask in masks if mask is not None), default=0)
        if not width:
            return None
        return np.concatenate([
            np.full((int(group_batch.samples.sum()), width), ALLOWED, np.int32) if mask is None else mask
            for mask, (_, group_batch) in zip(masks, pairs, strict=True)
        ])  # fmt: skip

    def commit(self, batch: ScheduledBatch, result: StepResult) -> StepTokens:
        """See `Scheduler.commit`."""
        every = zip(self._schedulers, batch.groups, result.groups, strict=True)
        return join_tokens([each.commit(group_batch, group_result) for each, group_batch, group_result in every if group_batch is not None])

    def fail_step(self, batch: ScheduledBatch, error: str) -> FailedRequests:
        """See `Scheduler.fail_step`."""
        pairs = zip(self._schedulers, batch.groups, strict=True)
        failed = [each.fail_step(group_batch, error) for each, group_batch in pairs if group_batch is not None]
        return replace(
            failed[0],
            ended=join_tokens([each.ended for each in failed]),
            retried=[rid for each in failed for rid in each.retried],
            is_first=any(each.is_first for each in failed),
        )

    @property
    def is_idle(self) -> bool:
        return all(each.is_idle for each in self._schedulers)

    def list_kv_managers(self) -> list[KVCacheManager]:
        """The manager of each group."""
        return [manager for each in self._schedulers for manager in each.list_kv_managers()]

    def publish_inflight(self, path: Path) -> None:
        first, *others = self._schedulers
        first.publish_inflight(path, others)

    # maintenance ----------------------------------------------------------------------------------

    def end_session(self, tenant: str, session: str) -> bool:
        return sum(each.end_session(tenant, session) for each in self._schedulers) > 0

    def flush_cache(self) -> int:
        return sum(each.flush_cache() for each in self._schedulers)

    def preempt_all(self) -> int:
        return sum(each.preempt_all() for each in self._schedulers)

    def change_weights(self, *, keeps_running: bool) -> int:
        return sum(each.change_weights(keeps_running=keeps_running) for each in self._schedulers)

    def admit_new_requests(self, allowed: bool) -> None:
        for each in self._schedulers:
            each.admit_new_requests(allowed)

    def count_started(self) -> int:
        return sum(each.count_started() for each in self._schedulers)

    def outline_cache(self, limit: int) -> dict[str, Any]:
        """That of the first group."""
        return self._schedulers[0].outline_cache(limit)

    def outline_requests(self, limit: int) -> dict[str, Any]:
        """See `Scheduler.outline_requests`."""
        return join_outlines([each.outline_requests(limit) for each in self._schedulers], limit)

    def get_load(self) -> dict[str, Any]:
        return sum_loads([each.get_load() for each in self._schedulers])

    def check_integrity(self) -> None:
        for each in self._schedulers:
            each.check_integrity()

    def audit_integrity(self) -> Iterator[None]:
        for each in self._schedulers:
            yield from each.audit_integrity()

    def repair_integrity(self) -> list[str]:
        return [sentence for each in self._schedulers for sentence in each.repair_integrity()]


def join_rows(batches: Sequence[ScheduledBatch]) -> ScheduledBatch:
    """A batch that tells of all rows of the parts, for what counts rows and tokens."""
    names = ("slots", "num_computed", "num_scheduled", "samples")
    joined: dict[str, Any] = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in names}
    return ScheduledBatch(
        step=0,
        num_decodes=sum(batch.num_decodes for batch in batches),
        token_ids=np.empty(0, np.int32),
        new_pages=np.empty((0, 3), np.int32),
        has_deferred_grammar_mask=any(batch.has_deferred_grammar_mask for batch in batches),
        **joined,
    )


def join_tokens(messages: Sequence[StepTokens]) -> StepTokens:
    """The tokens of several groups as one message; the entries by index are shifted."""
    if len(messages) == 1:
        return messages[0]
    joined: dict[str, Any] = {"rids": [], "token_ids": []}
    for message in messages:
        start = len(joined["rids"])
        for name in StepTokens.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, list):
                joined[name] += value
            else:
                joined.setdefault(name, {}).update({start + place: entry for place, entry in value.items()})
    return StepTokens(**joined)
