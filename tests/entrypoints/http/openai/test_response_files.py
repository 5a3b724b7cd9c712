"""Stored responses in a folder: another server finds them, and nothing else is believed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame.core.errors import ConfigurationError
from frame.entrypoints.http.openai import response_files
from frame.entrypoints.http.openai.response_files import ResponseFiles, make_state_folder
from frame.entrypoints.http.openai.response_store import OVERHEAD, ResponseStore

DONE = b'{"id":"resp_1","status":"completed"}'
RUNNING = b'{"id":"resp_1","status":"in_progress"}'

Open = Callable[..., ResponseStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Stores of several servers over one folder."""
    opened: list[ResponseStore] = []

    def make(entries: int = 10, size: int = 100_000, ttl: float = 60.0, share: float = 1.0) -> ResponseStore:
        opened.append(ResponseStore(entries, size, ttl, share, files=ResponseFiles(tmp_path / "state")))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def wait_until_written(store: ResponseStore) -> None:
    """Wait until everything is written."""
    files = store._files
    assert files is not None
    end = time.monotonic() + 20
    while (files._pending or files._writing) and time.monotonic() < end:
        time.sleep(0.005)
    assert not files._pending


def list_files(folder: Path) -> list[Path]:
    return sorted((folder / "state/responses").iterdir())


async def test_entries_outlive_the_server(open_store: Open, tmp_path: Path) -> None:
    first = open_store()
    assert first.put("resp_1", "tenant", DONE, b'[{"a":1}]', 1)
    assert first.put("conv_1", "", b'{"id":"conv_1"}', b"[]")
    first.close()
    second = open_store()
    stored = await second.find("resp_1", "tenant")
    assert stored is not None
    assert (stored.body, stored.items, stored.num_input, stored.tenant) == (DONE, b'[{"a":1}]', 1, "tenant")
    assert await second.find("resp_1", "") is None
    assert await second.find("conv_1", "") is not None
    assert {path.stat().st_mode & 0o777 for path in list_files(tmp_path)} == {0o600}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert "tenant" not in " ".join(path.name for path in list_files(tmp_path))


async def test_two_servers_see_each_others_changes(open_store: Open) -> None:
    one, two = open_store(), open_store()
    one.put("conv_1", "t", b'{"id":"conv_1"}', b"[]")
    wait_until_written(one)
    assert two.append_items("conv_1", "t", [{"n": 1}])
    wait_until_written(two)
    assert one.append_items("conv_1", "t", [{"n": 2}])
    wait_until_written(one)
    stored = await two.find("conv_1", "t")
    assert stored is not None
    assert stored.decode_items() == [{"n": 1}, {"n": 2}]
    assert one.delete("conv_1", "t")
    wait_until_written(one)
    assert await two.find("conv_1", "t") is None
    assert (len(one), one.num_bytes, len(two), two.num_bytes) == (0, 0, 0, 0)


