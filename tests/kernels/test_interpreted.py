"""Runs the kernel tests beside this file, those of a backend's schedules, of latent layers and of
rows of media under Triton's interpreter; tests/gpu collects the kernel tests on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interpreter import WHOLE, needs_triton, run_interpreted

FILES = sorted(file for file in Path(__file__).parent.glob("*.py") if not file.name.startswith(("test_", "_")))
FILES.append(Path(__file__).parents[1] / "attention_backends" / "test_triton_split_schedule.py")
FILES.append(Path(__file__).parents[1] / "adapters" / "test_latent_layers.py")
OF_OTHERS = [f"{Path(__file__).parents[1] / 'media' / 'test_encoder.py'}::test_a_resident_item_is_read_without_an_order"]
NEED_A_GPU = {"expert_deltas", "fp8"}  # some of their tests need a GPU


@pytest.mark.slow
@needs_triton
def test_under_the_interpreter() -> None:
    """All files in one process, which imports torch once."""
    output = run_interpreted("-rs", *map(str, FILES), *OF_OTHERS)
    assert set(re.findall(r"^SKIPPED .*?(\w+)\.py:", output, re.MULTILINE)) == NEED_A_GPU


@needs_triton
@pytest.mark.soak
def test_every_case_under_the_interpreter() -> None:
    run_interpreted("-m", "not alone", *map(str, FILES), *OF_OTHERS, limit=None, **WHOLE)
