"""Every attention backend that states CUDA passes the conformance suite there, in every dtype that
it states."""

from __future__ import annotations

import pytest
import torch

from frame.testing import conformance
from tests.gpu.conformance_checks import checks_on, ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from tests.kernels.draft_attention import *  # noqa: F403

CHECKS, MISSING = checks_on("cuda", "attention_backend")


@pytest.mark.parametrize(("name", "check"), CHECKS, ids=ids(CHECKS))
def test_attention_on_a_gpu(name: str, check: conformance.Check) -> None:
    if name == "flex_attention":  # PyTorch stops compiling a function after too many shapes: start each check afresh
        torch.compiler.reset()
    check.run()


@pytest.mark.parametrize("name", MISSING)
def test_what_is_not_checked(name: str) -> None:
    pytest.skip(f"{name}: {MISSING[name]}")


def test_some_backend_was_checked() -> None:
    assert {name for name, _ in CHECKS} >= {"torch_native", "triton"}
