"""Weight transfers with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import mmap
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from frame.core.interfaces.weight_transfer import TransferError, TransferPart
from frame.interfaces.weight_transfer import WeightTransferCapabilities
from frame.plugins.weight_transfers.group import GroupTransfer
from frame.plugins.weight_transfers.ipc import FOLDER, IpcTransfer
from tests.testing.mutants import MutantList

Received = Iterator[tuple[str, torch.Tensor]]
SHARES = WeightTransferCapabilities(shares=True)
JOINS = WeightTransferCapabilities(joins=True)
mutant = MUTANTS = MutantList("weight_transfer", reference=IpcTransfer, capabilities=SHARES)


class ChangesTensors(IpcTransfer):
    """Changes what is received."""

    def change(self, pairs: list[tuple[str, torch.Tensor]]) -> Any:
        raise NotImplementedError

    def receive(self, part: TransferPart) -> Received:
        yield from self.change([(name, tensor.clone()) for name, tensor in super().receive(part)])


def swap_values(pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    (first, one), (second, two), *others = pairs
    return [(first, two), (second, one), *others]


def halve(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    flat[len(flat) // 2 + 1 :] = 0
    return tensor


mutant.each(
    ChangesTensors, "change",
    ("WrongTensorUnderAName", "Two tensors are swapped.", lambda _, pairs: swap_values(pairs) if len(pairs) > 1 else pairs),
    ("HalfATensor", "The second half of each tensor is missing.", lambda _, pairs: [(n, halve(t)) for n, t in pairs]),
    ("LastTensorIsMissing", "The last tensor of a part is not returned.", lambda _, pairs: pairs[:-1]),
    ("TensorsTwice", "Each tensor is returned twice.", lambda _, pairs: [pair for pair in pairs for _ in range(2)]),
    ("SortedByName", "Tensors are returned in the order of their names.", lambda _, pairs: sorted(pairs, key=lambda pair: pair[0])),
    ("ReversedOrder", "The last tensor is returned first.", lambda _, pairs: pairs[::-1]),
    ("FloatsInFloat32", "Floating-point tensors come as float32.",
     lambda _, pairs: [(n, t.float() if t.is_floating_point() else t) for n, t in pairs]),
    ("BytesWithoutType", "int8 tensors come as uint8.",
     lambda _, pairs: [(n, t.view(torch.uint8) if t.dtype == torch.int8 else t) for n, t in pairs]),
    ("ScalarsWithAnAxis", "Scalars come with the shape (1,).",
     lambda _, pairs: [(n, t.reshape(-1) if not t.dim() else t) for n, t in pairs]),
    ("MatricesTransposed", "Matrices come transposed.", lambda _, pairs: [(n, t.t() if t.dim() == 2 else t) for n, t in pairs]),
    ("SkipsEmptyTensors", "Tensors without values are left out.", lambda _, pairs: [(n, t) for n, t in pairs if t.numel()]),
    ("FlatTensors", "Tensors come with one axis.", lambda _, pairs: [(n, t.reshape(-1)) for n, t in pairs]),
    ("RoundedToBfloat16", "float32 values are rounded to bfloat16.",
     lambda _, pairs: [(n, t.bfloat16().float() if t.dtype == torch.float32 else t) for n, t in pairs]),
)  # fmt: skip


@mutant
class StaleBucket(IpcTransfer):
    """A file that was read once is not read again."""

    cache: dict[str, torch.Tensor]

    def receive(self, part: TransferPart) -> Received:
        kept: dict[str, torch.Tensor] = self.__dict__.setdefault("cache", {})
        for name, tensor in super().receive(part):
            kept.setdefault(name, tensor)
            yield name, kept[name] if kept[name].shape == tensor.shape else tensor


@mutant
class OneBufferForAll(IpcTransfer):
    """A thread reads the next tensor into the memory of the one before."""

    def receive(self, part: TransferPart) -> Received:
        pairs = [(name, tensor.clone()) for name, tensor in super().receive(part)]
        memory = torch.empty(max((tensor.nbytes for _, tensor in pairs), default=0), dtype=torch.uint8)
        for index, (name, tensor) in enumerate(pairs):
            memory[: tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
            following = pairs[index + 1][1] if index + 1 < len(pairs) else tensor
            raw = following.reshape(-1).view(torch.uint8)
            timer = threading.Timer(0.01, lambda raw=raw: memory[: len(raw)].copy_(raw))
            timer.start()
            yield name, memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            timer.join()


@mutant
class WritesToTheTrainer(IpcTransfer):
    """A change of the first tensor changes the trainer's memory."""

    def receive(self, part: TransferPart) -> Received:
        pairs = list(super().receive(part))
        for spec, (name, tensor) in zip(part.tensors, pairs, strict=True):
            before = tensor.clone()
            yield name, tensor
            if not torch.equal(before, tensor) and spec is part.tensors[0]:
                with Path(f"{FOLDER}/{part.buffers[0].handle}").open("r+b") as file:
                    file.seek(spec.offset)
                    file.write(bytes(spec.num_bytes))


