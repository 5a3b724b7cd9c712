"""Traces are read step by step: kernels go to the step that launched them, gaps and shares are
those that were put in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from frame.core.errors import ConfigError
from frame.entrypoints.tools.bench.step_times import exclusive_times, self_times, short_name, step_times
from frame.entrypoints.tools.bench.trace import Span, outermost, read_trace

GEMM = "void cutlass::gemm<128, 64>(float*, int)"


def event(category: str, name: str, start: float, duration: float, correlation: int | None = None, thread: int = 1) -> dict[str, Any]:
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": thread, "args": arguments}


def decode(number: int, at: float) -> list[dict[str, Any]]:
    """The host launches for 40 µs; the device runs 60, idles 10, runs 20, of which a programmatic
    launch overlaps 5 with the first."""
    return [
        event("user_annotation", f"step {number}: 4 decodes of 4 rows, 4 tokens", at, 40),
        event("gpu_user_annotation", f"step {number}: 4 decodes of 4 rows, 4 tokens", at + 50, 95, thread=7),
        event("cpu_op", "aten::add", at + 1, 10),
        event("cuda_runtime", "cudaLaunchKernel", at + 2, 4, 10 * number),
        event("cuda_runtime", "cudaGraphLaunch", at + 20, 15, 10 * number + 1),
        event("kernel", "add_kernel", at + 50, 15, 10 * number, thread=7),
        event("kernel", GEMM, at + 60, 50, 10 * number + 1, thread=7),
        event("kernel", GEMM, at + 120, 20, 10 * number + 1, thread=7),
    ]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events = [
        event("user_annotation", "step 1: 0 decodes of 2 rows, 64 tokens", 0, 30),
        event("cuda_runtime", "cudaLaunchKernel", 5, 2, 5),
        event("kernel", GEMM, 50, 900, 5, thread=7),
        *decode(2, 1000),
        *decode(3, 1100),
        *decode(4, 1200),
        event("kernel", "stray", 2000, 1, 999, thread=7),
        {"ph": "i", "name": "no span", "ts": 3},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events[::-1]}).encode()))
    return path


def test_times_of_steps(trace: Path) -> None:
    found = read_trace(trace)
    assert (found.has_gpu, found.strays, [step.kind for step in found.steps]) == (True, 1, ["extend", "decode", "decode", "decode"])
    rows = step_times(found)
    assert (rows["extend"]["steps"], rows["extend"]["tokens"], rows["extend"]["busy_ms"]) == (1, 64, 0.9)
    assert "period_ms" not in rows["extend"]
    row = rows["decode"]
    figures = ("steps", "period_ms", "busy_ms", "gaps_inside_ms", "gap_after_ms", "idle_share", "kernels_per_step", "launch_ms")
    assert [row[key] for key in figures] == [3, 0.1, 0.08, 0.01, 0.01, 0.2, 3, 0.04]
    assert row["between_launches_ms"] == 0.06


def test_kernels_and_host_functions_of_steps(trace: Path) -> None:
    row = step_times(read_trace(trace))["decode"]
    gemm, add = row["kernels"]
    assert gemm == {"name": "cutlass::gemm", "share": 0.8125, "per_step": 2, "mean_us": 32.5, "with_waiting_us": 35, "us_per_step": 65}
    assert add == {"name": "add_kernel", "share": 0.1875, "per_step": 1, "mean_us": 15, "with_waiting_us": 15, "us_per_step": 15}
    host = {line["name"]: line["us_per_step"] for line in row["host"]}
    assert host == {"cudaGraphLaunch": 15, "aten::add": 6, "cudaLaunchKernel": 4, "Python and untraced code": 15}


def test_spans_that_nest_and_spans_that_overlap() -> None:
    outer, inner, after = Span("a", 0, 10), Span("b", 2, 5), Span("c", 10, 12)
    assert dict(self_times([outer, inner, after])) == {outer: 7, inner: 3, after: 2}
    assert outermost([outer, inner, after]) == [outer, after]
    assert [own for _, own in exclusive_times([Span("a", 0, 10), Span("b", 4, 8), Span("c", 8, 15)])] == [10, 0, 5]


def test_names_of_kernels_are_short() -> None:
    assert short_name("_attention_decode_0d1d") == "_attention_decode_0d1d"
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"
    assert short_name(name) == "at::native::vectorized_elementwise_kernel CUDAFunctor_add"


STRANGE = b'{"traceEvents": [{"ph": "X", "name": "x", "ts": 0, "dur": 1}]}'


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\x1f\x8bnonsense", STRANGE])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_trace(path)