async def test_a_running_response_is_its_servers_until_that_dies(open_store: Open, tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from frame.entrypoints.http.openai.response_files import ResponseFiles\n"
        "files = ResponseFiles(Path(sys.argv[1]))\n"
        f"files.save('resp_1', 't', {RUNNING!r}, b'[]', 0)\n"
        "while files._pending or files._writing: time.sleep(0.01)\n"
        "print('written', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "state")], stdout=subprocess.PIPE) as server:  # noqa: ASYNC220 - it prints at once
        assert server.stdout is not None
        assert server.stdout.readline() == b"written\n"
        store = open_store()
        assert await store.find("resp_1", "t") is None  # so a router asks the other server
        server.kill()
    stored = await store.find("resp_1", "t")
    assert stored is not None
    body: dict[str, Any] = msgspec.json.decode(stored.body)
    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")
    assert len(list((tmp_path / "state/servers").glob("*.lock"))) == 1  # that of this server


def test_quotas_and_age_hold_for_files(open_store: Open, tmp_path: Path) -> None:
    store = open_store(entries=3)
    for number in range(6):
        store.put(f"resp_{number}", "t", DONE, b"[]")
    wait_until_written(store)
    assert len(list_files(tmp_path)) == 3
    smaller = open_store(entries=10, size=2 * (OVERHEAD + 100), share=1.0)
    wait_until_written(smaller)
    assert (len(smaller), len(list_files(tmp_path))) == (2, 2)
    old = open_store(ttl=1e-6)
    wait_until_written(old)
    assert (len(old), list_files(tmp_path)) == (0, [])


def test_damaged_and_foreign_files_are_left_out(open_store: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store()
    for number in range(7):
        store.put(f"resp_{number}", "t", DONE, b"[]")
    wait_until_written(store)
    cut, newer, older, moved, pipe, link, whole = list_files(tmp_path)
    cut.write_bytes(cut.read_bytes()[:-20])
    for path, version in ((newer, response_files.VERSION + 1), (older, response_files.VERSION - 1)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    moved.rename(moved.with_name("0" * 64 + ".json"))
    pipe.unlink()
    os.mkfifo(pipe)
    link.unlink()
    link.symlink_to(whole)
    (whole.parent / "notes.txt").write_text("mine")
    other = open_store()
    assert len(other) == 2  # the older one, and the whole one
    assert caplog.text.count("is left out") == 5
    assert "its version is 2, and this server reads 1" in caplog.text
    assert (whole.parent / "notes.txt").exists()


@pytest.mark.parametrize("name", ["../../etc/passwd", "resp_\x00", "é" * 500, ""])
async def test_names_of_clients_reach_no_other_file(open_store: Open, tmp_path: Path, name: str) -> None:
    store = open_store()
    assert await store.find(name, "t") is None
    assert store.put(name, "t", DONE, b"[]")
    wait_until_written(store)
    assert [len(path.name) for path in list_files(tmp_path)] == [69]
    assert store.delete(name, "t")


async def test_a_full_disk_loses_files_and_no_request(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ResponseFiles, "_write", fail)
    assert store.put("resp_1", "t", DONE, b"[]")
    wait_until_written(store)
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    assert await store.find("resp_1", "t") is not None


def refuse_to_unlink(path: Path, missing_ok: bool = False) -> None:
    raise OSError(30, "Read-only file system")


async def test_an_entry_that_cannot_be_deleted_is_not_reported_as_deleted(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    store.put("resp_1", "t", DONE, b"[]")
    wait_until_written(store)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse_to_unlink)
        assert not await store.delete_file("resp_1", "t")
    assert await store.find("resp_1", "t") is not None
    assert await store.delete_file("resp_1", "t")
    assert await store.find("resp_1", "t") is None
    assert len(open_store()) == 0


async def test_an_evicted_entry_that_cannot_be_deleted_does_not_come_back(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(entries=1)
    store.put("resp_1", "t", DONE, b"[]")
    wait_until_written(store)
    monkeypatch.setattr(Path, "unlink", refuse_to_unlink)
    store.put("resp_2", "t", DONE, b"[]")
    wait_until_written(store)
    assert await store.find("resp_1", "t") is None
    assert await store.find("resp_2", "t") is not None


def test_failures_are_logged_once_until_a_write_succeeds(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()

    def fail(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    for number in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fail)
            for name in range(3):
                store.put(f"resp_{name}", "t", DONE, b"[]")
                wait_until_written(store)
        assert caplog.text.count("No space left on device") == number + 1
        store.put("resp_3", "t", DONE, b"[]")
        wait_until_written(store)


def test_a_folder_for_all_users_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="open to other users; run chmod 700"):
        make_state_folder(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be made or written"):
        make_state_folder(Path("/proc/none"))


async def test_a_full_disk_does_not_bring_back_an_older_version(open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    store.put("resp_1", "t", RUNNING, b"[]")
    store.put("conv_1", "t", b'{"id":"conv_1"}', b'["old"]')
    wait_until_written(store)

    def fail(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    store.put("resp_1", "t", DONE, b"[]")
    store.put("conv_1", "t", b'{"id":"conv_1"}', b'["new"]')
    wait_until_written(store)
    response, conversation = await store.find("resp_1", "t"), await store.find("conv_1", "t")
    assert response is not None
    assert conversation is not None
    assert (response.body, conversation.items) == (DONE, b'["new"]')


async def test_expiry_and_eviction_spare_what_another_server_has_written_since(open_store: Open) -> None:
    one = open_store()
    one.put("conv_1", "t", b'{"id":"conv_1"}', b"[]")
    wait_until_written(one)
    two = open_store(ttl=0.3)
    small = open_store(entries=1)
    assert one.append_items("conv_1", "t", [{"n": 1}])
    wait_until_written(one)
    await asyncio.sleep(0.3)
    assert await two.find("another", "t") is None
    small.put("resp_1", "t", DONE, b"[]")
    wait_until_written(two)
    wait_until_written(small)
    stored = await one.find("conv_1", "t")
    assert stored is not None
    assert stored.items == b'[{"n":1}]'


async def test_an_entry_of_another_server_expires_in_time(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one = open_store()
    two = open_store()
    one.put("resp_1", "t", DONE, b"[]")
    wait_until_written(one)
    later, monotonic = time.time() + 50, time.monotonic
    monkeypatch.setattr(response_files.time, "time", lambda: later)
    monkeypatch.setattr(response_files.time, "monotonic", lambda: monotonic() + 50)
    two.put("resp_2", "t", DONE, b"[]")
    assert await two.find("resp_1", "t") is not None
    wait_until_written(two)
    monkeypatch.setattr(response_files.time, "monotonic", lambda: monotonic() + 70)
    assert await two.find("resp_1", "t") is None
    assert await two.find("resp_2", "t") is not None


def test_entries_expire_though_their_tenant_does_not_return(open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, monotonic = open_store(), time.monotonic
    store.put("resp_1", "gone", DONE, b"[]")
    wait_until_written(store)
    monkeypatch.setattr(response_files.time, "monotonic", lambda: monotonic() + 70)
    store.put("resp_2", "t", DONE, b"[]")
    monkeypatch.undo()
    wait_until_written(store)
    assert (len(store), len(list_files(tmp_path))) == (1, 1)


@pytest.mark.parametrize("bounds", [{"entries": 0}, {"size": 100}])
async def test_a_store_that_is_off_or_small_deletes_nothing(open_store: Open, tmp_path: Path, bounds: dict[str, int]) -> None:
    store = open_store()
    store.put("resp_1", "t", DONE, b"[]")
    wait_until_written(store)
    off = open_store(**bounds)
    wait_until_written(off)
    assert len(off) == 0
    assert await store.find("resp_1", "t") is not None
    assert len(list_files(tmp_path)) == 1


def test_locks_of_servers_that_were_killed_are_deleted(open_store: Open, tmp_path: Path) -> None:
    open_store()
    (lock,) = servers = [*(tmp_path / "state/servers").iterdir()]
    dead, starting = lock.with_name("0" * 32 + ".lock"), lock.with_name("1" * 32 + ".lock")
    dead.touch()
    starting.touch()
    for path in (lock, dead):
        os.utime(path, (1, 1))
    open_store()
    left = {*(tmp_path / "state/servers").iterdir()}
    assert len(left) == 3
    assert {*servers, starting} < left


async def test_a_name_that_no_text_has_is_not_found(open_store: Open) -> None:
    assert await open_store().find("resp_\ud800", "t") is None


def test_a_change_deletes_no_file_meanwhile(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store, written = open_store(), []
    monkeypatch.setattr(ResponseFiles, "_write", lambda self, path, data: written.append(data))
    for body in (RUNNING, DONE):
        store.put("resp_1", "t", body, b"[]")
        wait_until_written(store)
    assert None not in written
    assert not store.put("resp_1", "t", DONE, b"[" + b"1," * 60_000 + b"1]")
    wait_until_written(store)
    assert written[-1] is None


async def test_files_are_read_beside_the_event_loop(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk delays its own readers alone, all of which find the entry."""
    one, two = open_store(), open_store()
    one.put("resp_1", "t", DONE, b"[]")
    wait_until_written(one)
    check, is_open, reads, seen = ResponseFiles.check, threading.Event(), threading.Event(), set[int]()

    def slow(files: ResponseFiles, name: str, tenant: str) -> Any:
        seen.add(threading.get_ident())
        reads.set()
        assert is_open.wait(20)
        return check(files, name, tenant)

    monkeypatch.setattr(ResponseFiles, "check", slow)
    finds = [asyncio.create_task(two.find("resp_1", "t")) for _ in range(8)]
    await asyncio.to_thread(reads.wait, 20)
    is_open.set()
    found = await asyncio.gather(*finds)
    assert threading.get_ident() not in seen
    assert [each is not None and each.body for each in found] == [DONE] * 8
    assert (len(two), two.num_bytes) == (1, one.num_bytes)


async def test_a_change_here_outlasts_what_a_file_said_meanwhile(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = open_store(), open_store()
    one.put("conv_1", "t", b'{"id":"conv_1"}', b'["theirs"]')
    wait_until_written(one)
    check, is_read, goes_on = ResponseFiles.check, threading.Event(), threading.Event()

    def slow(files: ResponseFiles, name: str, tenant: str) -> Any:
        found = check(files, name, tenant)
        is_read.set()
        assert goes_on.wait(20)
        return found

    monkeypatch.setattr(ResponseFiles, "check", slow)
    find = asyncio.create_task(two.find("conv_1", "t"))
    await asyncio.to_thread(is_read.wait, 20)
    two.put("conv_1", "t", b'{"id":"conv_1"}', b'["mine"]')
    goes_on.set()
    stored = await find
    assert stored is not None
    assert stored.items == b'["mine"]'


async def test_a_deletion_here_outlasts_what_a_file_said_meanwhile(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request has taken the entry over and deleted it, and the file is not deleted yet."""
    one, two = open_store(), open_store()
    one.put("conv_1", "t", b'{"id":"conv_1"}', b"[]")
    wait_until_written(one)
    check, write, is_read, goes_on, deletes = ResponseFiles.check, ResponseFiles._write, *(threading.Event() for _ in range(3))

    def slow(files: ResponseFiles, name: str, tenant: str) -> Any:
        found, is_first = check(files, name, tenant), not is_read.is_set()
        is_read.set()
        assert not is_first or goes_on.wait(20)
        return found

    def slow_write(files: ResponseFiles, path: Path, data: bytes | None) -> None:
        assert deletes.wait(20)
        write(files, path, data)

    monkeypatch.setattr(ResponseFiles, "check", slow)
    monkeypatch.setattr(ResponseFiles, "_write", slow_write)
    find = asyncio.create_task(two.find("conv_1", "t"))
    await asyncio.to_thread(is_read.wait, 20)
    assert await two.find("conv_1", "t") is not None
    assert two.delete("conv_1", "t")
    goes_on.set()
    assert await find is None
    deletes.set()
    wait_until_written(two)
    assert await two.find("conv_1", "t") is None
