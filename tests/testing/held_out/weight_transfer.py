"""Weight transfers: files in /dev/shm, and transfers with a bug each."""

from __future__ import annotations

import mmap
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from frame.core.interfaces.weight_transfer import TRANSFER_DTYPES, SharedBuffer, TensorSpec, TransferError, TransferPart
from frame.interfaces.weight_transfer import WeightTransfer, WeightTransferCapabilities, WeightTransferContext
from tests.testing.held_out import Wrong

FOLDER = "/dev/shm"
NAME = re.compile(r"\w[\w.-]{0,254}", re.ASCII)


class SharedFiles(WeightTransfer):
    """Each tensor is read into memory of its own."""

    capabilities: ClassVar[WeightTransferCapabilities] = WeightTransferCapabilities(shares=True)

    def __init__(self, context: WeightTransferContext, options: BaseModel | None = None) -> None:
        self.context = context

    def open(self, info: Mapping[str, Any]) -> None:
        for name in info:
            raise TransferError(f"{name!r} is no field of this transfer; leave it out")

    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        if part.layout != "separate":
            raise TransferError(f"the layout {part.layout} is not read; send tensors separately")
        buffers = {buffer.number: buffer for buffer in part.buffers if buffer.device == "cpu"}
        files: dict[int, int] = {}
        try:
            for spec in part.tensors:
                self.check(spec, buffers)
                if spec.buffer not in files:
                    files[spec.buffer] = self.open_file(buffers[spec.buffer])
            yield from self.read_all(part, files)
        finally:
            for file in files.values():
                self.close_file(file)

    def check(self, spec: TensorSpec, buffers: Mapping[int, SharedBuffer]) -> None:
        buffer = buffers.get(spec.buffer)
        if spec.dtype not in TRANSFER_DTYPES or min(spec.shape, default=0) < 0:
            raise TransferError(f"{spec.name} has a dtype or a shape that does not exist")
        if buffer is None or spec.offset < 0 or spec.offset + spec.num_bytes > buffer.size:
            raise TransferError(f"{spec.name} is not inside of a buffer of this host's memory")

    def find_path(self, buffer: SharedBuffer) -> str:
        if not NAME.fullmatch(buffer.handle):
            raise TransferError(f"the handle of buffer {buffer.number} is no file name")
        return f"{FOLDER}/{buffer.handle}"

    def open_file(self, buffer: SharedBuffer) -> int:
        try:
            file = os.open(self.find_path(buffer), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(f"buffer {buffer.number} cannot be opened: {error.strerror}") from None
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size < buffer.size:
            os.close(file)
            raise TransferError(f"buffer {buffer.number} is no file of this user with {buffer.size} bytes")
        return file

    def close_file(self, file: int) -> None:
        os.close(file)

    def read_all(self, part: TransferPart, files: Mapping[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in part.tensors:
            yield spec.name, self.read(files[spec.buffer], spec)

    def read(self, file: int, spec: TensorSpec) -> torch.Tensor:
        flat = torch.empty(spec.num_bytes, dtype=torch.uint8)
        view, done = memoryview(flat.numpy()), 0
        while done < spec.num_bytes:
            size = os.preadv(file, [view[done:]], spec.offset + done)
            if not size:
                raise TransferError(f"the buffer of {spec.name} was cut off")
            done += size
        return self.shape(flat, spec)

    def shape(self, flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def close(self) -> None:
        return


TWIN = SharedFiles
WRONG = Wrong()


@WRONG.add("The engine is killed by SIGBUS when the trainer cuts a file off, and weights change while they are copied: files are mapped.")
class MapsFiles(SharedFiles):
    def read(self, file: int, spec: TensorSpec) -> torch.Tensor:
        if not spec.num_bytes:
            return super().read(file, spec)
        start = spec.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(file, spec.offset - start + spec.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
        return self.shape(torch.frombuffer(mapped, dtype=torch.uint8)[spec.offset - start :], spec)


@WRONG.add("A trainer's message reads any file of the host: a handle may be a path.")
class TakesPaths(SharedFiles):
    def find_path(self, buffer: SharedBuffer) -> str:
        return os.path.join(FOLDER, buffer.handle)  # noqa: PTH118


@WRONG.add("After some hundred updates the engine has no descriptors left: files of refused parts stay open.")
class LeavesFiles(SharedFiles):
    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        buffers = {buffer.number: buffer for buffer in part.buffers if buffer.device == "cpu"}
        if part.layout != "separate":
            raise TransferError(f"the layout {part.layout} is not read; send tensors separately")
        files: dict[int, int] = {}
        for spec in part.tensors:
            self.check(spec, buffers)
            if spec.buffer not in files:
                files[spec.buffer] = self.open_file(buffers[spec.buffer])
        yield from self.read_all(part, files)
        for file in files.values():
            os.close(file)


@WRONG.add("Weights are those of the next layer: it is read ahead into the memory of the tensor that is being copied.")
class ReadsAhead(SharedFiles):
    def read_all(self, part: TransferPart, files: Mapping[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
        scratch = torch.empty(max((spec.num_bytes for spec in part.tensors), default=0), dtype=torch.uint8)
        waiting: tuple[str, torch.Tensor] | None = None
        for spec in part.tensors:
            flat = super().read(files[spec.buffer], spec).reshape(-1).view(torch.uint8)
            place = scratch[: spec.num_bytes] if spec.num_bytes % 8 == 0 else flat
            place.copy_(flat)
            if waiting is not None:
                yield waiting
            waiting = spec.name, self.shape(place, spec)
        if waiting is not None:
            yield waiting


@WRONG.add("Half of a model is updated: a wrong tensor is found when its turn comes, after others were returned.")
class ChecksLate(SharedFiles):
    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in part.tensors:
            yield from super().receive(TransferPart((spec,), part.buffers, part.layout))


@WRONG.add("A misspelt field of the connection is ignored, and the update goes elsewhere.")
class IgnoresFields(SharedFiles):
    def open(self, info: Mapping[str, Any]) -> None:
        return


@WRONG.add("After one part that fails, no update works until the engine is started again.")
class StaysBroken(SharedFiles):
    is_broken = False

    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        if self.is_broken:
            raise TransferError("the transfer has failed before")
        self.is_broken = True
        yield from super().receive(part)
        self.is_broken = False


@WRONG.add("Models with an empty tensor cannot be updated: the library takes no empty buffer.")
class FailsOnEmpty(SharedFiles):
    def read(self, file: int, spec: TensorSpec) -> torch.Tensor:
        return self.shape(torch.frombuffer(bytearray(os.pread(file, spec.num_bytes, spec.offset)), dtype=torch.uint8), spec)


@WRONG.add("An update that names a missing file ends the engine: the system's error is not translated.")
class RaisesOsErrors(SharedFiles):
    def open_file(self, buffer: SharedBuffer) -> int:
        return os.open(self.find_path(buffer), os.O_RDONLY | os.O_CLOEXEC)


@WRONG.add("The second update brings the weights of the first one: the content of a file is remembered by its name.")
class RemembersFiles(SharedFiles):
    def __init__(self, context: WeightTransferContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.known: dict[tuple[str, int], bytes] = {}

    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        handles = {buffer.number: buffer.handle for buffer in part.buffers}
        for (name, tensor), spec in zip(super().receive(part), part.tensors, strict=True):
            key = handles[spec.buffer], spec.offset
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            if len(self.known.setdefault(key, data)) != spec.num_bytes:
                self.known[key] = data
            yield name, self.shape(torch.frombuffer(bytearray(self.known[key]), dtype=torch.uint8), spec) if data else tensor


@WRONG.add("The engine stands still for ever when a trainer has died: a file that is missing is waited for without a limit.")
class WaitsForFile(SharedFiles):
    def open_file(self, buffer: SharedBuffer) -> int:
        path = self.find_path(buffer)
        while not os.path.lexists(path):
            time.sleep(0.05)
        return super().open_file(buffer)


@WRONG.add("A tensor may end behind its buffer, in memory that was not sent: only its start is checked.")
class ChecksStart(SharedFiles):
    def check(self, spec: TensorSpec, buffers: Mapping[int, SharedBuffer]) -> None:
        buffer = buffers.get(spec.buffer)
        if buffer is None or not 0 <= spec.offset <= buffer.size:
            raise TransferError(f"{spec.name} is not inside of a buffer of this host's memory")


@WRONG.add("Scalars have one dimension too many, and their update is refused.")
class ScalarsAsVectors(SharedFiles):
    def shape(self, flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape or (1,))


@WRONG.add("Each update keeps its whole memory: a reference to all tensors stays until the next one.")
class KeepsTensors(SharedFiles):
    def __init__(self, context: WeightTransferContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.received: list[torch.Tensor] = []

    def read(self, file: int, spec: TensorSpec) -> torch.Tensor:
        self.received.append(super().read(file, spec))
        return self.received[-1]
