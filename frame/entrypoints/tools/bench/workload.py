"""Seeded workloads: prompts, output lengths and arrival times, and the choice of workloads by name.
The six reference workloads are identical for all engines. Must not know an engine or a server."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Span = tuple[int, int]  # minimum, maximum (inclusive)
ALL = "all"  # the name of all six reference workloads
SEED = 0
LOWEST, IDS = 10, 10_000  # drawn ids: LOWEST to IDS, both inclusive; shifted ids: IDS values from LOWEST
STRIDE = 17  # shift of the ids from round to round


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


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once. shared: length of the common prefix. counts: whether prompt or
    output tokens are its throughput. Each round shifts the token ids, so that its prompts are not
    in the prefix cache of an earlier round."""

    prompts: list[list[int]]
    outputs: list[int]
    temperature: float = 0.0
    shared: int = 0
    counts: str = "output"

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, prompt plus output."""
        return max(len(prompt) + output for prompt, output in zip(self.prompts, self.outputs, strict=True))

    @property
    def common(self) -> int:
        """Length of the prefix that all prompts share."""
        return self.shared

    def jobs(self, vocab_size: int, number: int, arrivals: Arrivals | None = None) -> list[Job]:
        """The requests of round `number`, with ids below `vocab_size`."""
        lowest, shift = min(LOWEST, vocab_size - 1), STRIDE * number + 1
        ids = min(IDS, vocab_size - lowest)
        prompts = [[(token + shift) % ids + lowest for token in prompt] for prompt in self.prompts]
        times = (arrivals or Arrivals()).times(len(prompts), random.Random(number))
        return [Job(prompt, output, at, self.temperature) for prompt, output, at in zip(prompts, self.outputs, times, strict=True)]

    def shrunk(self, factor: int) -> Workload:
        """The workload with fewer requests and shorter lengths, both divided by `factor`."""
        count, shared = max(1, len(self.prompts) // factor), self.shared // factor
        tails = [prompt[self.shared :] for prompt in self.prompts[:count]]
        return replace(
            self,
            prompts=[prompt[:shared] + tail[: max(1, len(tail) // factor)] for prompt, tail in zip(self.prompts, tails, strict=False)],
            outputs=[max(1, output // factor) for output in self.outputs[:count]],
            shared=shared,
        )


def reference_workloads() -> Mapping[str, Workload]:
    """The six reference workloads by name. The order of random draws must not change."""
    rng = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return [rng.randint(LOWEST, IDS) for _ in range(count)]

    prompts = [tokens(rng.randint(100, 1024)) for _ in range(256)]
    mixed = Workload(prompts, [rng.randint(100, 1024) for _ in range(256)], temperature=0.6)
    head = tokens(4096)
    return {
        "mixed256": mixed,
        "single": Workload([tokens(128)], [256]),
        "batch8": Workload([tokens(128) for _ in range(8)], [256] * 8),
        "prefill": Workload([tokens(4096) for _ in range(16)], [1] * 16, counts="prompt"),
        "prefix": Workload([head + tokens(64) for _ in range(64)], [64] * 64, shared=len(head)),
        "longctx": Workload([tokens(16_000) for _ in range(4)], [128] * 4),
    }


def chosen(names: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Workload | Shape]:
    """Workloads by name; with a change, drawn anew from their shape."""
    fixed = reference_workloads()
    every = [each for name in names or ("mixed",) for each in (fixed if name == ALL else (name,))]
    is_changed = any(value is not None for value in changes.values())
    return {name: fixed[name] if name in fixed and not is_changed else changed(SHAPES[name], **changes) for name in every}
