"""Arrivals of a simulation: those of a request dump, or drawn from a distribution. Must not know a
scheduler."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from frame.core.errors import ConfigError
from frame.entrypoints.tools.bench.dump import Recorded
from frame.entrypoints.tools.bench.workload import Arrivals, Span

FIRST_ID = 10  # the lowest ids are often special tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. `at`: seconds. `recorded`: the tokens of its output; None: they are unknown."""

    at: float
    prompt: list[int]
    output: int
    recorded: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Requests at random times. `rate`: mean requests/s; `day`: seconds of a period in which it
    goes from a fifth of `rate` up to it and back, 0: it is constant. Lengths are uniform in their
    range. `shared`: tokens of the prefix that the prompts of a group have in common."""

    rate: float
    seconds: float
    input: Span
    output: Span
    shared: int = 0
    groups: int = 1
    burstiness: float = 1.0
    day: float = 0.0

    def find_rate(self, at: float) -> float:
        """Mean requests/s at a time."""
        return self.rate * (0.6 - 0.4 * float(np.cos(2 * np.pi * at / self.day))) if self.day else self.rate

    def draw(self, vocab_size: int, seed: int) -> Iterator[Arrival]:
        """The requests, in the order of their times."""
        rng, gaps = np.random.default_rng(seed), random.Random(seed)
        first = min(FIRST_ID, vocab_size - 1)
        heads = [rng.integers(first, vocab_size, self.shared).tolist() for _ in range(self.groups)]
        at = 0.0
        while at < self.seconds:
            length = int(rng.integers(self.input[0], self.input[1] + 1))
            tail = rng.integers(first, vocab_size, length).tolist()
            head = heads[int(rng.integers(self.groups))] if self.shared else []
            yield Arrival(at, head + tail, int(rng.integers(self.output[0], self.output[1] + 1)))
            at += gaps.gammavariate(self.burstiness, 1 / (self.find_rate(at) * self.burstiness))


def read_arrivals(sequences: Sequence[Recorded], vocab_size: int, arrivals: Arrivals, seed: int) -> list[Arrival]:
    """The requests of a dump, at their own times unless `arrivals` has a rate. Raises ConfigError
    for one that needs what is not simulated."""
    used = [recorded for recorded in sequences if recorded.line.num_output]
    for recorded in used:
        line = recorded.line
        extra = {"media": line.media, "an adapter": line.adapter, "blocks of another server": line.is_transferred}
        if missing := next((name for name, value in extra.items() if value), None):
            raise ConfigError(f"the dump has requests with {missing}, which frame simulate does not model; remove them from it")
    if not used:
        raise ConfigError("the dump has no sequence with an output; record some with --request-dump")
    times = [recorded.line.at - used[0].line.at for recorded in used]
    if arrivals.rate != float("inf"):
        times = arrivals.times(len(used), random.Random(seed))
    return [
        Arrival(at, recorded.build_prompt(vocab_size), recorded.line.num_output, _output(recorded, vocab_size))
        for at, recorded in zip(times, used, strict=True)
    ]


def _output(recorded: Recorded, vocab_size: int) -> np.ndarray | None:
    return None if recorded.output is None else np.asarray(recorded.output, np.int64) % vocab_size
