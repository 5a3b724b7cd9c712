"""Summarises the steps of a trace: kernels, gaps between kernels, and host time. Must not know
files or terminals.

Steps of one kind (decode, extend, mixed) are one row. Gaps are measured between consecutive steps
of equal kind and size.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from frame.entrypoints.tools.bench.trace import Span, Step, Trace

MAX_LINES = 40  # lines of a table; the rest is one sum
_MAX_NAME_LENGTH = 90
_ARGUMENTS = re.compile(r"\(.*|<.*", re.DOTALL)


def step_times(trace: Trace) -> dict[str, dict[str, Any]]:
    """A row per kind of step: duration, idle time, kernels and host functions."""
    rows: dict[str, dict[str, Any]] = {}
    for kind in ("decode", "mixed", "extend"):
        steps = [step for step in trace.steps if step.kind == kind and step.device]
        if steps:
            rows[kind] = {
                "steps": len(steps),
                "rows": _mean(step.rows for step in steps),
                "tokens": _mean(step.tokens for step in steps),
                **_times(steps, list(_followed(trace.steps, kind))),
                "kernels": _kernels(steps, trace.has_gpu),
                "host": _host(steps),
            }
    return rows


def _followed(steps: Sequence[Step], kind: str) -> Iterator[tuple[Step, Step]]:
    """Pairs of consecutive steps of equal kind and size."""
    for step, after in itertools.pairwise(steps):
        is_next = after.number == step.number + 1 and step.kind == after.kind == kind and step.tokens == after.tokens
        if is_next and step.device and after.device:
            yield step, after


def _times(steps: Sequence[Step], pairs: Sequence[tuple[Step, Step]]) -> dict[str, Any]:
    """Medians in milliseconds. `period_ms` is the time from the first kernel of a step to the first
    of the next."""
    row: dict[str, Any] = {
        "launch_ms": _median(step.end - step.start for step in steps),
        "device_ms": _median(_last(step) - step.device[0].start for step in steps),
        "busy_ms": _median(sum(exclusive for _, exclusive in exclusive_times(step.device)) for step in steps),
        "kernels_per_step": _mean(len(step.device) for step in steps),
    }
    if pairs:
        row["period_ms"] = _median(after.device[0].start - step.device[0].start for step, after in pairs)
        row["gaps_inside_ms"] = _median(
            _last(step) - step.device[0].start - sum(exclusive for _, exclusive in exclusive_times(step.device)) for step, _ in pairs
        )
        row["gap_after_ms"] = _median(max(0.0, after.device[0].start - _last(step)) for step, after in pairs)
        row["between_launches_ms"] = _median(after.start - step.end for step, after in pairs)
        if row["period_ms"]:
            row["idle_share"] = round((row["gaps_inside_ms"] + row["gap_after_ms"]) / row["period_ms"], 4)
    return row


def exclusive_times(spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """The exclusive device time of each span, in microseconds. Spans are in order of their start; a
    span that starts while another runs (programmatic dependent launch) counts from the end of the
    other."""
    end = float("-inf")
    for span in spans:
        yield span, max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)


def _kernels(steps: Sequence[Step], has_gpu: bool) -> list[dict[str, Any]]:
    """Kernels by exclusive time: share of the steps' busy time, launches per step, mean, and mean
    including the wait for the kernel before."""
    exclusive: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for step in steps:
        # operators nest, kernels only overlap
        spans = exclusive_times(step.device) if has_gpu else self_times(step.host)
        for span, time in spans:
            name = short_name(span.name)
            exclusive[name] += time
            whole[name] += span.end - span.start
            counts[name] += 1
    total = sum(exclusive.values()) or 1.0
    ordered = sorted(exclusive, key=exclusive.__getitem__, reverse=True)
    rows = [
        {
            "name": name,
            "share": round(exclusive[name] / total, 4),
            "per_step": round(counts[name] / len(steps), 2),
            "mean_us": round(exclusive[name] / counts[name], 2),
            "with_waiting_us": round(whole[name] / counts[name], 2),
            "us_per_step": round(exclusive[name] / len(steps), 2),
        }
        for name in ordered[:MAX_LINES]
    ]
    if rest := ordered[MAX_LINES:]:
        left = sum(exclusive[name] for name in rest)
        rows.append({"name": f"{len(rest)} others", "share": round(left / total, 4), "us_per_step": round(left / len(steps), 2)})
    return rows


def _host(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The launching thread: operators and CUDA calls by self time, and the rest."""
    exclusive: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for step in steps:
        for span, time in self_times(step.host):
            exclusive[span.name] += time
            counts[span.name] += 1
    launching = sum(step.end - step.start for step in steps)
    exclusive["Python and untraced code"] = launching - sum(exclusive.values())
    ordered = sorted(exclusive, key=exclusive.__getitem__, reverse=True)[:MAX_LINES]
    return [
        {
            "name": name,
            "share": round(exclusive[name] / launching, 4) if launching else 0.0,
            "per_step": round(counts[name] / len(steps), 2),
            "us_per_step": round(exclusive[name] / len(steps), 2),
        }
        for name in ordered
    ]


def self_times(spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """The self time of each span, in microseconds: without the spans inside it. Spans nest and are
    in order of their start."""
    open_spans: list[list[Any]] = []  # [span, its own time so far]
    for span in spans:
        while open_spans and open_spans[-1][0].end <= span.start:
            yield tuple(open_spans.pop())  # type: ignore[misc]
        if open_spans:
            open_spans[-1][1] -= span.end - span.start
        open_spans.append([span, span.end - span.start])
    while open_spans:
        yield tuple(open_spans.pop())  # type: ignore[misc]


def short_name(name: str) -> str:
    """The name of a kernel without template arguments and parameters."""
    name = name.removeprefix("void ")
    bare = _ARGUMENTS.sub("", name)
    if "elementwise" in bare or "reduce" in bare or "vectorized" in bare:  # torch's kernels share these names; the functor tells them apart
        functor = re.search(r"(\w*(?:Functor|Ops|_kernel_cuda|kernel_impl)\w*)", name[len(bare) :])
        bare = f"{bare} {functor.group(1)}" if functor else bare
    return (bare or name)[:_MAX_NAME_LENGTH]


def _last(step: Step) -> float:
    return max(span.end for span in step.device)


def _median(microseconds: Iterable[float]) -> float:
    return round(statistics.median(microseconds) / 1e3, 4)


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 2)
