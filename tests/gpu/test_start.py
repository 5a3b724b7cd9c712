"""What a start and a measurement do on a GPU: weights read ahead arrive whole, and calls are timed
as graphs where they can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from frame.entrypoints.tools.bench.clock import Clock
from frame.loading import weight_stream
from frame.loading.weight_reader import ReadAhead
from frame.plugins.devices import open_platform
from tests.models.harness import weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_weights_read_ahead_are_whole_whatever_reuses_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "PIECE", 1 << 16)
    monkeypatch.setattr(weight_stream, "AHEAD", 1 << 20)
    want = {f"t{number}": torch.randn(300 + number, 512) for number in range(40)}
    save_file(want, tmp_path / "model.safetensors")
    rows = {name: slice(100, 200) if number % 2 else None for number, name in enumerate(want)}
    target = torch.empty(400, 512, device="cuda")
    for name, tensor in weights_of(tmp_path, ahead=ReadAhead(open_platform("cuda:0"), rows)):
        index = (rows[name] or slice(None), slice(None))
        value = tensor[index]
        copied = target[: len(value)].copy_(value)
        assert torch.equal(copied.cpu(), want[name][index])


def test_what_waits_for_the_device_is_timed_by_events() -> None:
    x = torch.randn(1 << 20, device="cuda")
    clock = Clock(x.device, budget=0.02)
    assert clock.time([lambda: x * 2]).how == "graph"
    assert clock.time([lambda: (x * 2).sum().item()]).how == "events"
    assert clock.time([lambda: x * 2]).how == "graph"
