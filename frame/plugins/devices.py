"""Opens a platform by the name that tests, suites and benchmarks give for a device.

Used by `frame bench` and the conformance suites. Must not know a platform by name, except
the host, which `open_platform` gives without its settings of threads and allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from frame.core.interfaces.platform import HOST, CapturedGraph, DeviceStream, Platform, PlatformContext, SupportsGraphs, SupportsStreams
from frame.plugins.loader import load_registry

if TYPE_CHECKING:
    import torch


def open_platform(device: str | torch.device) -> Platform:
    """The platform of a device: "cuda", "cuda:1" or `torch.device("cuda", 1)`. One for each device;
    it is made the current one. Raises PluginError for an unknown platform."""
    name, _, index = str(device).partition(":")
    if name == HOST.device.type:
        return HOST
    return _open(name, int(index or 0))


@lru_cache(maxsize=16)
def _open(name: str, index: int) -> Platform:
    registry = load_registry()
    record = registry.get("platform", name)
    platform: Platform = registry.load(record)(PlatformContext(index), registry.options(record, {}))
    platform.activate()
    return platform


def capture_graph(platform: Platform, run: Callable[[], object]) -> CapturedGraph:
    """Capture `run` in a graph of its own, on a stream for captures. Raises RuntimeError where it
    cannot be captured, or the platform captures no graphs."""
    if not (isinstance(platform, SupportsStreams) and isinstance(platform, SupportsGraphs)):
        raise RuntimeError(f"{type(platform).__name__} captures no graphs")
    pool = platform.create_graph_pool()
    platform.synchronize()
    platform.release_memory()
    with platform.use_stream(_capture_stream(platform)):
        graph = platform.begin_capture(pool)
        try:
            run()
        finally:
            platform.end_capture(graph)
    return graph


@lru_cache(maxsize=16)
def _capture_stream(platform: SupportsStreams) -> DeviceStream:
    """One stream for all captures of a platform: libraries keep workspaces for each stream."""
    return platform.create_stream()
