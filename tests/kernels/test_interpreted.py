"""Runs the kernel tests beside this file under Triton's interpreter; tests/gpu collects the same
files on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreter import needs_triton, run_interpreted

FILES = sorted(file for file in Path(__file__).parent.glob("*.py") if not file.name.startswith(("test_", "_")))
NEED_A_GPU = {"fp8"}  # some of their tests need a GPU


@needs_triton
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_under_the_interpreter(file: Path) -> None:
    assert ("skipped" in run_interpreted(str(file))) == (file.stem in NEED_A_GPU)
