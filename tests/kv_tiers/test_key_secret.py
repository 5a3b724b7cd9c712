"""The secret of keys: written once, with mode 0600, and refused where others can read it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from frame.core.errors import ConfigurationError
from frame.kv_tiers.key_secret import FILE, SECRET_BYTES, make_secret, read_secret


def test_servers_that_start_at_once_have_one_secret(tmp_path):
    folder = tmp_path / "blocks"
    with ThreadPoolExecutor(8) as pool:
        read = set(pool.map(read_secret, [folder] * 32))
    assert [len(secret) for secret in read] == [SECRET_BYTES]
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_secret() != make_secret()


def test_a_secret_that_others_can_read(tmp_path):
    read_secret(tmp_path)
    (tmp_path / FILE).chmod(0o640)
    with pytest.raises(ConfigurationError, match="other users may use it; .* mode 0600"):
        read_secret(tmp_path)


def test_a_secret_that_was_cut_off(tmp_path):
    read_secret(tmp_path)
    (tmp_path / FILE).write_bytes(b"abc")
    with pytest.raises(ConfigurationError, match="holds 3 bytes"):
        read_secret(tmp_path)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="the folder of KV cache blocks .* is a file; name a folder"):
        read_secret(tmp_path / "file")


@pytest.mark.parametrize("form", ["pipe", "link", "folder"])
def test_a_secret_that_is_no_file(tmp_path, form):
    """Another user may have made it where the folder is open to others: nothing waits for it."""
    path = tmp_path / FILE
    if form == "pipe":
        os.mkfifo(path)
    elif form == "link":
        (tmp_path / "other").write_bytes(make_secret())
        path.symlink_to(tmp_path / "other")
    else:
        path.mkdir()
    with pytest.raises(ConfigurationError, match="remove it|cannot be used"):
        read_secret(tmp_path)
