"""Decode attention of latents with 64 heads a program against float64: lengths, pages, widths of a
share, numbers that are none, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from frame.entrypoints.tools.bench.paged_batches import Case, Rows, build_context
from frame.plugins.loader import load_registry
from frame.testing.attention.suite import check_case, check_replays

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from frame import kernels
    from frame.attention_backends.triton import decode_launch
    from frame.attention_backends.triton.hopper import latent_decode

    pytestmark.append(pytest.mark.skipif(not kernels.supports_tma_streaming(torch.device("cuda")), reason="needs compute capability 9.0"))

LATENTS = Case(Rows.of([1]), heads=64, rank=512, rope=64, head_dim=192, v_head_dim=128, dtype=torch.bfloat16, device="cuda")
ROWS = {
    "edges": Rows.of([1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000]),
    "one": Rows.of([2999]),
    "many": Rows.of([1 + 37 * n % 700 for n in range(90)]),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each launch of the kernel."""
    found: list[int] = []
    attend = latent_decode.attend_latents
    monkeypatch.setattr(latent_decode, "attend_latents", lambda *args: (found.append(1), attend(*args)))
    return found


def make(case: Case) -> object:
    registry = load_registry(installed=False)
    record = registry.get("attention_backend", "triton")
    return registry.load(record)(build_context(case.device, case.dtype, case.page_size, rows=96), registry.options(record, {}))


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype", "processors"),
    [(64, 16, torch.bfloat16, 132), (128, 64, torch.float16, 132), (64, 32, torch.bfloat16, 3)],
    ids=str,
)
@pytest.mark.parametrize("load", ROWS)
def test_rows(
    load: str, heads: int, page_size: int, dtype: torch.dtype, processors: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = decode_launch.DeviceLimits.from_device(torch.device("cuda"))
    monkeypatch.setattr(decode_launch.DeviceLimits, "from_device", lambda _: replace(limits, processors=processors))
    check_case(make, replace(LATENTS, rows=ROWS[load], heads=heads, page_size=page_size, dtype=dtype))
    assert calls


def test_replays(calls: list[int]) -> None:
    changes = (Rows.of([3000, 1, 17, 64, 2, 900]), ()), (Rows.of([1] * 6), ()), (Rows.of([128, 256, 64, 65, 1, 512]), ())
    check_replays(make, replace(LATENTS, rows=Rows.of([5, 37, 300, 1, 999, 64])), changes)
    assert calls
