"""Copies of adapters: what is read, and every file and folder that is not."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame.entrypoints.engine_client import adapter_spool
from frame.entrypoints.engine_client.adapter_spool import CONFIG, MAX_CONFIG, MAX_HEADER, MAX_TENSORS, TENSORS, AdapterSpool
from frame.interfaces.adapter import AdapterError
from tests.entrypoints.adapter_engine import CONFIG as PLAIN
from tests.entrypoints.adapter_engine import make_adapter, tensors


@pytest.fixture
def spool() -> Iterator[AdapterSpool]:
    opened = AdapterSpool(None)
    yield opened
    opened.close()


def test_copy_is_private_and_named_by_its_bytes(spool: AdapterSpool, tmp_path: Path) -> None:
    files = spool.copy_folder(str(make_adapter(tmp_path / "a", b"weights")))
    parts = [hashlib.sha256(content).digest() for content in (PLAIN, tensors(b"weights"))]
    assert files.digest == hashlib.sha256(b"".join(parts)).hexdigest() == files.folder.name
    assert {path.name: path.read_bytes() for path in files.folder.iterdir()} == {CONFIG: PLAIN, TENSORS: tensors(b"weights")}
    assert files.folder.stat().st_mode & 0o077 == 0 == files.folder.parent.stat().st_mode & 0o077
    assert spool.copy_folder(str(make_adapter(tmp_path / "b", b"other"))).digest != files.digest


def test_equal_bytes_share_a_copy_until_both_are_given_back(spool: AdapterSpool, tmp_path: Path) -> None:
    first = spool.copy_folder(str(make_adapter(tmp_path / "a")))
    second = spool.copy_folder(str(make_adapter(tmp_path / "b")))
    spool.remove(first)
    assert second.folder.is_dir()
    spool.remove(second)
    assert not second.folder.exists()
    assert not list(second.folder.parent.iterdir())
    spool.close()
    assert not second.folder.parent.exists()


ROOTS_REFUSED = "that this server may read"


@pytest.mark.parametrize(
    "path", ["{root}/../secret", "{root}/in/../../secret", "{secret}", "/proc/self/fd/{fd}", "../secret", "{root}x", "in\0"]
)
def test_folders_outside_are_refused(spool: AdapterSpool, tmp_path: Path, path: str) -> None:
    root, secret = tmp_path / "root", make_adapter(tmp_path / "secret")
    make_adapter(root / "in")
    make_adapter(tmp_path / "rootx")
    descriptor = os.open(secret, os.O_RDONLY)
    try:
        with pytest.raises(AdapterError, match=ROOTS_REFUSED):
            spool.copy_folder(path.format(root=root, secret=secret, fd=descriptor), [str(root)])
    finally:
        os.close(descriptor)
    assert spool.copy_folder(str(root / "in"), [str(tmp_path / "other"), str(root)]).size
    assert spool.copy_folder("in", [str(root)]).size


@pytest.mark.parametrize("kind", ["folder", "parent", CONFIG, TENSORS, "descriptor"])
def test_links_are_not_followed(spool: AdapterSpool, tmp_path: Path, kind: str) -> None:
    root, secret = tmp_path / "root", make_adapter(tmp_path / "outside" / "secret", b"secret")
    path = root / "in"
    root.mkdir()
    if kind == "folder":
        path.symlink_to(secret)
    elif kind == "parent":
        (root / "up").symlink_to(secret.parent)
        path = root / "up" / "secret"
    elif kind == "descriptor":
        (root / "fds").symlink_to("/proc/self/fd")
        path = root / "fds" / "0"
    else:
        make_adapter(path)
        (path / kind).unlink()
        (path / kind).symlink_to(secret / kind)
    with pytest.raises(AdapterError, match=f"{ROOTS_REFUSED}|no link"):
        spool.copy_folder(str(path), [str(root)])
    if kind in (CONFIG, TENSORS, "folder", "parent"):  # the operator's own word is trusted, as hubs' caches are full of links
        assert spool.copy_folder(str(path)).size


def test_only_regular_files_are_read(spool: AdapterSpool, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a")
    (folder / TENSORS).unlink()
    os.mkfifo(folder / TENSORS)
    with pytest.raises(AdapterError, match="no regular file"):
        spool.copy_folder(str(folder))


def test_pickles_and_missing_files_are_refused(spool: AdapterSpool, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a")
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="is a pickle.*safe_serialization=True"):
        spool.copy_folder(str(folder))
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match=f"has no {TENSORS}"):
        spool.copy_folder(str(folder))
    with pytest.raises(AdapterError, match=ROOTS_REFUSED):
        spool.copy_folder(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("config", "message"),
    [(b"[]", "not a JSON object"), (b"{", "not a JSON"), (b"[" * 100_000, "not a JSON"), (b" " * (MAX_CONFIG + 1), "larger than")],
)
def test_wrong_configurations(spool: AdapterSpool, tmp_path: Path, config: bytes, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        spool.copy_folder(str(make_adapter(tmp_path / "a", config=config)))


ENTRY = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off"),
        (b"1234567", "cut off"),
        (struct.pack("<Q", 1 << 62), "cut off"),
        (tensors(b"1", {}), "no tensors"),
        (tensors(b"1", {"__metadata__": {"a": "b"}}), "no tensors"),
        (tensors(b"1", b"{'a': 1}"), "not valid"),
        (tensors(b"1", b"\xff"), "not valid"),
        (tensors(b"1", b'{"a":' * 5000), "not valid"),
        (tensors(b"1", {"a": 1}), "not valid"),
        (tensors(b"1", {"a": {**ENTRY, "data_offsets": [0, 2]}}), "'a' is not inside"),
        (tensors(b"1", {"a": {**ENTRY, "data_offsets": [1, 0]}}), "'a' is not inside"),
        (tensors(b"1", {"a": {**ENTRY, "data_offsets": [-1, 1]}}), "'a' is not inside"),
        (tensors(b"1", {"a": {"dtype": "U8"}}), "'a' is not inside"),
        (tensors(b"1", b" " * (MAX_HEADER + 1)), "it may have"),
        (tensors(b"1", b"{" + b",".join(b'"%d":{"data_offsets":[0,1]}' % i for i in range(MAX_TENSORS + 1)) + b"}"), "more than"),
    ],
)
def test_wrong_tensors(spool: AdapterSpool, tmp_path: Path, content: bytes, message: str) -> None:
    folder = make_adapter(tmp_path / "a")
    (folder / TENSORS).write_bytes(content)
    with pytest.raises(AdapterError, match=message):
        spool.copy_folder(str(folder))
    assert not list(spool._folder().iterdir())


def test_a_file_that_memory_cannot_take_is_not_copied(spool: AdapterSpool, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a")
    os.truncate(folder / "adapter_model.safetensors", 1 << 43)  # of which the disk holds nothing
    with pytest.raises(AdapterError, match="has 8,796,093,022,208 bytes, and .* bytes of host memory are available"):
        spool.copy_folder(str(folder))


def test_the_end_of_the_server_ends_a_copy(spool: AdapterSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_spool, "measure_host_memory", lambda: (1 << 40, 1 << 40))
    folder = make_adapter(tmp_path / "a")
    os.truncate(folder / "adapter_model.safetensors", 6 << 30)
    timer = threading.Timer(0.3, spool.close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(AdapterError, match="the server stops|cannot be copied"):
        spool.copy_folder(str(folder))
    timer.join()
    assert time.monotonic() - began < 3


def test_a_file_that_changes_is_refused(spool: AdapterSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_adapter(tmp_path / "a")
    read = adapter_spool.AdapterUpload.write

    def write(upload: Any, name: str, piece: bytes) -> None:
        read(upload, name, piece)
        if name == TENSORS:
            (folder / name).write_bytes(tensors(b"2"))

    monkeypatch.setattr(adapter_spool.AdapterUpload, "write", write)
    with pytest.raises(AdapterError, match="was written to"):
        spool.copy_folder(str(folder))


def base(folder: Path, **files: Any) -> AdapterSpool:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    return AdapterSpool(str(folder))


TOKENIZER = {"model": {"vocab": {"a": 1}}, "truncation": None, "padding": None}


def test_a_tokenizer_of_its_own_is_refused(tmp_path: Path) -> None:
    spool = base(tmp_path / "base", tokenizer__json=TOKENIZER, tokenizer_config__json={"chat_template": "{{ x }}"})
    folder = make_adapter(tmp_path / "a")
    (folder / "tokenizer.json").write_bytes(
        msgspec.json.format(msgspec.json.encode({**TOKENIZER, "padding": {"pad": 1}}))
    )  # as trainers save it
    (folder / "tokenizer_config.json").write_bytes(b'{"chat_template": "{{ x }}\\n", "pad_token": "p"}')
    (folder / "chat_template.jinja").write_bytes(b"{{ x }}")
    assert spool.copy_folder(str(folder)).size
    (folder / "chat_template.jinja").write_bytes(b"{{ y }}")
    with pytest.raises(AdapterError, match="chat template differs"):
        spool.copy_folder(str(folder))
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_bytes(b'{"chat_template": "{{ y }}"}')
    with pytest.raises(AdapterError, match="chat template differs"):
        spool.copy_folder(str(folder))
    (folder / "tokenizer_config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(AdapterError, match="is not valid"):
        spool.copy_folder(str(folder))
    (folder / "tokenizer_config.json").unlink()
    for content in ({"model": {"vocab": {"a": 2}}}, b"{", b"[" * 100_000):
        (folder / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
        with pytest.raises(AdapterError, match=r"tokenizer.json differs"):
            spool.copy_folder(str(folder))
    spool.close()


def test_stale_spools_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_spool.tempfile, "tempdir", str(tmp_path))
    running, stale = AdapterSpool(None), tmp_path / "frame-adapters-old"
    kept = running._folder()
    stale.mkdir()
    for folder in (kept, stale):
        os.utime(folder, (0, 0))
    fresh = tmp_path / "frame-adapters-new"
    fresh.mkdir()
    AdapterSpool(None)._folder()
    assert kept.exists()
    assert fresh.exists()
    assert not stale.exists()


@pytest.mark.slow
def test_a_large_copy_lets_other_threads_run(spool: AdapterSpool, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", bytes(200 * 1024 * 1024))

    def longest_gap() -> float:
        copying = threading.Thread(target=spool.copy_folder, args=(str(folder),))
        longest, before = 0.0, time.perf_counter()
        copying.start()
        while copying.is_alive():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        return longest

    assert min(longest_gap() for _ in range(3)) < 0.05  # one of three: other processes take the cores too
