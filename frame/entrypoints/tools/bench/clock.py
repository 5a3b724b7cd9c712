"""Times calls on a device, and measures the device's peak rates. Must not know a backend.

Several calls on different data run in turn, so that no call finds its data in a cache. On a GPU
they are captured as a CUDA graph where possible, which excludes host time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from frame.core.interfaces.platform import CapturedGraph, SupportsStreams
from frame.entrypoints.tools.bench.floors import Ceilings
from frame.plugins.devices import capture_graph, open_platform

Call = Callable[[], Any]
How = Literal["graph", "events", "host"]

LARGER_THAN_CACHES = 256 << 20  # bytes of data that the calls in turn should cover on a GPU
_MIN_ROUNDS, _MAX_ROUNDS = 5, 200


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one call (median over rounds), and the method: replay of a CUDA graph, CUDA
    events, or the host's clock."""

    seconds: float
    how: How


class Clock:
    """Times calls on one device. budget: seconds per measurement."""

    def __init__(self, device: torch.device, budget: float = 0.3) -> None:
        self.device = device
        self._platform = open_platform(device)
        self._budget = budget

    def time(self, calls: Sequence[Call], graph: bool = True) -> Timed:
        """Time one call of `calls`, which run in turn. Each runs once before, to compile and
        allocate."""
        for call in calls:
            call()
        streams = self._platform if isinstance(self._platform, SupportsStreams) else None
        if streams is None:
            return Timed(self._on_host(calls), "host")
        streams.synchronize()
        recorded = self._recorded(streams, calls) if graph else None
        if recorded is None:
            return Timed(self._by_events(streams, calls), "events")
        return Timed(self._by_events(streams, [recorded.replay]) / len(calls), "graph")

    def _recorded(self, streams: SupportsStreams, calls: Sequence[Call]) -> CapturedGraph | None:
        """The calls as a graph; None if they cannot be captured, because one synchronises or
        allocates outside the graph's pool."""
        try:
            return capture_graph(self._platform, lambda: [call() for call in calls])
        except RuntimeError:
            streams.synchronize()
            return None

    def _by_events(self, streams: SupportsStreams, calls: Sequence[Call]) -> float:
        def round_seconds() -> float:
            first, second = (streams.create_event(is_timed=True) for _ in range(2))
            first.record()
            for call in calls:
                call()
            second.record()
            second.synchronize()
            return float(first.elapsed_time(second)) / 1e3 / len(calls)

        return self._median(round_seconds, len(calls))

    def _on_host(self, calls: Sequence[Call]) -> float:
        def round_seconds() -> float:
            began = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - began) / len(calls)

        return self._median(round_seconds, len(calls))

    def _median(self, round_seconds: Callable[[], float], calls: int) -> float:
        once = max(round_seconds() * calls, 1e-6)
        return statistics.median(round_seconds() for _ in range(int(min(_MAX_ROUNDS, max(_MIN_ROUNDS, self._budget / once)))))


def measured_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure read and copy bandwidth on data larger than the caches, and the rate of a large
    matrix product."""
    clock = Clock(device)
    read, copy = _bandwidths(clock)
    ceilings = Ceilings(read, _operations(clock, dtype), copy)
    open_platform(device).release_memory()
    return ceilings


def _bandwidths(clock: Clock) -> tuple[float, float]:
    """(bytes/s read, bytes/s read plus written by a copy)."""
    is_gpu = clock.device.type == "cuda"
    source = torch.randint(0, 1 << 30, ((1 << 30) if is_gpu else (1 << 24),), dtype=torch.int32, device=clock.device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    read = clock.time([lambda: source.sum(dtype=torch.int32) if is_gpu else source.max()])
    copied = clock.time([lambda: target.copy_(source)], graph=False)  # in a graph, a slower copy engine would be used
    return size / read.seconds, 2 * size / copied.seconds


def _operations(clock: Clock, dtype: torch.dtype) -> float:
    """Operations/s of square matrix products, the maximum over a few sizes."""
    rate = 0.0
    for width in (4096, 8192, 16384) if clock.device.type == "cuda" else (1024,):
        left, right = (torch.randn(width, width, device=clock.device, dtype=dtype) for _ in range(2))
        rate = max(rate, 2 * width**3 / clock.time([partial(torch.matmul, left, right)]).seconds)
    return rate
