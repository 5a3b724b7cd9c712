"""Reads a trace of torch's profiler (Chrome format) into steps with their device and host spans.

A kernel belongs to the step that launched it, found by correlation id; steps that overlap are
therefore separate. In a trace without a GPU, CPU operators take the place of kernels.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frame.core.errors import ConfigError

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}
_LABEL = re.compile(r"step (\d+): (\d+) decodes of (\d+) rows, (\d+) tokens$")


@dataclass(frozen=True, slots=True)
class Span:
    """A time span, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float
    correlation: int | None = None


@dataclass(slots=True)
class Step:
    """One step: its launch on the host (start, end), and the spans of device and host in order.
    Host spans nest."""

    number: int
    decodes: int
    rows: int
    tokens: int
    start: float
    end: float
    device: list[Span] = field(default_factory=list)
    host: list[Span] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """ "decode", "extend" or "mixed"."""
        if self.decodes == self.rows:
            return "decode"
        return "mixed" if self.decodes else "extend"


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of a trace. has_gpu: device spans are kernels of a GPU. strays: number of kernels
    that no recorded step launched."""

    steps: list[Step]
    has_gpu: bool
    strays: int


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises ConfigError for a file that is not a trace or has no steps."""
    events = [event for event in _events(path) if event.get("ph") == "X" and "dur" in event]
    steps, thread = _steps(events)
    if not steps:
        raise ConfigError(f"{path} has no steps of frame; send requests to the server while it records, or use `frame profile offline`.")
    starts = [step.start for step in steps]
    has_gpu = any(event.get("cat") in _DEVICE for event in events)
    calls = {}
    for event in events:
        kind = event.get("cat")
        if (kind in _CALLS or kind == "cpu_op") and event["tid"] == thread:
            span = _span(event)
            if kind in _CALLS and span.correlation is not None:
                calls[span.correlation] = span
            at = bisect.bisect_right(starts, span.start) - 1
            if at >= 0 and span.start < steps[at].end:
                steps[at].host.append(span)
    strays = _assign(steps, starts, [_span(event) for event in events if event.get("cat") in _DEVICE], calls) if has_gpu else 0
    for step in steps:
        step.host.sort(key=lambda span: (span.start, -span.end))
        if not has_gpu:
            step.device = outermost(step.host)
        step.device.sort(key=lambda span: span.start)
    return Trace(steps, has_gpu, strays)


def _assign(steps: Sequence[Step], starts: Sequence[float], kernels: Iterable[Span], calls: Mapping[int, Span]) -> int:
    """Assign each kernel to its step. -> number of kernels without a step."""
    strays = 0
    for kernel in kernels:
        call = calls.get(kernel.correlation) if kernel.correlation is not None else None
        at = -1 if call is None else bisect.bisect_right(starts, call.start) - 1
        if call is not None and at >= 0 and call.start < steps[at].end:
            steps[at].device.append(kernel)
        else:
            strays += 1
    return strays


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}).") from None
    except (ValueError, EOFError):
        raise ConfigError(f"{path} is no trace; give a .json or .json.gz that torch's profiler wrote.") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ConfigError(f"{path} is no trace; give a .json or .json.gz that torch's profiler wrote.")
    return events


def _steps(events: Iterable[Mapping[str, Any]]) -> tuple[list[Step], Any]:
    """The steps in order, and the thread that launched them."""
    steps, thread = [], None
    for event in events:
        match = _LABEL.match(str(event.get("name"))) if event.get("cat") == "user_annotation" else None
        if match:
            start = float(event["ts"])
            number, decodes, rows, tokens = map(int, match.groups())
            steps.append(Step(number, decodes, rows, tokens, start, start + float(event["dur"])))
            thread = event["tid"]
    return sorted(steps, key=lambda step: step.start), thread


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return Span(str(event["name"]), start, start + float(event["dur"]), (event.get("args") or {}).get("correlation"))


def outermost(spans: Iterable[Span]) -> list[Span]:
    """The spans that are inside no other span. Spans nest and are in order of their start."""
    merged: list[Span] = []
    for span in spans:
        if not merged or span.start >= merged[-1].end:
            merged.append(span)
    return merged
