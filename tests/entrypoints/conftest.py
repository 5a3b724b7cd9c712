"""One tiny checkpoint and one server each of the real and the fake kind, for all tests of
entrypoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entrypoints.serving import RunningServer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from frame.testing.checkpoints import make_checkpoint

    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a checkpoint, for updates of weights."""
    from frame.testing.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("versions")
    return [make_checkpoint("Qwen3ForCausalLM", folder / f"v{seed}", seed) for seed in range(2)]


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
