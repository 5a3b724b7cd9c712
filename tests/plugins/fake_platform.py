"""A platform of its own name that computes on the host: streams and events do nothing, graphs
record operations, and the memory has a size that an option sets.

The tests serve with it, the suite's mutants derive from it, and authors of platforms may read it as
an example. `register_platforms` registers it as `fake`.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from frame import hookimpl
from frame.core.interfaces.platform import (
    DeviceMemory,
    HostPlatform,
    PlatformCapabilities,
    PlatformContext,
    SupportsGraphs,
    SupportsStreams,
)
from tests.plugins.fake_devices import MEMORY

if TYPE_CHECKING:
    from frame.registration import KindRegistry

CAPABILITIES = PlatformCapabilities(find_devices="tests.plugins.fake_devices:find_devices", graphs=True, compatible=("cpu",))


class FakeOptions(BaseModel):
    """Options of the platform."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory: int = Field(MEMORY, description="Bytes of a device.")


class FakeStream:
    """A stream whose work has always run."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


class FakeEvent:
    """An event that happens when it is recorded."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


class FakeGraph(TorchDispatchMode):
    """The operations between `begin_capture` and `end_capture`. `replay` runs them again and writes
    their results to the memory of the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("a value is read while a graph is captured")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakePlatform(HostPlatform, SupportsStreams, SupportsGraphs):
    """The host under another name, with streams and graphs."""

    graph_class: ClassVar[type[FakeGraph]] = FakeGraph

    def __init__(self, context: PlatformContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._memory = options.memory if isinstance(options, FakeOptions) else MEMORY
        self._own = threading.local()
        self._default = FakeStream()

    @property
    def device_name(self) -> str:
        return "Fake 1"

    def measure_memory(self) -> DeviceMemory:
        return DeviceMemory(self._memory, self._memory - (64 << 20), reserved=32 << 20, peak=16 << 20)

    def synchronize(self) -> None:
        return None

    def create_stream(self) -> FakeStream:
        return FakeStream()

    def create_event(self, *, is_timed: bool = False) -> FakeEvent:
        return FakeEvent()

    def get_current_stream(self) -> FakeStream:
        return getattr(self._own, "stream", self._default)

    def set_stream(self, stream: Any) -> None:
        self._own.stream = stream

    def create_graph_pool(self) -> object:
        return object()

    def begin_capture(self, pool: object) -> FakeGraph:
        self._own.graph = self.graph_class()
        self._own.graph.__enter__()
        return self._own.graph

    def end_capture(self, graph: Any) -> None:
        self._own.graph = None
        graph.__exit__(None, None, None)

    @property
    def is_capturing(self) -> bool:
        return getattr(self._own, "graph", None) is not None


@hookimpl
def register_platforms(registry: KindRegistry) -> None:
    """Add the platform."""
    registry.add("fake", FakePlatform, capabilities=CAPABILITIES, options=FakeOptions, summary="The host under another name, for tests.")
