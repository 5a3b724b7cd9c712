"""KV cache tiers: a file for each block, of one thread; and tiers with a bug each."""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from frame.core.interfaces.kv_tier import KVTier, KVTierCapabilities, KVTierContext, KVTierResult
from tests.testing.held_out import Wrong


@dataclass(eq=False, slots=True)
class Job:
    number: int
    keys: list[bytes]
    buffers: list[torch.Tensor | None]
    is_store: bool
    is_abandoned: bool = False
    has_ended: bool = False


class FileTier(KVTier):
    """A file holds the digest of the identity, the key and the block, and then the block. The one
    thread does jobs in their order, so a block is read before it is deleted."""

    capabilities: ClassVar[KVTierCapabilities] = KVTierCapabilities(persistent=True, folder="folder")

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        folder: str
        max_blocks: int = 1024

    def __init__(self, context: KVTierContext, options: Options) -> None:
        self.context, self.max_blocks = context, options.max_blocks
        self.folder = Path(options.folder) / sha256(context.identity.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        files = sorted((entry.stat().st_mtime_ns, entry.name) for entry in os.scandir(self.folder) if len(entry.name) == 64)
        self.index: OrderedDict[bytes, None] = OrderedDict((bytes.fromhex(name), None) for _, name in files)
        self.storing: set[bytes] = set()
        self.jobs: dict[int, Job] = {}
        self.free: list[torch.Tensor] = []
        self.ended: deque[tuple[Job, int, str]] = deque()
        self.thread = ThreadPoolExecutor(1, "file_tier")
        self.tasks: deque[Future[None]] = deque(maxlen=1)
        self.make_room(0)

    @staticmethod
    def make_conformance_options(folder: Path, num_blocks: int, context: KVTierContext) -> FileTier.Options:
        return FileTier.Options(folder=str(folder), max_blocks=num_blocks)

    def name_file(self, key: bytes) -> Path:
        return self.folder / key.hex()

    def match(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.index), len(keys))

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        entry = Job(job, list(keys), [self.take_buffer() for _ in keys], is_store=False)
        self.use_blocks(entry.keys)
        self.jobs[job] = entry
        self.submit(self.read_blocks, entry)
        return [buffer for buffer in entry.buffers if buffer is not None]

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        new = [key for key in dict.fromkeys(keys) if key not in self.index and key not in self.storing]
        self.use_blocks([key for key in keys if key in self.index])
        if not self.make_room(len(new), keep=set(keys)):
            return None
        left = set(new)
        buffers: list[torch.Tensor | None] = []
        for key in keys:
            buffers.append(self.take_buffer() if key in left else None)
            left.discard(key)
        self.storing.update(new)
        self.jobs[job] = Job(job, list(keys), buffers, is_store=True)
        return list(buffers)

    def use_blocks(self, keys: Sequence[bytes]) -> None:
        """The first key is used last: blocks are no use without those before them."""
        for key in reversed(keys):
            if key in self.index:
                self.index.move_to_end(key)

    def count_blocks(self) -> int:
        return len(self.index) + len(self.storing)

    def make_room(self, num_blocks: int, keep: set[bytes] | None = None) -> bool:
        excess = self.count_blocks() + num_blocks - self.max_blocks
        victims = [key for key in self.index if not keep or key not in keep][: max(0, excess)] if excess > 0 else []
        if len(victims) < excess:
            return False
        for key in victims:
            self.drop(key)
        return True

    def drop(self, key: bytes) -> None:
        del self.index[key]
        self.submit(self.delete, key)

    def delete(self, key: bytes) -> None:
        self.name_file(key).unlink(missing_ok=True)

    def finish(self, job: int, *, commit: bool = True) -> None:
        entry = self.jobs[job]
        if entry.is_store and commit:
            self.submit(self.write_blocks, entry)
        elif entry.is_store or entry.has_ended:
            self.end(entry)
        else:
            entry.is_abandoned = True

    def poll(self) -> list[KVTierResult]:
        results = []
        while self.ended:
            entry, count, error = self.ended.popleft()
            entry.has_ended = True
            if entry.is_store:
                for key, buffer in reversed(list(zip(entry.keys, entry.buffers, strict=True))[:count]):
                    if buffer is not None:
                        self.index[key] = None
                        self.index.move_to_end(key)
            elif error and entry.keys[count] in self.index:
                self.drop(entry.keys[count])
            if entry.is_store or entry.is_abandoned:
                self.end(entry)
            if not entry.is_abandoned:
                results.append(KVTierResult(entry.number, count, error))
        return results

    def end(self, entry: Job) -> None:
        del self.jobs[entry.number]
        for key, buffer in zip(entry.keys, entry.buffers, strict=True):
            if buffer is not None:
                self.free.append(buffer)
                if entry.is_store:
                    self.storing.discard(key)

    def take_buffer(self) -> torch.Tensor:
        return self.free.pop() if self.free else self.context.allocate(self.context.block_bytes)

    def submit(self, work, *arguments) -> None:  # type: ignore[no-untyped-def]
        with contextlib.suppress(RuntimeError):  # after `close`
            self.tasks.append(self.thread.submit(work, *arguments))

    def clear(self) -> None:
        used = {key for entry in self.jobs.values() for key in entry.keys}
        for key in [key for key in self.index if key not in used]:
            self.drop(key)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        wait(self.tasks, timeout=0.8)
        self.free.clear()

    # of the thread ----------------------------------------------------------------------------

    def digest(self, key: bytes, block: bytes) -> bytes:
        return sha256(self.context.identity.encode() + b"\0" + key + block).digest()

    def write_blocks(self, entry: Job) -> None:
        count, error = 0, ""
        try:
            for key, buffer in zip(entry.keys, entry.buffers, strict=True):
                if buffer is not None:
                    block = buffer.numpy().tobytes()
                    part = self.folder / f"{key.hex()}.part"
                    part.write_bytes(self.digest(key, block) + block)
                    part.replace(self.name_file(key))
                count += 1
        except OSError as problem:
            error = f"a block could not be written ({problem.strerror}); free space in {self.folder}"
        self.ended.append((entry, count, error))

    def read_blocks(self, entry: Job) -> None:
        count, error = 0, ""
        for key, buffer in zip(entry.keys, entry.buffers, strict=True):
            if entry.is_abandoned or buffer is None:
                break
            try:
                error = self.read_block(key, buffer)
            except OSError as problem:
                error = f"a block could not be read ({problem.strerror})"
            if error:
                break
            count += 1
        self.ended.append((entry, count, error))

    def read_block(self, key: bytes, buffer: torch.Tensor) -> str:
        data = self.name_file(key).read_bytes()
        block = data[32:]
        if len(block) != self.context.block_bytes or data[:32] != self.digest(key, block):
            return "a block in the folder is not the one that was stored"
        buffer.numpy()[:] = np.frombuffer(block, np.uint8)
        os.utime(self.name_file(key))
        return ""