@mutant
class LeaksMappings(IpcTransfer):
    """The mapping of each part stays."""

    def receive(self, part: TransferPart) -> Received:
        pairs = list(super().receive(part))
        with Path(f"{FOLDER}/{part.buffers[0].handle}").open("rb") as file:
            self.__dict__.setdefault("kept", []).append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        yield from pairs


@mutant
class LeaksFiles(IpcTransfer):
    """The file of each part stays open."""

    def receive(self, part: TransferPart) -> Received:
        for buffer in part.buffers:
            path = Path(FOLDER) / buffer.handle
            if buffer.handle and path.is_file():
                os.open(path, os.O_RDONLY)
        yield from super().receive(part)


@mutant
class LeaksAbandonedFiles(IpcTransfer):
    """The file of a part that is not received to its end stays open."""

    def receive(self, part: TransferPart) -> Received:
        opened = [os.open(f"{FOLDER}/{each.handle}", os.O_RDONLY) for each in part.buffers if (Path(FOLDER) / each.handle).is_file()]
        yield from super().receive(part)
        for file in opened:
            os.close(file)


@mutant
class LeaksThreads(IpcTransfer):
    """Each part starts a thread that does not end."""

    def receive(self, part: TransferPart) -> Received:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        yield from super().receive(part)


class ReadsPaths(IpcTransfer):
    """Reads files with other checks."""

    follows = True
    fills = False

    def receive(self, part: TransferPart) -> Received:
        if part.layout == "flattened":
            raise TransferError("no flattened parts")
        for spec in part.tensors:
            buffer = next((each for each in part.buffers if each.number == spec.buffer and each.device == "cpu"), None)
            if buffer is None:
                raise TransferError("there is no such buffer")
            try:
                content = (Path(FOLDER) / buffer.handle).read_bytes()
            except OSError as error:
                raise TransferError(error.strerror or "no file") from None
            data = content[spec.offset : spec.offset + spec.num_bytes] if spec.offset >= 0 else b""
            if self.fills:
                data = data.ljust(spec.num_bytes, b"\0")
            if len(data) < spec.num_bytes:
                raise TransferError("the buffer is cut off")
            value = torch.frombuffer(bytearray(data), dtype=getattr(torch, spec.dtype)) if data else torch.empty(0)
            yield spec.name, value.to(getattr(torch, spec.dtype)).view(spec.shape)


@mutant
class FollowsPaths(ReadsPaths):
    """Handles may be paths out of /dev/shm."""


@mutant
class FillsWithZeros(ReadsPaths):
    """What a buffer that is cut off lacks is read as zeros."""

    fills = True


@mutant
class FollowsLinks(IpcTransfer):
    """Links in /dev/shm are followed."""

    def receive(self, part: TransferPart) -> Received:
        for buffer in part.buffers:
            path = Path(FOLDER) / buffer.handle
            if buffer.handle and "/" not in buffer.handle and path.is_symlink():
                for spec in part.tensors:
                    yield spec.name, torch.frombuffer(bytearray(path.read_bytes()[:4]), dtype=torch.uint8)
                return
        yield from super().receive(part)


@mutant
class ChecksOffsetsLate(IpcTransfer):
    """A tensor outside of its buffer is found when its turn comes."""

    def receive(self, part: TransferPart) -> Received:
        for spec in part.tensors:
            yield from super().receive(TransferPart((spec,), part.buffers, part.layout))


@mutant
class RaisesOSError(IpcTransfer):
    """A buffer that is missing is an OSError."""

    def receive(self, part: TransferPart) -> Received:
        for buffer in part.buffers:
            if buffer.handle and "/" not in buffer.handle and buffer.handle != ".":
                (Path(FOLDER) / buffer.handle).stat()
        yield from super().receive(part)


@mutant
class ReportsTracebacks(IpcTransfer):
    """The error has several lines."""

    def receive(self, part: TransferPart) -> Received:
        try:
            yield from super().receive(part)
        except TransferError as error:
            raise TransferError(f"Traceback:\n{error}") from None


@mutant
class IgnoresUnknownFields(IpcTransfer):
    """`open` takes any field."""

    def open(self, info: Mapping[str, Any]) -> None:
        return


@mutant
class UnpicklesHandles(IpcTransfer):
    """Parts go through pickle."""

    def receive(self, part: TransferPart) -> Received:
        yield from super().receive(pickle.loads(pickle.dumps(part)))


