"""`Platform`: the device of one rank, as the core, models and plugins use it: memory, streams,
events and captured graphs.

Every platform derives from `Platform`; the classes named `Supports…` are optional, and users find
them by `isinstance` at construction. A record (`PlatformCapabilities`) tells `resolve` what the
platform offers, and how to find its devices without importing torch. The platform itself is built
once for each rank and passed on as `RankContext.platform`. Importing this page imports no torch.
Must not know a model, a request or another plugin kind.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device that a process may use."""

    kind: str  # name of its platform: "cuda"
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int
    is_linked: bool = False  # it writes to the memory of all others of its platform here, over links made for that (NVLink)


@dataclass(frozen=True, slots=True)
class UsableDevices:
    """The usable devices of a platform, in the order of their indices. `note`: why a device that
    exists is not among them."""

    accelerators: tuple[Accelerator, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformCapabilities(Anything):
    """What a platform offers, readable without torch. It can be selected if it has a device."""

    find_devices: str | None = None  # "package.module:function" without arguments -> UsableDevices; None: the host itself
    graphs: bool = False  # a sequence of kernels can be captured and replayed
    compatible: tuple[str, ...] = ()  # platforms whose plugins run here too: "cpu" for those that are PyTorch operations alone
    preferred: tuple[str, ...] = ()  # "kind/name" of plugins that `auto` chooses before higher-ranked ones

    @property
    def is_host(self) -> bool:
        """Whether the model runs on the host's cores and in the host's memory."""
        return self.find_devices is None


@dataclass(frozen=True, slots=True)
class PlatformContext:
    """The place of a rank. `local_index`: of its device among those that the process sees;
    `threads`: for computing on the host's cores, None: PyTorch's default."""

    local_index: int = 0
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, in bytes."""

    total: int
    free: int  # what this process may still allocate
    reserved: int = 0  # held by PyTorch's allocator in this process
    peak: int = 0  # the most that tensors of this process have taken
    is_shared: bool = False  # the host's memory, which other processes and ranks take from as well


class DeviceStream(Protocol):
    """An ordered queue of work on the device."""

    def synchronize(self) -> None:
        """Block until everything that was queued has run."""

    def wait_stream(self, stream: Any) -> None:
        """Run later work only after everything queued on `stream` so far."""

    def wait_event(self, event: Any) -> None:
        """Run later work only after `event`."""


class DeviceEvent(Protocol):
    """A point in a stream."""

    def record(self, stream: Any = None) -> None:
        """Mark the end of what is queued on `stream` (None: the current one)."""

    def synchronize(self) -> None:
        """Block until the mark is reached; at once if the event was never recorded."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this timed event to `end`; both have happened."""
        ...


class CapturedGraph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue the work on the current stream, with the same addresses."""


class Platform(ABC):
    """The device of one rank.

    A platform whose calls return before the device has computed also derives from
    `SupportsStreams`: results are read after an event. The core seeds a device by
    `torch.manual_seed`.
    """

    def __init__(self, context: PlatformContext, options: BaseModel | None = None) -> None:
        self.context = context
        self.options = options

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the rank's tensors, with its index where there are several."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The product's name. Kernels compiled for one product are kept under it."""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """As in the device's `Accelerator`; None: the platform has no such number."""
        return None

    @property
    def profiler_activities(self) -> Sequence[Any]:
        """The `torch.profiler.ProfilerActivity` values of a recording."""
        import torch

        return [torch.profiler.ProfilerActivity.CPU]

    def activate(self) -> None:
        """Make the device this thread's current one. Called first in each thread that uses it."""

    @abstractmethod
    def measure_memory(self) -> DeviceMemory:
        """The device's memory now."""

    def count_reserved(self) -> int:
        """`measure_memory().reserved`, which is read with each heartbeat and may be cheaper to get
        alone."""
        return self.measure_memory().reserved

    def release_memory(self) -> None:
        """Give unused memory of PyTorch's allocator back to the device."""


class SupportsStreams(ABC):
    """Optional: the platform's calls are asynchronous, ordered by streams and events. Methods that
    a step calls (`set_stream`, `create_event`, `allocate_pinned`) must cost no more than the call
    of the library beneath."""

    _side_stream: DeviceStream | None = None

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all streams of the device are done."""

    @abstractmethod
    def create_stream(self) -> DeviceStream:
        """A new stream."""

    def get_side_stream(self) -> DeviceStream:
        """The second stream of models that overlap two computations. There is one for all layers,
        which run one after another."""
        if self._side_stream is None:
            self._side_stream = self.create_stream()
        return self._side_stream

    @abstractmethod
    def create_event(self, *, is_timed: bool = False) -> DeviceEvent:
        """A new event. `is_timed`: for `elapsed_time`."""

    @abstractmethod
    def get_current_stream(self) -> DeviceStream:
        """This thread's current stream of the device."""

    @abstractmethod
    def set_stream(self, stream: DeviceStream) -> None:
        """Make `stream` this thread's current one from now on."""

    def use_stream(self, stream: DeviceStream) -> contextlib.AbstractContextManager[object]:
        """Make `stream` this thread's current one inside a with block."""
        return _switch_stream(self, stream)

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory from which and to which asynchronous copies run beside the
        host; ordinary memory where there is none."""
        import torch

        return torch.empty(shape, dtype=dtype)


@contextlib.contextmanager
def _switch_stream(platform: SupportsStreams, stream: DeviceStream) -> Iterator[None]:
    before = platform.get_current_stream()
    platform.set_stream(stream)
    try:
        yield
    finally:
        platform.set_stream(before)


class SupportsPinning(ABC):
    """Optional, of a platform with streams: pins memory that others allocated."""

    @abstractmethod
    def pin_memory(self, memory: torch.Tensor) -> None:
        """Make mapped memory like that of `allocate_pinned`, until the process ends."""


class SupportsGraphs(ABC):
    """Optional, of a platform with streams: captures what is queued on a stream, and replays it
    with one call. The record says so too (`PlatformCapabilities.graphs`)."""

    @abstractmethod
    def create_graph_pool(self) -> object:
        """Memory that several graphs share, none of which is replayed while another one's results
        are read."""

    @abstractmethod
    def begin_capture(self, pool: object) -> CapturedGraph:
        """Wait for this thread's current stream, then capture what the thread queues on it. Other
        threads may use the device meanwhile."""

    @abstractmethod
    def end_capture(self, graph: CapturedGraph) -> None:
        """End the capture, also after an error. Raises RuntimeError where it failed."""

    @property
    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether this thread's current stream is being captured."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not keep it allocated. Used while a graph is
        captured, whose pool hands the memory out again."""
        return tensor


class SupportsSleep(ABC):
    """Optional: memory is released while an engine sleeps, and mapped again at its addresses.
    Memory has the tags of `frame.core.interfaces.runner.MEMORY_TAGS`."""

    def tag_allocations(self, tag: str) -> contextlib.AbstractContextManager[object]:
        """In a with block, what this thread allocates on the device can be released by `tag`."""
        return contextlib.nullcontext()

    def prepare_release(self, num_bytes: int) -> None:
        """The first `release_tag` that keeps values has so many bytes: preparations may begin."""

    @abstractmethod
    def release_tag(self, tag: str, tensors: Sequence[torch.Tensor], *, keeps_values: bool) -> int:
        """Release the memory of a tag, which has these tensors. No step runs, and nothing reads
        them before `map_tag`. keeps_values: `map_tag` brings the values back; otherwise they are
        zeros then, or what they were. -> the released bytes; 0 where this memory is what would be
        kept."""

    @abstractmethod
    def map_tag(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Map the memory of a tag again, at the same addresses."""


class SupportsSynchronisationChecks(ABC):
    """Optional: detects calls that wait for the device. Suites and tests use it."""

    @abstractmethod
    def check_synchronisation(self, *, is_allowed: bool) -> contextlib.AbstractContextManager[object]:
        """Inside a with block, calls that wait for the device raise RuntimeError, or not."""


class HostPlatform(Platform):
    """The host's cores and memory. Every call has been computed when it returns."""

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @property
    def device_name(self) -> str:
        return "cpu"

    def measure_memory(self) -> DeviceMemory:
        import psutil

        memory = psutil.virtual_memory()
        return DeviceMemory(int(memory.total), int(memory.available), is_shared=True)


HOST = HostPlatform(PlatformContext())
