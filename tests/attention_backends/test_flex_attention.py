"""`flex_attention` passes the conformance suite in its eager form; tests/gpu checks the compiled
kernels."""

from __future__ import annotations

import warnings

import pytest
import torch

from frame.attention_backends.flex_attention import _kernel_options
from frame.plugins.loader import load_registry
from frame.testing import conformance

SUBJECT = conformance.find(load_registry(installed=False), "attention_backend:flex_attention", conformance.Setting())
CHECKS = conformance.checks("attention_backend", SUBJECT)


SOME = ("record", "-mixed", "window-of-one", "soft-cap", "sinks-", "short-extends", "encoder-shared")


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if any(part in name for part in SOME) else [pytest.mark.soak]


@pytest.mark.slow
@pytest.mark.parametrize("check", [pytest.param(check, id=check.name, marks=_marks(check.name)) for check in CHECKS])
def test_conformance(check: conformance.Check) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        check.run()


@pytest.mark.parametrize(("dtype", "width", "value"), [(torch.bfloat16, 128, 128), (torch.float16, 576, 512), (torch.float32, 192, 64)])
@pytest.mark.parametrize("queries", [1, 77])
def test_tiles_fit_the_gpu(dtype: torch.dtype, width: int, value: int, queries: int) -> None:
    """PyTorch's decode kernel would hold 77 queries of 8 heads at once, and its tiles are made for
    widths up to 128."""
    q, k, v = (torch.empty(2, heads, 5, size, dtype=dtype) for heads, size in ((8, width), (1, width), (1, value)))
    options = _kernel_options(q[:, :, :1].expand(-1, -1, queries, -1), k, v)
    row = 1 << (max(width, value) - 1).bit_length()
    if "BLOCK_M" in options:
        held = (options["BLOCK_M"] + 2 * options["num_stages"] * options["BLOCK_N"]) * row * dtype.itemsize
        assert held <= 227 << 10
    assert ("BLOCK_M" in options) == (row * dtype.itemsize > 256)
    assert ("FORCE_USE_FLEX_ATTENTION" in options) == (queries > 1 or "BLOCK_M" in options)
    assert ("FLOAT32_PRECISION" in options) == (dtype == torch.float32)
