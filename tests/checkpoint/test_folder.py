"""The folder of a checkpoint: links and sizes; tests/fuzz/test_checkpoints.py has devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from frame.checkpoint.folder import MAX_TEXT, MAX_TOKENIZER, check_folder, is_within
from frame.core.errors import CheckpointError


def test_links_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "a", tmp_path / "blobs"
    for each in (folder, blobs):
        each.mkdir(parents=True)
    (blobs / "b").write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/b")
    (folder / "nowhere").symlink_to("missing")  # nothing that is read
    check_folder(folder)
    (folder / "model.safetensors").symlink_to("../../blobs/missing")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read \(No such file"):
        check_folder(folder)


@pytest.mark.parametrize(("name", "limit"), [("config.json", MAX_TEXT), ("tokenizer.json", MAX_TOKENIZER), ("model.safetensors", 0)])
def test_texts_have_a_size(name: str, limit: int, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, limit or 1 << 36)
    check_folder(tmp_path)
    if limit:
        os.truncate(tmp_path / name, limit + 1)
        with pytest.raises(CheckpointError, match=rf"{name} is larger than {limit >> 20} MiB"):
            check_folder(tmp_path)


def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "any")
    with pytest.raises(CheckpointError, match="any is no regular file"):
        check_folder(tmp_path)


def test_paths_stay_in_their_folder(tmp_path: Path) -> None:
    assert is_within(tmp_path / "1_Pooling" / "config.json", tmp_path)
    assert not is_within(tmp_path / ".." / "config.json", tmp_path)
    assert not is_within(tmp_path / "/etc" / "config.json", tmp_path)
