"""Seeded workloads: prompts, output lengths and arrival times. Must not know an engine or a
server."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

Span = tuple[int, int]  # minimum, maximum (inclusive)


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of a workload. Lengths are in tokens, drawn uniformly from their range.
    shared: length of the prefix that the prompts of a group share. groups: number of groups;
    requests are assigned in turn."""

    requests: int
    input: Span
    output: Span
    shared: int = 0
    groups: int = 1
    temperature: float = 0.0

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, prompt plus output."""
        return self.shared + self.input[1] + self.output[1]

    @property
    def common(self) -> int:
        """Length of the prefix that all prompts share; 0 with several groups."""
        return self.shared if self.groups == 1 else 0

    def jobs(self, vocab_size: int, seed: int, arrivals: Arrivals | None = None) -> list[Job]:
        """The requests. Token ids depend on the seed, so that prompts of one round are not in the
        prefix cache of another."""
        rng = random.Random(seed)
        first = min(10, vocab_size - 1)  # the lowest ids are often special tokens

        def tokens(count: int) -> list[int]:
            return [rng.randrange(first, vocab_size) for _ in range(count)]

        heads = [tokens(self.shared) for _ in range(self.groups)]
        times = (arrivals or Arrivals()).times(self.requests, rng)
        return [
            Job(heads[i % self.groups] + tokens(rng.randint(*self.input)), rng.randint(*self.output), at, self.temperature)
            for i, at in enumerate(times)
        ]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival times. rate: mean requests per second; infinite: all at once. Gaps are gamma
    distributed; burstiness 1: Poisson process, below 1: bursts, above 1: more even."""

    rate: float = math.inf
    burstiness: float = 1.0

    def times(self, count: int, rng: random.Random) -> list[float]:
        """Seconds from the start, ascending; the first is 0."""
        if math.isinf(self.rate):
            return [0.0] * count
        times = [0.0]
        for _ in range(count - 1):
            times.append(times[-1] + rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness)))
        return times


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload."""

    prompt: list[int]
    output: int
    at: float  # seconds from the start
    temperature: float


SHAPES: Mapping[str, Shape] = {
    "mixed": Shape(64, (32, 256), (32, 256)),
    "mixed256": Shape(256, (100, 1024), (100, 1024), temperature=0.6),
    "single": Shape(1, (128, 128), (256, 256)),
    "batch8": Shape(8, (128, 128), (256, 256)),
    "prefill": Shape(16, (4096, 4096), (1, 1)),
    "prefix": Shape(64, (64, 64), (64, 64), shared=4096),
    "longctx": Shape(4, (16_000, 16_000), (128, 128)),
}


def span(text: str) -> Span:
    """Parse a length `128` or a range `32:256`. Raises ValueError."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"{text!r} is not a range of lengths; write 128 or 32:256")
    return bounds


def changed(shape: Shape, **changes: object) -> Shape:
    """The shape with the changes that are not None."""
    return replace(shape, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