TWIN = FileTier
WRONG = Wrong()


@WRONG.add("A damaged disk changes the answers of the model: blocks are not compared with a digest.")
class NoDigest(FileTier):
    def digest(self, key: bytes, block: bytes) -> bytes:
        return bytes(32)


@WRONG.add("Damage after the first KiB of a block changes the answers: the digest is of its beginning, to save time.")
class DigestOfStart(FileTier):
    def digest(self, key: bytes, block: bytes) -> bytes:
        return super().digest(key, block[:1024])


@WRONG.add("A file under another name is served as that key's block: the digest does not cover the key.")
class DigestWithoutKey(FileTier):
    def digest(self, key: bytes, block: bytes) -> bytes:
        return super().digest(b"", block)


@WRONG.add("After a change of the model, keys and values of the old one are served: folder and digest do not know the identity.")
class WithoutIdentity(FileTier):
    def __init__(self, context: KVTierContext, options: FileTier.Options) -> None:
        super().__init__(KVTierContext(context.block_bytes, "", context.allocate, context.pool_bytes), options)


@WRONG.add("Two prompts whose keys begin with the same 16 bytes get each other's text: keys are cut to the length of an MD5.")
class CutsKeys(FileTier):
    def match(self, keys: Sequence[bytes]) -> int:
        return super().match([key[:16].ljust(32, b"\0") for key in keys])

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        return super().load(job, [key[:16].ljust(32, b"\0") for key in keys])

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        return super().store(job, [key[:16].ljust(32, b"\0") for key in keys])


