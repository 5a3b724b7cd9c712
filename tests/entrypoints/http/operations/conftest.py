"""Fixtures that modules of this folder share: those of the page's tests, and two versions of a
checkpoint for updates of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.http.operations.chromium import browser, page, page_server

__all__ = ["browser", "page", "page_server"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("versions")
    return [make_checkpoint("Qwen3ForCausalLM", folder / f"v{seed}", seed) for seed in range(2)]
