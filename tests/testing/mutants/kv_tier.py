"""KV cache tiers with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from frame.core.interfaces.kv_tier import KVTier, KVTierCapabilities, KVTierContext, KVTierResult
from frame.plugins.kv_tiers.block_files import BlockFiles
from frame.plugins.kv_tiers.disk import DiskTier
from frame.plugins.kv_tiers.host import HostTier
from tests.testing.mutants import MutantList, kv_tier_use


class Options(BaseModel):
    max_blocks: int = 1000


@dataclass(eq=False, slots=True)
class Job:
    """A load or a store that has begun."""

    keys: tuple[bytes, ...]
    buffers: Sequence[torch.Tensor | None]
    is_store: bool
    result: KVTierResult | None = None  # that `poll` returns next


class DictTier(KVTier):
    """Holds `max_blocks` blocks in memory."""

    def __init__(self, context: KVTierContext, options: Options | None = None) -> None:
        self.context = context
        self.max_blocks = (options or Options()).max_blocks
        self.blocks: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # the least recently used first
        self.jobs: dict[int, Job] = {}
        self.storing: set[bytes] = set()  # keys that have a buffer in a job
        self.free: list[torch.Tensor] = []  # buffers that no job uses

    @staticmethod
    def make_conformance_options(folder: Path, num_blocks: int, context: KVTierContext) -> Options:
        """The options with which the conformance suite builds a tier of `num_blocks` blocks; one
        with files has them in `folder`."""
        return Options(max_blocks=num_blocks)

    def match(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.blocks), len(keys))

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        buffers = [self.take_buffer() for _ in keys]
        count = self.match(keys)
        for key, buffer in reversed(list(zip(keys[:count], buffers, strict=False))):
            buffer.copy_(self.blocks[key])
            self.blocks.move_to_end(key)
        error = "" if count == len(keys) else "the tier does not hold the block any more"
        self.jobs[job] = Job(tuple(keys), buffers, False, KVTierResult(job, count, error))
        return buffers

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        buffers: list[torch.Tensor | None] = []
        for key in keys:
            is_new = key not in self.blocks and key not in self.storing
            buffers.append(self.take_buffer() if is_new else None)
            if is_new:
                self.storing.add(key)
        self.jobs[job] = Job(tuple(keys), buffers, True)
        return buffers

    def finish(self, job: int, *, commit: bool = True) -> None:
        entry = self.jobs[job]
        if entry.is_store and commit:
            entry.result = KVTierResult(job, len(entry.keys))
        else:
            self.end_job(job)

    def poll(self) -> list[KVTierResult]:
        results = []
        for job, entry in list(self.jobs.items()):
            if entry.result is not None:
                results.append(entry.result)
                entry.result = None
                if entry.is_store:
                    self.keep_blocks(entry)
                    self.end_job(job)
        return results

    def close(self) -> None:
        self.blocks.clear()
        self.jobs.clear()
        self.free.clear()

    def take_buffer(self) -> torch.Tensor:
        return self.free.pop() if self.free else self.context.allocate(self.context.block_bytes)

    def keep_blocks(self, entry: Job) -> None:
        """The first block of a job is the most recently used one: later ones are no use without
        it."""
        for key, buffer in reversed(list(zip(entry.keys, entry.buffers, strict=True))):
            if buffer is not None:
                self.blocks[key] = buffer.clone()
            elif key in self.blocks:
                self.blocks.move_to_end(key)
        while len(self.blocks) > self.max_blocks:
            self.blocks.popitem(last=False)

    def end_job(self, job: int) -> None:
        entry = self.jobs.pop(job)
        for key, buffer in zip(entry.keys, entry.buffers, strict=True):
            if buffer is not None:
                self.free.append(buffer)
                if entry.is_store:
                    self.storing.discard(key)


mutant = MUTANTS = MutantList("kv_tier", reference=DictTier, capabilities=KVTierCapabilities())
PERSISTENT = KVTierCapabilities(persistent=True, shared=True)


class ChangesKeys(DictTier):
    """Stores and matches by a part of the key."""

    def change(self, key: bytes) -> bytes:
        raise NotImplementedError

    def match(self, keys: Sequence[bytes]) -> int:
        return super().match([self.change(key) for key in keys])

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        return super().load(job, [self.change(key) for key in keys])

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        return super().store(job, [self.change(key) for key in keys])


mutant.each(
    ChangesKeys, "change",
    ("KeysOfSixteenBytes", "Keys that are equal in their first 16 bytes are taken for each other.", lambda _, key: key[:16]),
    ("KeysWithoutTheirHead", "Keys that are equal in their last 16 bytes are taken for each other.", lambda _, key: key[-16:]),
    ("KeysOfThirtyOneBytes", "The last byte of a key is ignored.", lambda _, key: key[:31]),
)  # fmt: skip


class ChangesLoads(DictTier):
    """Changes the buffers of a load."""

    def change(self, keys: Sequence[bytes], buffers: Any) -> Any:
        raise NotImplementedError

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        return self.change(keys, super().load(job, keys))  # type: ignore[no-any-return]


def fill_later(buffers: Any) -> Any:
    """Zeros, which threads fill with the blocks after a while."""
    contents = [buffer.clone() for buffer in buffers]

    def fill() -> None:
        for buffer, content in zip(buffers, contents, strict=True):
            buffer.copy_(content)

    for buffer in buffers:
        buffer.zero_()
    threading.Timer(0.05, fill).start()
    return buffers


def change_first(buffers: Any, change: Any) -> Any:
    """The first buffer has other bytes."""
    change(buffers[0])
    return buffers


mutant.each(
    ChangesLoads, "change",
    ("AnotherKeysBlock", "The last two blocks of a load are swapped.",
     lambda _, keys, buffers: buffers if len(buffers) < 2 else [*buffers[:-2], buffers[-1], buffers[-2]]),
    ("HalfABlock", "The second half of a block is not loaded.",
     lambda self, keys, buffers: change_first(buffers, lambda one: one[self.context.block_bytes // 2 :].zero_())),
    ("LastBytesAreMissing", "The last 8 bytes of a block are not loaded.",
     lambda _, keys, buffers: change_first(buffers, lambda one: one[-8:].zero_())),
    ("ReportsTooEarly", "A load is returned by poll before its buffers hold the blocks.", lambda _, keys, buffers: fill_later(buffers)),
    ("BuffersInTheOrderOfKeys", "The buffers of a load are sorted by key.",
     lambda _, keys, buffers: [buffer for _, buffer in sorted(zip(keys, buffers, strict=True), key=lambda pair: pair[0])]),
    ("OneBufferForAll", "A load has one buffer for all blocks.", lambda _, keys, buffers: [buffers[0]] * len(buffers)),
    ("BuffersOfTwoAxes", "The buffers have two axes.", lambda _, keys, buffers: [buffer.view(1, -1) for buffer in buffers]),
)  # fmt: skip


@mutant
class Waits(DictTier):
    """A load waits until the blocks have been read."""

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        time.sleep(0.03)
        return super().load(job, keys)


@mutant
class WaitsInFinish(DictTier):
    """The end of a store waits until the blocks have been written."""

    def finish(self, job: int, *, commit: bool = True) -> None:
        time.sleep(0.03)
        super().finish(job, commit=commit)


@mutant
class WaitsInPoll(DictTier):
    """Poll waits for a job."""

    def poll(self) -> list[KVTierResult]:
        time.sleep(0.03)
        return super().poll()


@mutant
class ForgetsTheQuota(DictTier):
    """All blocks are kept, however many there are."""

    def keep_blocks(self, entry: Job) -> None:
        self.max_blocks = 1 << 30
        super().keep_blocks(entry)


@mutant
class OneBlockTooMany(DictTier):
    """One block more than allowed is kept."""

    def __init__(self, context: KVTierContext, options: Options | None = None) -> None:
        super().__init__(context, options)
        self.max_blocks += 1


@mutant
class EvictsTheNewest(DictTier):
    """The block that was stored last is evicted."""

    def keep_blocks(self, entry: Job) -> None:
        limit, self.max_blocks = self.max_blocks, 1 << 30
        super().keep_blocks(entry)
        self.max_blocks = limit
        while len(self.blocks) > limit:
            self.blocks.popitem()


@mutant
class FirstInFirstOut(DictTier):
    """A load does not count as use."""

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        order = list(self.blocks)
        buffers = super().load(job, keys)
        for key in order:
            self.blocks.move_to_end(key)
        return buffers


@mutant
class MatchesPastAHole(DictTier):
    """Match counts the blocks beyond one that is missing."""

    def match(self, keys: Sequence[bytes]) -> int:
        return sum(key in self.blocks for key in keys)


@mutant
class MatchesTooEarly(DictTier):
    """Blocks are matched from finish on."""

    def match(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.blocks and key not in self.storing), len(keys))


@mutant
class KeepsUncommittedBlocks(DictTier):
    """A store that is not committed keeps its blocks."""

    def finish(self, job: int, *, commit: bool = True) -> None:
        if not commit and self.jobs[job].is_store:
            self.keep_blocks(self.jobs[job])
        super().finish(job, commit=commit)


@mutant
class LosesAnAbort(DictTier):
    """The keys of a store that is not committed count as being stored for ever."""

    def end_job(self, job: int) -> None:
        entry = self.jobs[job]
        lost = entry.keys if entry.is_store and entry.result is None and entry.keys[0] not in self.blocks else ()
        super().end_job(job)
        self.storing.update(lost)


@mutant
class ReturnsCancelledStores(DictTier):
    """Poll returns stores that were not committed."""

    def __init__(self, context: KVTierContext, options: Options | None = None) -> None:
        super().__init__(context, options)
        self.cancelled: list[KVTierResult] = []

    def finish(self, job: int, *, commit: bool = True) -> None:
        if self.jobs[job].is_store and not commit:
            self.cancelled.append(KVTierResult(job, 0, "cancelled"))
        super().finish(job, commit=commit)

    def poll(self) -> list[KVTierResult]:
        cancelled, self.cancelled = self.cancelled, []
        return [*cancelled, *super().poll()]


@mutant
class ReturnsJobsTwice(DictTier):
    """A load is returned by poll until it is finished."""

    def poll(self) -> list[KVTierResult]:
        loads = {job: entry.result for job, entry in self.jobs.items() if not entry.is_store}
        results = super().poll()
        for job, result in loads.items():
            self.jobs[job].result = result
        return results


@mutant
class ReturnsAbandonedLoads(DictTier):
    """Poll returns loads that were finished before."""

    def __init__(self, context: KVTierContext, options: Options | None = None) -> None:
        super().__init__(context, options)
        self.abandoned: list[KVTierResult] = []

    def finish(self, job: int, *, commit: bool = True) -> None:
        result = self.jobs[job].result
        if result is not None and not self.jobs[job].is_store:
            self.abandoned.append(result)
        super().finish(job, commit=commit)

    def poll(self) -> list[KVTierResult]:
        abandoned, self.abandoned = self.abandoned, []
        return [*abandoned, *super().poll()]


@mutant
class MixesNumbersUp(DictTier):
    """The results of two jobs that end together are swapped."""

    def poll(self) -> list[KVTierResult]:
        results = super().poll()
        return [replace(one, job=other.job) for one, other in zip(results, reversed(results), strict=True)]


@mutant
class NumbersOfThirtyTwoBits(DictTier):
    """The number of a job loses its high bits."""

    def poll(self) -> list[KVTierResult]:
        return [replace(one, job=one.job & 0xFFFFFFFF) for one in super().poll()]


@mutant
class ReusesBuffers(DictTier):
    """The buffers of a load are free once poll has returned it."""

    def poll(self) -> list[KVTierResult]:
        results = super().poll()
        for result in results:
            if result.job in self.jobs:
                entry = self.jobs[result.job]
                self.free += [buffer for buffer in entry.buffers if buffer is not None]
                entry.buffers = [None] * len(entry.keys)
        return results


@mutant
class SharesBuffersOfStores(DictTier):
    """A block is kept in the buffer of its store, which the next job gets too."""

    def keep_blocks(self, entry: Job) -> None:
        super().keep_blocks(entry)
        for key, buffer in zip(entry.keys, entry.buffers, strict=True):
            if buffer is not None and key in self.blocks:
                self.blocks[key] = buffer


@mutant
class OverwritesHeldBlocks(DictTier):
    """A store has buffers for blocks that the tier holds."""

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        buffers = [self.take_buffer() for _ in keys]
        self.jobs[job] = Job(tuple(keys), buffers, True)
        return buffers


@mutant
class StoresABlockTwice(DictTier):
    """Two jobs have buffers for one block."""

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        self.storing.clear()
        return super().store(job, keys)


@mutant
class ClearEndsJobs(DictTier):
    def clear(self) -> None:
        self.blocks.clear()
        for job in list(self.jobs):
            self.end_job(job)


@mutant
class ClearKeepsKeys(DictTier):
    def clear(self) -> None:
        for block in self.blocks.values():
            block.zero_()


@mutant
class AFailureStops(DictTier):
    """After a load has failed, all loads fail."""

    has_failed = False

    def poll(self) -> list[KVTierResult]:
        results = super().poll()
        if self.has_failed:
            results = [one if self.jobs.get(one.job) is None else replace(one, num_blocks=0, error="failed") for one in results]
        self.has_failed |= any(one.error for one in results)
        return results


@mutant
class CountsBlocksBeyondAFailure(DictTier):
    """A load counts the blocks beyond one that is missing, and has no error."""

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        buffers = super().load(job, keys)
        self.jobs[job].result = KVTierResult(job, sum(key in self.blocks for key in keys))
        return buffers


@mutant
class FailsWithoutASentence(DictTier):
    """A load that fails says nothing."""

    def poll(self) -> list[KVTierResult]:
        return [replace(one, error="") for one in super().poll()]


@mutant
class Grows(DictTier):
    """Each job is remembered."""

    def __init__(self, context: KVTierContext, options: Options | None = None) -> None:
        super().__init__(context, options)
        self.log: list[tuple[bytes, ...]] = []

    def end_job(self, job: int) -> None:
        self.log.append(self.jobs[job].keys)
        super().end_job(job)


@mutant
class AllocatesForEachJob(DictTier):
    """Buffers are allocated for each job."""

    def take_buffer(self) -> torch.Tensor:
        self.free.clear()
        return super().take_buffer()


@mutant
class LosesRoom(DictTier):
    """The room of a store that is not committed is lost."""

    def __init__(self, context: KVTierContext, options: Options | None = None) -> None:
        super().__init__(context, options)
        self.num_lost = 0

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        return None if self.num_lost > self.max_blocks else super().store(job, keys)

    def finish(self, job: int, *, commit: bool = True) -> None:
        self.num_lost += self.jobs[job].is_store and not commit
        super().finish(job, commit=commit)


@mutant
class MemoryOfItsOwn(DictTier):
    """Some buffers are not of the context's memory, which may be page-locked."""

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        buffers = super().store(job, keys)
        entry = self.jobs[job]
        entry.buffers = [None if buffer is None else torch.empty_like(buffer) for buffer in buffers or ()]
        return entry.buffers


