"""Serves with a plugin of a package that looks installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from frame.entrypoints.offline.engine import Engine
from frame.testing.checkpoints import make_checkpoint


def check_package_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, module: str, default: str) -> None:
    """Two ranks with the plugin yield the tokens of one rank with the `default` of its kind."""
    info = tmp_path / "site" / f"{name}_{kind}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-{kind}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[frame]\n{name} = {module}\n")
    monkeypatch.syspath_prepend(str(info.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(info.parent), os.environ.get("PYTHONPATH", ""))))
    keys: dict[str, Any] = {"model": str(make_checkpoint("LlamaForCausalLM", tmp_path / "model")), "max_total_tokens": 256, "threads": 1}
    outputs = []
    for more in ({}, {"tp": 2, kind: name}):
        with Engine(dtype="float32", device="cpu", **keys, **more) as engine:
            outputs.append(engine.generate([5, 6, 7, 8], {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}).token_ids)
            assert engine.info["plugins"][kind] == [more.get(kind, default)]
    assert outputs[0] == outputs[1]
