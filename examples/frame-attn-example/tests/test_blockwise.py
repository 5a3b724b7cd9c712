"""The backend compared with dense float64 arithmetic. `pytest
--frame-conformance=attention_backend:blockwise` runs the whole suite."""

from __future__ import annotations

import pytest
import torch

from frame.entrypoints.tools.bench.paged_batches import Case, Rows, build_context
from frame.plugins.loader import load_registry
from frame.testing.attention.suite import check_case
from frame_attn_example import BlockwiseOptions
from frame_attn_example.backend import BlockwiseBackend

MIXED = Rows.of([1, 17, 40], [(0, 5), (33, 20)])


def test_it_is_registered_and_loads() -> None:
    registry = load_registry()
    record = registry.get("attention_backend", "blockwise")
    assert record.distribution == "frame-attn-example"
    assert registry.load(record) is BlockwiseBackend
    assert registry.options(record, {"block_tokens": 3}) == BlockwiseOptions(block_tokens=3)


@pytest.mark.parametrize("block_tokens", [1, 7, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [{}, {"window": 9}, {"page_size": 1}, {"rank": 32, "rope": 16, "head_dim": 48}],
    ids=["mha", "window", "page-1", "mla"],
)
def test_it_agrees_with_float64(block_tokens: int, dtype: torch.dtype, shape: dict[str, int]) -> None:
    def make(case: Case) -> BlockwiseBackend:
        context = build_context(case.device, case.dtype, case.page_size)
        return BlockwiseBackend(context, BlockwiseOptions(block_tokens=block_tokens))

    check_case(make, Case(MIXED, dtype=dtype, **shape))
