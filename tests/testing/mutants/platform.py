"""Mutants of `platform/2`. The reference computes on the host under another name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from frame.core.interfaces.platform import Accelerator, DeviceMemory, HostPlatform, SupportsSleep, UsableDevices
from tests.plugins.fake_platform import CAPABILITIES, MEMORY, FakeEvent, FakeGraph, FakePlatform, FakeStream
from tests.testing.mutants import MutantList

mutant = MUTANTS = MutantList("platform", reference=FakePlatform, capabilities=CAPABILITIES)


def find_none() -> UsableDevices:
    """No device, although there is one."""
    return UsableDevices()


def find_capable() -> UsableDevices:
    """A device with a compute capability that the platform does not have."""
    return UsableDevices((Accelerator("fake", "Fake 1", (9, 0), MEMORY),))


@mutant.using(capabilities=replace(CAPABILITIES, find_devices=f"{__name__}:find_none"))
class FindsNothing(FakePlatform):
    """The record's function finds no device where the platform computes on one."""


@mutant.using(capabilities=replace(CAPABILITIES, find_devices=f"{__name__}:find_capable"))
class DisagreesOnCapability(FakePlatform):
    """The record's function gives the device a compute capability that the platform denies."""


@mutant.using(capabilities=replace(CAPABILITIES, find_devices=None))
class SaysHost(FakePlatform):
    """The record says that the model runs in the host's memory, but the device has its own."""


@mutant.using(capabilities=replace(CAPABILITIES, graphs=False))
class HidesGraphs(FakePlatform):
    """The record denies graphs, but the platform makes a pool for them."""


@mutant
class ChangesTheDefaultDtype(FakePlatform):
    """activate makes float16 the type of new tensors."""

    def activate(self) -> None:
        super().activate()
        torch.set_default_dtype(torch.float16)


@mutant
class FlushesSmallNumbers(FakePlatform):
    """activate makes the host take its smallest numbers for zero."""

    def activate(self) -> None:
        super().activate()
        torch.set_flush_denormal(True)


@mutant
class LacksGraphs(HostPlatform):
    """The record says that graphs can be captured, but the class offers none."""

    @property
    def device_name(self) -> str:
        return "Fake 1"

    def measure_memory(self) -> DeviceMemory:
        return DeviceMemory(MEMORY, MEMORY - (64 << 20))


@mutant
class FreeExceedsTotal(FakePlatform):
    """Reports more free memory than the device has, as if the host's were added."""

    def measure_memory(self) -> DeviceMemory:
        found = super().measure_memory()
        return replace(found, free=found.total + 1)


@mutant
class CountsReservedInMegabytes(FakePlatform):
    """count_reserved returns MiB instead of bytes."""

    def count_reserved(self) -> int:
        return super().count_reserved() >> 20


@mutant
class PinsBytes(FakePlatform):
    """allocate_pinned returns bytes, whatever dtype is asked for."""

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8)


@mutant
class ReusesPinnedMemory(FakePlatform):
    """allocate_pinned hands out one buffer again and again, so a copy overwrites another one."""

    _buffer = torch.empty(1 << 22, dtype=torch.uint8)

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._buffer[:count].view(dtype).view(*shape)


@mutant
class SharesOneStream(FakePlatform):
    """create_stream returns the default stream, so that nothing overlaps."""

    def create_stream(self) -> FakeStream:
        return self._default


@mutant
class SetsStreamOfAllThreads(FakePlatform):
    """set_stream changes the current stream of every thread."""

    def get_current_stream(self) -> FakeStream:
        return self._default

    def set_stream(self, stream: Any) -> None:
        self._default = stream


@mutant
class KeepsStreamAfterError(FakePlatform):
    """use_stream does not restore the stream when its block raises."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        before = self.get_current_stream()
        self.set_stream(stream)
        yield
        self.set_stream(before)


@mutant
class MakesSideStreams(FakePlatform):
    """get_side_stream returns a new stream for every layer."""

    def get_side_stream(self) -> FakeStream:
        return FakeStream()


@mutant
class SideStreamIsCurrent(FakePlatform):
    """get_side_stream returns the current stream, so that two computations do not overlap."""

    def get_side_stream(self) -> FakeStream:
        return self.get_current_stream()


@mutant
class TimesBackwards(FakePlatform):
    """Timed events measure backwards, from the end to the start."""

    def create_event(self, *, is_timed: bool = False) -> FakeEvent:
        class Backwards(FakeEvent):
            def elapsed_time(self, end: FakeEvent) -> float:
                return -super().elapsed_time(end)

        return Backwards()


class _Graph(FakeGraph):
    def replay(self) -> None:
        return None


@mutant
class ReplaysNothing(FakePlatform):
    """A replay leaves the results of the capture as they are."""

    graph_class = _Graph


class _FreshGraph(FakeGraph):
    def replay(self) -> None:
        for func, args, kwargs, _ in self.calls:
            func(*args, **kwargs)


@mutant
class ReplaysElsewhere(FakePlatform):
    """A replay writes its results to new memory, and those of the capture become stale."""

    graph_class = _FreshGraph


@mutant
class NeverSaysCapturing(FakePlatform):
    """is_capturing is false inside of a capture, so kernels compile there."""

    @property
    def is_capturing(self) -> bool:
        return False


@mutant
class CapturesGoOn(FakePlatform):
    """end_capture leaves is_capturing true."""

    def end_capture(self, graph: Any) -> None:
        graph.__exit__(None, None, None)


@mutant
class BorrowsCopies(FakePlatform):
    """borrow returns a copy, which a replay does not write."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


@mutant
class LosesWeights(FakePlatform, SupportsSleep):
    """release_tag drops values that map_tag has to bring back."""

    def release_tag(self, tag: str, tensors: Sequence[torch.Tensor], *, keeps_values: bool) -> int:
        for tensor in tensors:
            tensor.zero_()
        return sum(tensor.nbytes for tensor in tensors)

    def map_tag(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """The values are lost."""


@mutant
class FreeIsTheTotal(FakePlatform):
    """Reports the whole memory as free, also while tensors take a part of it."""

    def measure_memory(self) -> DeviceMemory:
        return replace(super().measure_memory(), free=MEMORY)
