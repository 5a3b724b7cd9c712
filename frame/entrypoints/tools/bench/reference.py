"""The six reference workloads, which are identical for all engines, and the choice of workloads by
name.

Lengths and token ids come from one seed. Each round shifts the ids, so that its prompts are not in
the prefix cache of an earlier round. Must not know an engine or a server.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frame.entrypoints.tools.bench.workload import SHAPES, Arrivals, Job, Shape, changed

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