@mutant
class KeepsItsMemory(DictTier):
    """Close keeps the memory."""

    def close(self) -> None:
        self.blocks.clear()


@mutant
class KeepsAThread(DictTier):
    """A thread goes on after close, and keeps the process alive."""

    def __init__(self, context: KVTierContext, options: Options | None = None) -> None:
        super().__init__(context, options)
        threading.Thread(target=time.sleep, args=(8,)).start()


@mutant
class ServesChangedMemory(HostTier):
    """A block in memory is loaded without a look at its digest."""

    def _move_block(self, job: Any, index: int) -> None:
        if job.is_store or job.blocks[index] is None:
            super()._move_block(job, index)


@mutant
class EvictsWhatIsRead(HostTier):
    """A block whose buffer a load has is evicted, and its buffer filled with another one."""

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        buffers = super().load(job, keys)
        for block in self._jobs[job].blocks if buffers is not None else ():
            if block is not None and block.num_users == 1:
                block.num_users = 0
                self._index._num_used -= 1
        return buffers

    def _release_load(self, job: Any) -> None:
        pass


class Files(DiskTier):
    """A disk whose files are wrong."""

    files: type[BlockFiles] = BlockFiles

    def __init__(self, context: KVTierContext, options: Any = None) -> None:
        super().__init__(context, options)
        self._files.__class__ = self.files


