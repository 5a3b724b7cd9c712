"""Jobs of a tier and the threads that do them: the base of the tiers of this folder. Must not know
where blocks are."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from frame.core.interfaces.kv_tier import KVTier, KVTierResult

if TYPE_CHECKING:
    import torch

    from frame.plugins.kv_tiers.block_index import BlockIndex

CLOSE_SECONDS = 1.0
MAX_JOBS = 1024  # that are under way at the same time
_TASK_BLOCKS = 8  # of one job, which a thread does in turn

_log = logging.getLogger(__name__)


class BlockError(Exception):
    """A block cannot be loaded or stored: one sentence for the log."""


@dataclass(eq=False, slots=True)
class TierJob:
    """A load or a store. Threads read it and write no field."""

    number: int
    keys: Sequence[bytes]
    buffers: Sequence[torch.Tensor | None]
    is_store: bool
    blocks: Sequence[Any] = ()  # of a load: those that the index has
    is_finished: bool = False  # the caller has returned the buffers
    num_pending: int = 0  # tasks whose results have not been collected
    is_checked_early: bool = False  # of a store: its tasks began before `finish`
    errors: dict[int, str] = field(default_factory=dict)  # by index in `keys`

    @property
    def is_abandoned(self) -> bool:
        """A load whose result nothing waits for."""
        return self.is_finished and not self.is_store


J = TypeVar("J", bound=TierJob)


class Workers:
    """Daemon threads that run tasks in the order of their submission."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_stopped = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def stop(self) -> None:
        """Skip the tasks that have not begun."""
        self._is_stopped = True
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the threads have ended, or for the time `deadline` of the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not self._is_stopped:
                task()


class ThreadedTier(KVTier, Generic[J]):
    """Numbers, tasks and results of jobs. A subclass has the blocks, and says in `_move_block` what
    a thread does for one of them."""

    _index: BlockIndex[Any]
    _task_blocks = _TASK_BLOCKS

    def _start_jobs(self, *workers: Workers) -> None:
        """Prepare for jobs that these threads do; called by a constructor."""
        self._workers = workers
        self._jobs: dict[int, J] = {}  # loads until `finish`, stores until `poll`
        self._ended: list[J] = []  # that `poll` has not returned
        self._results: SimpleQueue[tuple[J, dict[int, str]]] = SimpleQueue()

    @abstractmethod
    def _move_block(self, job: J, index: int) -> None:
        """In a thread: read, write or check a block that has a buffer. Raises BlockError."""

    @abstractmethod
    def _record_result(self, job: J) -> None:
        """Enter the result of a job that has ended in the index; of a store, its buffers are free
        as well."""

    @abstractmethod
    def _release_load(self, job: J) -> None:
        """The buffers of a load are free: neither the caller nor a thread uses them."""

    @abstractmethod
    def _cancel_store(self, job: J) -> None:
        """The buffers of a store are free, and none of its blocks is kept."""

    def finish(self, job: int, *, commit: bool = True) -> None:
        entry = self._jobs[job]
        if entry.is_finished:
            raise ValueError(f"job {job} is finished twice")
        entry.is_finished = True
        if not entry.is_store:
            del self._jobs[job]
            if not entry.num_pending:
                self._release_load(entry)
        elif commit and not entry.is_checked_early:
            self._submit_tasks(entry, self._workers[-1])
        elif commit:
            if not entry.num_pending:
                self._ended.append(entry)
        else:
            del self._jobs[job]
            self._cancel_store(entry)

    def poll(self) -> list[KVTierResult]:
        self._collect_results()
        ended, self._ended = self._ended, []
        results = []
        for job in ended:
            if job.is_abandoned:
                continue
            self._record_result(job)
            if job.is_store:
                del self._jobs[job.number]
            first = min(job.errors, default=len(job.keys))
            results.append(KVTierResult(job.number, first, job.errors.get(first, "")))
        return results

    def list_removed(self) -> list[bytes]:
        return self._index.take_removed()

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        for workers in self._workers:
            workers.stop()
        for workers in self._workers:
            workers.join(deadline)
        while not self._results.empty():  # which hold buffers
            self._results.get()
        self._jobs.clear()
        self._ended.clear()

    def _add_job(self, job: J) -> None:
        if job.number in self._jobs:
            raise ValueError(f"job {job.number} is under way")
        self._jobs[job.number] = job

    def _begin_load(self, job: J) -> Sequence[torch.Tensor]:
        """Mark the blocks of a load as used, and let threads read them. -> its buffers."""
        self._add_job(job)
        self._index.add_users(job.keys, job.blocks)
        self._submit_tasks(job, self._workers[0])
        return cast("Sequence[torch.Tensor]", job.buffers)

    def _submit_tasks(self, job: J, workers: Workers) -> None:
        """Let threads move the blocks of a job that have a buffer."""
        moved = [index for index, buffer in enumerate(job.buffers) if buffer is not None]
        tasks = [moved[start : start + self._task_blocks] for start in range(0, len(moved), self._task_blocks)] or [[]]
        job.num_pending = len(tasks)
        for task in tasks:
            workers.submit(partial(self._move_blocks, job, task))

    def _move_blocks(self, job: J, indexes: Sequence[int]) -> None:
        errors = {}
        for index in indexes:
            if job.is_abandoned:
                break
            try:
                self._move_block(job, index)
            except BlockError as error:
                errors[index] = str(error)
            except Exception as error:  # noqa: BLE001 - a defect fails the job, not the thread
                _log.exception("A KV cache tier cannot move a block")
                errors[index] = f"the tier has failed: {error!r}"
        self._results.put((job, errors))

    def _collect_results(self) -> None:
        """Take what threads have done; the index changes in `poll` alone."""
        while not self._results.empty():
            job, errors = self._results.get()
            job.num_pending -= 1
            job.errors |= errors
            if job.num_pending:
                continue
            if job.is_abandoned:
                self._release_load(job)
            elif job.is_finished or not job.is_store:
                self._ended.append(job)
