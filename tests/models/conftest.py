"""Tiny checkpoints, made once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frame.testing.checkpoints import load_reference, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(architecture, **overrides) -> folder; equal arguments give the same folder."""
    made: dict[str, Path] = {}

    def make(architecture: str, **overrides: Any) -> Path:
        key = f"{architecture} {sorted(overrides.items())!r}"
        if key not in made:
            made[key] = make_checkpoint(architecture, tmp_path_factory.mktemp("checkpoint"), **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Any]:
    """reference(folder) -> the transformers model in float32."""
    return functools.cache(load_reference)
