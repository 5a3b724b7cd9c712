"""The copy of an update: a checkpoint, and what is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from frame.core.errors import CheckpointError, ConfigurationError
from frame.loading import update_copy
from frame.loading.update_copy import PREFIX, UNFINISHED, UpdateCopy


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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_full_disk_costs_the_part_alone(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / "copies"
    parent.mkdir()
    copy = UpdateCopy(parent, model)
    copy.add([("a", torch.ones(2))])
    copy.keep()

    def fill(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(update_copy, "save_file", fill)
        with pytest.raises(CheckpointError, match=r"cannot be written to .*No space left.*free space there"):
            copy.add([("b", torch.ones(2))])
    copy.add([("c", torch.ones(2))])
    copy.drop()
    copy.add([("b", torch.ones(2))])
    copy.keep()
    copy.commit()
    assert copy.current is not None and copy.current.name.startswith(PREFIX)
    parts = [load_file(path).keys() for path in sorted(copy.current.glob("*.safetensors"))]
    assert [name for names in parts for name in names] == ["a", "b"]


def test_what_a_killed_engine_was_writing_is_deleted(tmp_path: Path, model: Path) -> None:
    """But not what another engine writes, or has written."""
    parent = tmp_path / "copies"
    parent.mkdir()
    other = UpdateCopy(parent, model)
    other.add([("a", torch.ones(2))])
    stale = parent / f"{UNFINISHED}stale"
    stale.mkdir()
    (stale / "part-00001.safetensors").write_bytes(b"half")
    UpdateCopy(parent, model)
    assert not stale.exists()
    other.commit()
    assert other.current is not None
    UpdateCopy(parent, model)
    assert list(parent.iterdir()) == [other.current]


def test_copies_leave_no_descriptor_open(tmp_path: Path, model: Path) -> None:
    copy = UpdateCopy(tmp_path, model)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for end in (copy.commit, copy.cancel, copy.commit):
        copy.add([("a", torch.ones(2))])
        end()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
