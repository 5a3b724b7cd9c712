"""How launches are sized, and what a CPU's launch lacks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from frame import kernels
from frame.kernels.launch import options, rows_per_program, warps_for


def test_a_thread_has_one_load() -> None:
    assert [warps_for(elements) for elements in (16, 256, 1024, 5120, 1 << 20)] == [1, 1, 4, 16, 16]


@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter takes more rows")
def test_short_rows_share_a_program() -> None:
    assert [rows_per_program(rows, 8) for rows in (1, 3, 100)] == [1, 4, 8]
    assert rows_per_program(100, 0) == 1


def test_a_cpu_launches_without_flags() -> None:
    assert options(torch.device("cpu"), 4) == {"num_warps": 4, "PDL": False}