class Unchecked(BlockFiles):
    def read_block(self, key: bytes, block: memoryview) -> None:
        data = self._locate(key).read_bytes()[-len(block) :]
        block[: len(data)] = data


@mutant.using(capabilities=PERSISTENT)
class ServesChangedFiles(Files):
    """A file is loaded without a look at its length and digest."""

    files = Unchecked


@mutant.using(capabilities=PERSISTENT)
class IgnoresIdentity(DiskTier):
    """Blocks of another model are served."""

    def __init__(self, context: KVTierContext, options: Any = None) -> None:
        super().__init__(replace(context, identity=""), options)


@mutant.using(capabilities=PERSISTENT)
class LosesBlocksAtRestart(DiskTier):
    """The blocks of earlier processes are not found."""

    def _scan(self) -> None:
        pass


@mutant.using(capabilities=PERSISTENT)
class ForgetsTheQuotaAtRestart(DiskTier):
    """The blocks of earlier processes do not count."""

    def _take_scanned(self, count: int) -> None:
        size = len(self._index)
        super()._take_scanned(count)
        self._max_blocks += len(self._index) - size


@mutant.using(capabilities=PERSISTENT)
class DeletesAtClose(DiskTier):
    """Close removes the files."""

    def close(self) -> None:
        super().close()
        for path in self._files.path.glob("*.kv"):
            path.unlink()


