"""Smaller inputs for the checks whose cost grows with them, a third of the time of the suites that
tests run; `make soak` runs them at the sizes that plugins are checked with. What they must find is
shown by the mutants, which are killed at these sizes.
"""

from __future__ import annotations

import pytest

from frame.testing.parsing import reading, tool_call_parser
from frame.testing.scheduling import kv_allocator
from frame.testing.serving import tracer
from frame.testing.weights import weight_source

SMALL = (
    (weight_source, "LARGE", 1 << 21),  # bytes of a tensor
    (tool_call_parser, "LONG_CALL", 4_000),  # characters; at 2,000 a square grows by 26 to 38, near the bound
    (reading, "LONG", 1_500),
    (reading, "PIECES", 2_500),
    (reading, "QUICK", 0.03),  # seconds
    (tracer, "NUM_SPANS", 8_000),
    (kv_allocator, "HUGE", 1 << 18),  # pages
)


def use_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in SMALL:
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
