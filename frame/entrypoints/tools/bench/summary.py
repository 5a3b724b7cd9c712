"""Computes rates and percentiles from the timings of requests. Must not know an engine, a server or
a terminal."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Timing:
    """The timing of one request, in seconds of one clock. due: arrival time. sent: time of sending.
    events: times of received events. tokens: number of output tokens. ids: output tokens, where
    the server sends them."""

    due: float
    prompt_tokens: int
    sent: float = 0.0
    events: list[float] = field(default_factory=list)
    tokens: int = 0
    ids: array[int] = field(default_factory=lambda: array("i"))
    error: str = ""

    @property
    def first_token(self) -> float:
        """TTFT in seconds from the arrival time, so waiting for a connection counts."""
        return self.events[0] - self.due

    @property
    def end_to_end(self) -> float:
        return self.events[-1] - self.due

    @property
    def between_tokens(self) -> float:
        """Mean ITL in seconds; 0 for an output of one token."""
        return (self.events[-1] - self.events[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency goals in milliseconds; None: no goal."""

    first_token: float | None = None
    between_tokens: float | None = None
    end_to_end: float | None = None

    def is_met(self, timing: Timing) -> bool:
        """Whether a successful request meets all goals."""
        limits = (
            (self.first_token, timing.first_token),
            (self.between_tokens, timing.between_tokens),
            (self.end_to_end, timing.end_to_end),
        )
        return all(limit is None or seconds * 1e3 <= limit for limit, seconds in limits)


def row(timings: Sequence[Timing], objective: Objective | None = None) -> dict[str, Any]:
    """Counts, rates and percentiles in milliseconds. Rates are over the time from the first arrival
    to the last event."""
    done = [timing for timing in timings if not timing.error]
    errors = sorted({timing.error for timing in timings if timing.error})
    figures: dict[str, Any] = {"requests": len(timings), "failed": len(timings) - len(done), "errors": errors[:5]}
    if not done:
        return figures
    seconds = max(timing.events[-1] for timing in done) - min(timing.due for timing in timings)
    outputs = sum(timing.tokens for timing in done)
    gaps = np.concatenate([np.diff(timing.events) for timing in done])
    figures |= {
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(outputs / seconds, 1),
        "prompt_tokens_per_s": round(sum(timing.prompt_tokens for timing in done) / seconds, 1),
        "output_tokens": outputs,
        "first_token_ms": percentiles([timing.first_token for timing in done]),
        "between_tokens_ms": percentiles([timing.between_tokens for timing in done if timing.tokens > 1]),
        "between_events_ms": percentiles(gaps.tolist()),
        "end_to_end_ms": percentiles([timing.end_to_end for timing in done]),
    }
    if objective is not None:
        good = sum(objective.is_met(timing) for timing in done)
        figures |= {"good": good, "goodput_per_s": round(good / seconds, 3)}
    return figures


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty without values."""
    if not len(seconds):
        return {}
    values = np.asarray(seconds) * 1e3
    ranked = np.percentile(values, PERCENTILES)
    return {
        "mean": round(float(values.mean()), 3),
        **{f"p{rank}": round(float(value), 3) for rank, value in zip(PERCENTILES, ranked, strict=True)},
    }