@mutant.using(capabilities=PERSISTENT)
class BlocksOfMemoryAlone(DictTier):
    """A tier that is to be persistent keeps its blocks in memory."""

    @staticmethod
    def make_conformance_options(folder: Path, num_blocks: int, context: KVTierContext) -> Any:
        folder.mkdir(exist_ok=True)
        return Options(max_blocks=num_blocks)


@mutant.using(capabilities=KVTierCapabilities(in_memory=True))
class FillsBuffersInPoll(DictTier):
    """A tier that is to be in memory fills the buffers of a load in `poll`."""

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        buffers = super().load(job, keys) or ()
        self.later = {**getattr(self, "later", {}), job: [buffer.clone() for buffer in buffers]}
        for buffer in buffers:
            buffer.zero_()
        return buffers

    def poll(self) -> list[KVTierResult]:
        for job, contents in self.later.items() if hasattr(self, "later") else ():
            for buffer, content in zip(self.jobs[job].buffers if job in self.jobs else (), contents, strict=False):
                if buffer is not None:
                    buffer.copy_(content)
        self.later: dict[int, list[torch.Tensor]] = {}
        return super().poll()


for target in kv_tier_use.OF_MEMORY:
    mutant(target)
for target in kv_tier_use.OF_DISKS:
    mutant(target, capabilities=PERSISTENT)


@mutant
class KeepsFreeBuffers(DictTier):
    """Keeps the buffers that no job uses after `close`."""

    def close(self) -> None:
        self.blocks.clear()
        self.jobs.clear()


@mutant
class LoadsHundredsAtMost(DictTier):
    """Leaves the buffers of a load of more than 300 blocks as they were."""

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        buffers = super().load(job, keys)
        for buffer in (buffers or ())[300:]:
            buffer.zero_()
        return buffers
