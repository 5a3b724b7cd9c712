"""Platforms: the host with streams that are done at once; and platforms with a bug each."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
from pydantic import BaseModel

from frame.core.interfaces.platform import (
    Accelerator,
    DeviceEvent,
    DeviceMemory,
    DeviceStream,
    Platform,
    PlatformCapabilities,
    PlatformContext,
    SupportsStreams,
    UsableDevices,
)
from tests.testing.held_out import Wrong

if TYPE_CHECKING:
    import torch

NAME = "Other host"


def find_devices() -> UsableDevices:
    return UsableDevices((Accelerator("inline_host", NAME, None, psutil.virtual_memory().total),))


class InlineStream:
    """Everything that is queued has run."""

    def synchronize(self) -> None:
        return

    def wait_stream(self, stream: Any) -> None:
        return

    def wait_event(self, event: Any) -> None:
        return


class InlineEvent:
    def __init__(self) -> None:
        self.moment: float | None = None

    def record(self, stream: Any = None) -> None:
        self.moment = time.perf_counter()

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: Any) -> float:
        if self.moment is None or end.moment is None:
            raise RuntimeError("both events have to be recorded")
        return float(1e3 * (end.moment - self.moment))


class InlineHost(Platform, SupportsStreams):
    """One device: the host."""

    name: ClassVar[str] = "inline_host"  # of all below too: the name of the platform of the found device

    capabilities: ClassVar[PlatformCapabilities] = PlatformCapabilities(
        find_devices="tests.testing.held_out.platform:find_devices", compatible=("cpu",)
    )
    event: ClassVar[type] = InlineEvent

    def __init__(self, context: PlatformContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.local = threading.local()
        self.default = InlineStream()

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @property
    def device_name(self) -> str:
        return NAME

    def measure_memory(self) -> DeviceMemory:
        memory = psutil.virtual_memory()
        return DeviceMemory(int(memory.total), int(memory.available), is_shared=True)

    def count_reserved(self) -> int:
        return 0

    def synchronize(self) -> None:
        return

    def create_stream(self) -> DeviceStream:
        return InlineStream()

    def create_event(self, *, is_timed: bool = False) -> DeviceEvent:
        event: DeviceEvent = self.event()
        return event

    def get_current_stream(self) -> DeviceStream:
        stream: DeviceStream = getattr(self.local, "stream", self.default)
        return stream

    def set_stream(self, stream: DeviceStream) -> None:
        self.local.stream = stream


TWIN = InlineHost
WRONG = Wrong()


class Seconds(InlineEvent):
    def elapsed_time(self, end: Any) -> float:
        return super().elapsed_time(end) / 1e3


@WRONG.add("Measured kernels look a thousand times as fast, and choices between them are wrong: times are in seconds.")
class TimesInSeconds(InlineHost):
    event = Seconds


class NeedsRecord(InlineEvent):
    def synchronize(self) -> None:
        while self.moment is None:
            time.sleep(0.001)


@WRONG.add("The engine hangs at its first step: waiting for an event that was never recorded does not return.")
class WaitsForRecord(InlineHost):
    event = NeedsRecord


class Backwards(InlineEvent):
    def elapsed_time(self, end: Any) -> float:
        return -super().elapsed_time(end)


@WRONG.add("Durations are negative: the end is subtracted from the start.")
class TimesBackwards(InlineHost):
    event = Backwards


@WRONG.add("Copies of one thread run on the stream of another: the current stream is kept in the object, not by thread.")
class OneCurrentStream(InlineHost):
    def set_stream(self, stream: DeviceStream) -> None:
        self.default = stream  # type: ignore[assignment]

    def get_current_stream(self) -> DeviceStream:
        return self.default


@WRONG.add("After an error on the side stream all later work runs there: the stream before is not set again.")
class StaysOnSide(InlineHost):
    def use_stream(self, stream: DeviceStream) -> contextlib.AbstractContextManager[object]:
        return self.switch(stream)

    @contextlib.contextmanager
    def switch(self, stream: DeviceStream) -> Iterator[None]:
        before = self.get_current_stream()
        self.set_stream(stream)
        yield
        self.set_stream(before)


@WRONG.add("A step's inputs are overwritten by the next one's: page-locked memory of a size is handed out again while it is used.")
class PoolsPinned(InlineHost):
    def __init__(self, context: PlatformContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.pinned: dict[Any, torch.Tensor] = {}

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        key = tuple(shape), dtype
        if key not in self.pinned:
            self.pinned[key] = super().allocate_pinned(shape, dtype)
        return self.pinned[key]


@WRONG.add("Token ids above 16 million are wrong: page-locked memory always holds float32.")
class PinsFloats(InlineHost):
    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return super().allocate_pinned(shape, torch.float32 if dtype.itemsize == 4 else dtype)


@WRONG.add("The start fails for want of memory, or the KV cache is far too small: sizes are in KiB.")
class CountsKib(InlineHost):
    def measure_memory(self) -> DeviceMemory:
        memory = super().measure_memory()
        return DeviceMemory(memory.total // 1024, memory.free // 1024, is_shared=True)


@WRONG.add("The KV cache is larger than the memory, and the process is killed: swap counts as free.")
class CountsSwap(InlineHost):
    def measure_memory(self) -> DeviceMemory:
        memory, swap = super().measure_memory(), 64 << 30
        return DeviceMemory(memory.total, memory.free + swap, is_shared=True)


@WRONG.add("The KV cache is sized by memory that was free at the start: it is measured once.")
class MeasuresOnce(InlineHost):
    memory: DeviceMemory | None = None

    def measure_memory(self) -> DeviceMemory:
        if self.memory is None:
            self.memory = super().measure_memory()
        return self.memory


@WRONG.add("Kernels are compiled again at each start: the name under which they are kept has the process id.")
class NamesByProcess(InlineHost):
    @property
    def device_name(self) -> str:
        return f"{NAME} {os.getpid()}"


@WRONG.add("Steps pause with each heartbeat: all objects are walked to add up what is reserved.")
class WalksObjects(InlineHost):
    def count_reserved(self) -> int:
        import torch

        gc.collect()
        return sum(each.nbytes for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.device.type == "meta")


@WRONG.add("Requests without a seed get equal texts after each start of a thread: it seeds torch anew.")
class SeedsThreads(InlineHost):
    def activate(self) -> None:
        import torch

        torch.manual_seed(0)


@WRONG.add("Two computations that should overlap make a stream for each layer until there are none left: the side stream is always new.")
class NewSideStreams(InlineHost):
    def get_side_stream(self) -> DeviceStream:
        return self.create_stream()


@WRONG.add("Two copies that should run one after the other share a stream with everything else: a new stream is the default one.")
class SharesStreams(InlineHost):
    def create_stream(self) -> DeviceStream:
        return self.default


def find_with_torch() -> UsableDevices:
    import torch

    return UsableDevices((Accelerator("inline_host", NAME, None, torch.empty(1).nbytes and psutil.virtual_memory().total),))


@WRONG.add("`frame --help` and each start take seconds longer: devices are found with torch.")
class FindsWithTorch(InlineHost):
    capabilities = PlatformCapabilities(find_devices="tests.testing.held_out.platform:find_with_torch", compatible=("cpu",))


def find_without_memory() -> UsableDevices:
    return UsableDevices((Accelerator("inline_host", "host", (9, 0), 0),))


@WRONG.add("A plan says that no model fits, and kernels of another chip are chosen: the found device is not the one that is used.")
class FindsNoMemory(InlineHost):
    capabilities = PlatformCapabilities(find_devices="tests.testing.held_out.platform:find_without_memory", compatible=("cpu",))
