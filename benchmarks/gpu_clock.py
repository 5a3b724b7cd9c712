"""The time of a launch on a GPU, in a CUDA graph of many launches, and of a copy. Used by other
benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

Average = Callable[[list[float]], float]


def seconds(launch: Callable[[int], object], copies: int, launches: int, repeats: int = 3, average: Average = median) -> float:
    """Seconds of `launch`, which is given the number of a weight, 0 to `copies` - 1: the `average`
    over replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(launches):
                launch(number % copies)
        graph.replay()
        taken = []
        for _ in range(repeats):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stop.synchronize()
            taken.append(start.elapsed_time(stop) / 1000 / launches)
    return average(taken)


def time_copy(num_bytes: int) -> float:
    """Seconds of a copy from page-locked memory to the device in one piece."""
    if not torch.cuda.is_available():
        return 0.0
    host, device = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
