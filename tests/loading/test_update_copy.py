"""The copy of an update: a checkpoint, and what is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from frame.core.errors import ConfigurationError
from frame.loading.update_copy import UpdateCopy


def test_a_copy_replaces_the_one_before(tmp_path: Path) -> None:
    model, parent = tmp_path / "model", tmp_path / "copies"
    model.mkdir()
    parent.mkdir()
    (model / "config.json").write_text("{}")
    copy = UpdateCopy(parent, model)
    copy.add([("a", torch.ones(2))])
    copy.add([("b", torch.ones(3, 2).t())])
    copy.commit()
    first = copy.current
    assert first is not None and {path.name for path in first.iterdir()} == {
        "config.json", "part-00001.safetensors", "part-00002.safetensors",
    }  # fmt: skip
    assert torch.equal(load_file(first / "part-00002.safetensors")["b"], torch.ones(2, 3))
    copy.add([("a", torch.zeros(2))])
    copy.cancel()
    assert list(parent.iterdir()) == [first]
    restarted = UpdateCopy(parent, model, first)
    restarted.add([("a", torch.zeros(2))])
    restarted.commit()
    assert list(parent.iterdir()) == [restarted.current] != [first]


def test_other_folders_are_not_deleted(tmp_path: Path) -> None:
    assert UpdateCopy(tmp_path, tmp_path, tmp_path / "model").current is None
    with pytest.raises(ConfigurationError, match=r"execution.keep_updates is .*nothing, which is no folder"):
        UpdateCopy(tmp_path / "nothing", tmp_path)
