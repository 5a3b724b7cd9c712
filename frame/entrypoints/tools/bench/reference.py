"""The six reference workloads, which are identical for all engines, and the choice of workloads by
name.

Lengths and token ids come from one seed. Each round shifts the ids, so that its prompts are not in
the prefix cache of an earlier round. Must not know an engine or a server.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from frame.entrypoints.tools.bench.workload import SHAPES, Arrivals, Job, Shape, changed, jobs

ALL = "all"  # the name of all six reference workloads
SEED = 0
LOWEST, IDS = 10, 10_000  # drawn ids: LOWEST to IDS, both inclusive; shifted ids: IDS values from LOWEST
STRIDE = 17  # shift of the ids from round to round


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once. shared: length of the common prefix. counts: whether prompt or
    output tokens are its throughput."""

    prompts: list[list[int]]
    outputs: list[int]
    temperature: float = 0.0
    shared: int = 0
    counts: str = "output"

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt plus output."""
        return max(len(prompt) + output for prompt, output in zip(self.prompts, self.outputs, strict=True))

    def jobs(self, vocab_size: int, number: int) -> list[Job]:
        """The requests of round `number`, with ids below `vocab_size`."""
        lowest, shift = min(LOWEST, vocab_size - 1), STRIDE * number + 1
        ids = min(IDS, vocab_size - lowest)
        prompts = [[(token + shift) % ids + lowest for token in prompt] for prompt in self.prompts]
        return [Job(prompt, output, 0.0, self.temperature) for prompt, output in zip(prompts, self.outputs, strict=True)]

    def shrunk(self, factor: int) -> Workload:
        """The workload for a small machine: number of requests and lengths divided by `factor`, at
        least 1."""
        count, shared = max(1, len(self.prompts) // factor), self.shared // factor
        tails = [prompt[self.shared :] for prompt in self.prompts[:count]]
        return replace(
            self,
            prompts=[prompt[:shared] + tail[: max(1, len(tail) // factor)] for prompt, tail in zip(self.prompts, tails, strict=False)],
            outputs=[max(1, output // factor) for output in self.outputs[:count]],
            shared=shared,
        )


def _mixed(tokens: Callable[[int], list[int]], rng: random.Random) -> Workload:
    prompts = [tokens(rng.randint(100, 1024)) for _ in range(256)]
    return Workload(prompts, [rng.randint(100, 1024) for _ in range(256)], temperature=0.6)


def reference_workloads() -> Mapping[str, Workload]:
    """The six reference workloads by name. The order of random draws must not change."""
    rng = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return [rng.randint(LOWEST, IDS) for _ in range(count)]

    mixed = _mixed(tokens, rng)
    head = tokens(4096)
    return MappingProxyType(
        {
            "mixed256": mixed,
            "single": Workload([tokens(128)], [256]),
            "batch8": Workload([tokens(128) for _ in range(8)], [256] * 8),
            "prefill": Workload([tokens(4096) for _ in range(16)], [1] * 16, counts="prompt"),
            "prefix": Workload([head + tokens(64) for _ in range(64)], [64] * 64, shared=len(head)),
            "longctx": Workload([tokens(16_000) for _ in range(4)], [128] * 4),
        }
    )


@dataclass(frozen=True)
class Chosen:
    """A selected workload: a reference workload, or one drawn from a shape."""

    shape: Shape
    fixed: Workload | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt plus output."""
        return self.shape.longest if self.fixed is None else self.fixed.longest

    @property
    def shared(self) -> int:
        """Length of the prefix that all prompts share; 0 with several groups."""
        if self.fixed is not None:
            return self.fixed.shared
        return self.shape.shared if self.shape.groups == 1 else 0

    @property
    def counts(self) -> str:
        """Whether "prompt" or "output" tokens are its throughput."""
        return "output" if self.fixed is None else self.fixed.counts

    def jobs(self, vocab_size: int, seed: int, arrivals: Arrivals | None = None) -> list[Job]:
        """The requests; their token ids depend on the seed."""
        if self.fixed is None:
            return jobs(self.shape, vocab_size, seed, arrivals)
        found = self.fixed.jobs(vocab_size, seed)
        times = (arrivals or Arrivals()).times(len(found), random.Random(seed))
        return [replace(job, at=at) for job, at in zip(found, times, strict=True)]


def chosen(names: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Chosen]:
    """Workloads by name. If a change is not None, reference workloads are drawn anew from their
    shape."""
    fixed = reference_workloads()
    every = [each for name in names or ("mixed",) for each in (fixed if name == ALL else (name,))]
    is_changed = any(value is not None for value in changes.values())
    return {name: Chosen(changed(SHAPES[name], **changes), None if is_changed else fixed.get(name)) for name in every}
