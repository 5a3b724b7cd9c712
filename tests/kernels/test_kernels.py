"""Where kernels can be used at all."""

from __future__ import annotations

import torch

from frame import kernels


def test_a_cpu_runs_kernels_only_under_the_interpreter() -> None:
    assert kernels.usable(torch.device("cpu")) == kernels.INTERPRETED


def test_a_cpu_launches_nothing_ahead() -> None:
    assert not kernels.pdl(torch.device("cpu"))
