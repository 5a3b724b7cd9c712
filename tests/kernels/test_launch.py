"""Launch sizes, `PreparedLaunch`, and launches on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from frame import kernels
from frame.kernels.launch import PreparedLaunch, ceil_div, choose_rows_per_program, choose_warps, launch_options, next_power_of_2

CPU = torch.device("cpu")


def test_sizes() -> None:
    assert [next_power_of_2(number) for number in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [ceil_div(number, 8) for number in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_threads_have_one_load_or_two() -> None:
    assert [choose_warps(elements) for elements in (16, 256, 1024, 5120, 1 << 20)] == [1, 1, 4, 16, 16]
    assert choose_warps(1024, loads=2) == 2


@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter takes more rows")
def test_short_rows_share_a_program() -> None:
    assert [choose_rows_per_program(rows, 8) for rows in (1, 3, 100)] == [1, 4, 8]
    assert choose_rows_per_program(100, 0) == 1


def test_a_cpu_launches_without_flags() -> None:
    assert launch_options(CPU, 4) == {"num_warps": 4, "PDL": False}


class FakeKernel:
    """A kernel (x, y, rows, SIZE, PDL) that records its launches."""

    arg_names = ("x", "y", "rows", "SIZE", "PDL")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def warmup(self, *example: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        self.calls.append(("compiled", example, constants))
        return FakeCode(self)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.calls.append(("looked up", grid, arguments, constants))


class FakeCode(SimpleNamespace):
    def __init__(self, kernel: FakeKernel) -> None:
        super().__init__(kernel=kernel)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.kernel.calls.append(("launched", grid, arguments))


@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter compiles nothing")
def test_the_variant_is_looked_up_once_and_for_unaligned_tensors() -> None:
    kernel: Any = FakeKernel()
    constants = {"num_warps": 1, "PDL": False, "SIZE": 4}
    launch = PreparedLaunch(kernel, (torch.float32, torch.float32, 0), {"SIZE": 4}, CPU, 1)
    assert kernel.calls == [("compiled", (torch.float32, torch.float32, 0), constants)]
    x, y = torch.zeros(64), torch.zeros(64)
    launch((7, 1, 1), (x, y), (64,))
    launch((7, 1, 1), (x, y[1:]), (63,))
    assert kernel.calls[1] == ("launched", (7, 1, 1), (x.data_ptr(), y.data_ptr(), 64, 4, False))
    assert kernel.calls[2][:2] == ("looked up", (7, 1, 1))
    assert kernel.calls[2][2][2:] == (63,)
    assert kernel.calls[2][3] == constants