@WRONG.add("A request gets blocks of one that was aborted: the buffers of an abandoned load are used again while the thread writes.")
class ReusesAbandoned(FileTier):
    def finish(self, job: int, *, commit: bool = True) -> None:
        entry = self.jobs[job]
        if not entry.is_store and not entry.has_ended:
            self.free += [buffer for buffer in entry.buffers if buffer is not None]
        super().finish(job, commit=commit)

    def end(self, entry: Job) -> None:
        free = list(self.free)
        super().end(entry)
        if entry.is_abandoned:
            self.free = free


@WRONG.add("The engine meets a job that it has given up, and ends with an error: `poll` returns abandoned loads.")
class PollsAbandoned(FileTier):
    def poll(self) -> list[KVTierResult]:
        abandoned = [KVTierResult(entry.number, count, error) for entry, count, error in list(self.ended) if entry.is_abandoned]
        return super().poll() + abandoned


@WRONG.add("The folder outgrows its limit under load: blocks that are being written do not count.")
class IgnoresStoring(FileTier):
    def count_blocks(self) -> int:
        return len(self.index)


@WRONG.add("The most used prompts are evicted first: a load does not count as use.")
class LoadsAreNoUse(FileTier):
    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        order = list(self.index)
        buffers = super().load(job, keys)
        self.index = OrderedDict.fromkeys(order)
        return buffers


@WRONG.add("A block that was once refused is never stored again: a store that is not committed leaves its keys as being stored.")
class ForgetsRefused(FileTier):
    def end(self, entry: Job) -> None:
        storing = set(self.storing)
        super().end(entry)
        if entry.is_store and not entry.has_ended:
            self.storing = storing


@WRONG.add("A request waits for blocks that are not there yet: a block counts as held when it is committed, before it is written.")
class MatchesEarly(FileTier):
    def match(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.index and key not in self.storing), len(keys))


@WRONG.add("All requests wait while a block is written: `finish` writes in the engine's thread.")
class WritesInFinish(FileTier):
    def submit(self, work, *arguments) -> None:  # type: ignore[no-untyped-def]
        super().submit(work, *arguments)
        if work == self.write_blocks:
            wait(self.tasks)
            time.sleep(0.01)  # fsync of a busy disk


@WRONG.add("Each restart of an engine in one process leaves a thread behind: `close` does not stop it.")
class LeavesThread(FileTier):
    def close(self) -> None:
        self.free.clear()


@WRONG.add("After one file is gone, no load ever ends: the error ends the work of the job without a result.")
class LosesFailedJobs(FileTier):
    def read_blocks(self, entry: Job) -> None:
        for key, buffer in zip(entry.keys, entry.buffers, strict=True):
            if buffer is not None and self.read_block(key, buffer):
                return
        self.ended.append((entry, len(entry.keys), ""))


@WRONG.add("Blocks after a damaged one are used at the wrong place: damaged blocks are skipped, and the rest is counted.")
class CountsAfterDamage(FileTier):
    def read_blocks(self, entry: Job) -> None:
        count, error = 0, ""
        for key, buffer in zip(entry.keys, entry.buffers, strict=True):
            with contextlib.suppress(OSError):
                problem = self.read_block(key, buffer) if buffer is not None else ""
                error = error or problem
                count += not problem
        self.ended.append((entry, count, error))


@WRONG.add("The folder outgrows its limit with each update of weights: `clear` forgets blocks, and leaves their files.")
class ClearKeepsFiles(FileTier):
    def clear(self) -> None:
        used = {key for entry in self.jobs.values() for key in entry.keys}
        for key in [key for key in self.index if key not in used]:
            del self.index[key]
