"""Where Triton kernels can run."""

from __future__ import annotations

import torch

from frame import kernels


def test_a_cpu_runs_kernels_only_under_the_interpreter() -> None:
    assert kernels.can_use_triton(torch.device("cpu")) == kernels.INTERPRETED


def test_a_cpu_has_no_dependent_launch() -> None:
    assert not kernels.supports_pdl(torch.device("cpu"))
