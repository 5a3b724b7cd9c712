"""The time of a launch on a GPU, in a CUDA graph of many launches. Used by the benchmarks of matrix
products."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch


def seconds(launch: Callable[[int], object], copies: int, launches: int, repeats: int = 3) -> float:
    """Median seconds of `launch`, which is given the number of a weight, 0 to `copies` - 1."""
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
    return median(taken)
