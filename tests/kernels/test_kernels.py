"""Where kernels can be used at all."""

from __future__ import annotations

import torch

from frame import kernels


def test_a_cpu_runs_kernels_only_under_the_interpreter() -> None:
    assert kernels.can_use_triton(torch.device("cpu")) == kernels.INTERPRETED


def test_a_cpu_launches_nothing_ahead() -> None:
    assert not kernels.supports_pdl(torch.device("cpu"))
