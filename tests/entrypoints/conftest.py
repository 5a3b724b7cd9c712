"""One server each of the real and the fake kind, for all tests of
entrypoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entrypoints.serving import RunningServer


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    """A real model behind the whole stack."""
    parsers = ("--reasoning-parser", "think-tags", "--tool-call-parser", "hermes")
    with RunningServer(checkpoint, "--max-model-len", "512", "--max-total-tokens", "4096", *parsers, fake=False) as running:
        yield running


@pytest.fixture(scope="session")
def fake_server(checkpoint: Path) -> Iterator[RunningServer]:
    """A fake model, 2 ms a step, that checks every page it reads."""
    flags = ("--max-model-len", "512", "--max-total-tokens", "4096", "--max-running-requests", "32")
    with RunningServer(checkpoint, *flags, env={"FRAME_FAKE_STEP": "0.002"}) as running:
        yield running