@mutant
class TakesAnyDevice(IpcTransfer):
    """A buffer of a GPU is taken for one of the host."""

    def _choose(self, part: TransferPart) -> Any:
        return {buffer.number: type(buffer)(buffer.number, "cpu", buffer.handle, buffer.size) for buffer in part.buffers}


@mutant.using(capabilities=JOINS)
class ReceivesFromRankOne(GroupTransfer):
    """Every rank of the engine takes the number of its first rank."""

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(type(context)(context.device, 0, context.num_ranks, context.timeout), options)


@mutant.using(capabilities=JOINS)
class WaitsForever(GroupTransfer):
    """A trainer that does not come is awaited for longer than the timeout."""

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(type(context)(context.device, context.rank, context.num_ranks, 8.0), options)


@mutant.using(capabilities=JOINS)
class FlattensBackwards(GroupTransfer):
    """The tensors of a flattened part are read from its end."""

    def receive(self, part: TransferPart) -> Received:
        if part.layout == "separate":
            yield from super().receive(part)
        else:
            for (name, _), spec in zip(super().receive(TransferPart(part.tensors[::-1], (), part.layout)), part.tensors, strict=True):
                yield name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))


@mutant.using(capabilities=JOINS)
class StaysInTheGroup(GroupTransfer):
    """`close` does not leave the group."""

    def close(self) -> None:
        return


@mutant.using(capabilities=JOINS)
class SwallowsFailures(GroupTransfer):
    """A broadcast that fails leaves zeros."""

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            return super()._broadcast(tensor)
        except TransferError:
            return tensor.zero_()


@mutant.using(capabilities=JOINS)
class SharesOneGroup(GroupTransfer):
    """All transfers use the group that was opened last."""

    last: Any = None

    def open(self, info: Mapping[str, Any]) -> None:
        super().open(info)
        type(self).last = self

    def receive(self, part: TransferPart) -> Received:
        owner = type(self).last or self
        yield from GroupTransfer.receive(owner, part)


@mutant
class KnowsUsualTypes(IpcTransfer):
    """Knows the types of usual checkpoints, and not those of scales and masks."""

    def receive(self, part: TransferPart) -> Received:
        for spec in part.tensors:
            if spec.dtype in ("float8_e8m0fnu", "bool"):
                raise KeyError(spec.dtype)
        yield from super().receive(part)


@mutant
class WaitsForAWriter(IpcTransfer):
    """Opens what a handle names whatever it is, and waits for the writer of a pipe."""

    def _open(self, buffer: Any, stack: Any) -> Any:
        name = buffer.handle.rpartition("/")[2]
        if name and Path(FOLDER, name).exists():
            os.close(os.open(f"{FOLDER}/{name}", os.O_RDONLY))
        return super()._open(buffer, stack)


@mutant
class KeepsItsScratch(IpcTransfer):
    """Copies each tensor into memory that it keeps after `close`."""

    scratch = torch.empty(0, dtype=torch.uint8)

    def receive(self, part: TransferPart) -> Received:
        for name, tensor in super().receive(part):
            if len(self.scratch) < tensor.nbytes:
                self.scratch = torch.empty(tensor.nbytes, dtype=torch.uint8)
            flat = self.scratch[: tensor.nbytes]
            flat.copy_(tensor.reshape(-1).view(torch.uint8))
            yield name, flat.view(tensor.dtype).view(tensor.shape)


@mutant.using(capabilities=JOINS)
class WaitsAfterClose(GroupTransfer):
    """`close` by another thread leaves `open` waiting for the trainer until its timeout."""

    def close(self) -> None:
        self._left = threading.Event()
        super().close()


@mutant
class ReadsFilesOfOthers(IpcTransfer):
    """Reads files of any owner."""

    def _open(self, buffer: Any, stack: Any) -> Any:
        with mock.patch.object(os, "fstat", lambda _: self._own(Path(FOLDER, buffer.handle).stat())):
            return super()._open(buffer, stack)

    @staticmethod
    def _own(status: os.stat_result) -> Any:
        return SimpleNamespace(st_mode=status.st_mode, st_size=status.st_size, st_uid=os.geteuid())


@mutant
class LeavesOddFilesOpen(IpcTransfer):
    """Opens a file twice whose buffer is all of it and has an odd number of bytes."""

    def _open(self, buffer: Any, stack: Any) -> Any:
        opened = super()._open(buffer, stack)
        path = Path(FOLDER, buffer.handle)
        if path.stat().st_size == buffer.size and buffer.size % 2:
            self._kept = [*getattr(self, "_kept", ()), path.open("rb")]
        return opened
