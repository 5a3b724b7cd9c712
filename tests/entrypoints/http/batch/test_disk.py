"""Batches on a disk that is full, limited or read-only: finished lines stay readable, also after a
restart, and the batch says why it ended."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from frame.entrypoints.http.batch import files, jobs
from frame.entrypoints.http.batch.files import FileObject, FileStore, FileWriter, StorageFullError
from frame.entrypoints.http.batch.jobs import BatchJob
from tests.entrypoints.http.batch.test_jobs import CHAT, Server, file_ids, wait_for

PADDING = "x" * 4000  # of each line's body, which the route returns
NUM_LINES = 40


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 320 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_files() -> Iterator[None]:
    """This process writes no more than 100 KB to one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def begin(server: Server, count: int = NUM_LINES, url: str = CHAT) -> BatchJob:
    line = {"custom_id": "", "method": "POST", "url": url, "body": {"padding": PADDING}}
    lines = "".join(json.dumps(line | {"custom_id": str(i)}) + "\n" for i in range(count))
    card = await server.runner.files.create(lines.encode(), "in.jsonl", "batch", "")
    return await server.runner.start(card.id, CHAT, None, "")


def check_kept(server: Server, batch: BatchJob, why: str) -> None:
    """The finished lines of the batch are whole and readable, and counted."""
    assert batch.status == "failed"
    assert 0 < batch.completed < NUM_LINES
    assert [line["response"]["status_code"] for line in server.lines(batch.output_file_id)] == [200] * batch.completed
    card = server.runner.files.get(batch.output_file_id or "", "")
    assert card is not None and card.bytes == server.runner.files.path(card.id).stat().st_size
    sentence = batch.to_object()["errors"]["data"][0]["message"]
    assert why in sentence and f"; {batch.completed} of {NUM_LINES} requests finished" in sentence, sentence
    assert server.runner.files.num_bytes == sum(card.bytes for card in server.runner.files.list_files(""))


def restart(server: Server, folder: Path) -> Server:
    server.die()
    return Server(folder, 10**6)


async def test_a_full_disk_keeps_the_finished_lines(small_disk: Path) -> None:
    server = Server(small_disk, 10**6, concurrency=2)
    batch = await server.over(await begin(server))
    check_kept(server, batch, "No space left")
    with pytest.raises(OSError, match="No space left"):
        await begin(server)
    assert not list(small_disk.glob("*.new"))  # noqa: ASYNC240
    kept = server.lines(batch.output_file_id)
    again = restart(server, small_disk)  # the disk is still full, and the last state may not be on it
    found = again.runner.get(batch.id, "")
    assert found is not None
    async with again.watching():
        await again.over(found)
        assert (found.status, again.lines(found.output_file_id)[: len(kept)]) == ("failed", kept)
        await again.runner.files.delete(again.runner.files.list_files("")[0])
        assert (await again.over(await begin(again, 3))).status == "completed"


async def test_a_limit_of_file_sizes_keeps_the_finished_lines(tmp_path: Path, small_files: None) -> None:
    server = Server(tmp_path, 10**6, concurrency=2)
    batch = await begin(server)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    await server.over(batch)
    check_kept(server, batch, "File too large")


class BrokenDisk:
    """A disk with the error `number` once a kind of its files ("output", "error") has as many bytes
    as `room`; of "metadata", files that are not written anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.number = number
        self.room: dict[str, int] = {}
        self._writer, self._save = files.FileWriter, FileStore.save
        monkeypatch.setattr(files, "FileWriter", self._open)
        monkeypatch.setattr(FileStore, "save", lambda *each: self._save_metadata(*each))  # noqa: PLW0108 - a function becomes a method

    def fail(self) -> None:
        raise OSError(self.number, os.strerror(self.number))

    def _save_metadata(self, store: FileStore, name: str, body: bytes) -> None:
        if "metadata" in self.room:
            self.fail()
        self._save(store, name, body)

    def _open(self, store: FileStore, file: FileObject, handle: FileIO) -> FileWriter:
        kind, disk = "error" if "_error" in file.filename else "output" if "_output" in file.filename else "input", self

        class Handle(FileIO):
            def write(self, piece: Any) -> int:
                room = disk.room.get(kind)
                if room is None:
                    return super().write(piece)
                if not room:
                    disk.fail()
                disk.room[kind] -= (size := super().write(piece[:room]))
                return size

            def truncate(self, size: int | None = None) -> int:
                if kind in disk.room and disk.number == errno.EROFS:
                    disk.fail()
                return super().truncate(size)

        handle.close()
        return self._writer(store, file, Handle(store.path(file.id), "r+"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
async def test_a_disk_that_ends_at_the_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    server, disk = Server(tmp_path, 10**6), BrokenDisk(monkeypatch, number)
    disk.room["output"] = 100
    batch = await server.over(await begin(server))
    assert (batch.status, batch.completed, batch.output_file_id, batch.error_file_id) == ("failed", 0, None, None)
    assert batch.error == f"the batch folder cannot be used: {os.strerror(number)}; no request finished; create it again"
    assert file_ids(tmp_path) == [batch.input_file_id]
    assert server.runner.files.num_bytes == sum(card.bytes for card in server.runner.files.list_files(""))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
async def test_a_disk_that_ends_within_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The metadata of the output and the state of the batch are not saved either."""
    server, disk = Server(tmp_path, 10**6, concurrency=1), BrokenDisk(monkeypatch, number)
    server.gate.clear()
    batch = await begin(server)
    await wait_for(lambda: server.asked)
    disk.room |= {"output": 10_000, "metadata": 0}
    server.gate.set()
    await server.over(batch)
    assert (batch.status, batch.completed) == ("failed", 2)
    card = server.runner.files.get(batch.output_file_id or "", "")
    assert card is not None
    content = server.runner.files.path(card.id).read_bytes()[: card.bytes]
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == ["0", "1"]
    await wait_for(lambda: not server.runner._tasks)  # its last state was not saved
    monkeypatch.undo()
    again = restart(server, tmp_path)
    found = again.runner.get(batch.id, "")
    assert found is not None and found.status == "in_progress"
    async with again.watching():
        await again.over(found)
    assert (found.status, found.completed, found.error, found.output_file_id) == ("completed", NUM_LINES, None, batch.output_file_id)
    assert again.runner.files.path(card.id).read_bytes().startswith(content)
    assert len(again.asked) == NUM_LINES - 2


async def test_a_disk_that_ends_at_the_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, disk = Server(tmp_path, 10**6, concurrency=1), BrokenDisk(monkeypatch, errno.ENOSPC)
    server.statuses = [200, 200, 400, 200]
    disk.room["error"] = 100
    batch = await server.over(await begin(server))
    assert (batch.status, batch.completed, batch.failed, batch.error_file_id) == ("failed", 2, 0, None)
    assert len(server.lines(batch.output_file_id)) == 2


async def test_a_disk_that_ends_at_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, disk = Server(tmp_path, 10**6), BrokenDisk(monkeypatch, errno.ENOSPC)
    server.statuses = [200] * 4 + [400]
    server.gate.clear()
    batch = await begin(server, 5)
    await wait_for(lambda: server.asked)
    disk.room["metadata"] = 0
    server.gate.set()
    await server.over(batch)
    assert (batch.status, batch.completed, batch.failed, batch.error) == ("completed", 4, 1, None)
    assert len(server.lines(batch.output_file_id)) == 4
    await wait_for(lambda: not server.runner._tasks)  # its last state was not saved
    monkeypatch.undo()
    again = restart(server, tmp_path)
    found = again.runner.get(batch.id, "")
    assert found is not None
    async with again.watching():
        await again.over(found)
    assert (found.status, found.completed, found.failed, found.error, again.asked) == ("completed", 4, 1, None, [])
    assert again.lines(found.error_file_id) == server.lines(batch.error_file_id)


async def test_the_next_server_goes_on_with_the_lines_that_are_left(tmp_path: Path) -> None:
    server = Server(tmp_path, 10**6, concurrency=2)
    server.statuses = [200, 400, 200, 200]
    server.gate.clear()
    batch = await begin(server)
    await wait_for(lambda: server.asked)
    server.gate.set()
    await wait_for(lambda: batch.completed + batch.failed >= 4)
    server.gate.clear()
    server.die()
    names = {json.loads(line)["custom_id"] for path in outputs_of(tmp_path) for line in path.read_text().splitlines()}
    for output in outputs_of(tmp_path):
        with output.open("ab") as file:
            file.write(b'{"id":"batch_req_1","custom_id":"39","resp')  # the process ended within a line
    again = Server(tmp_path, 10**6, concurrency=2)
    found = again.runner.get(batch.id, "")
    assert found is not None and found.status == "in_progress"
    async with again.watching():
        await again.over(found)
    assert (found.status, found.total, found.completed, found.failed) == ("completed", NUM_LINES, NUM_LINES - 1, 1)
    results = again.lines(found.output_file_id) + again.lines(found.error_file_id)
    assert sorted(int(line["custom_id"]) for line in results) == list(range(NUM_LINES))
    assert len(again.asked) == NUM_LINES - len(names)  # no line with a result is sent again
    await wait_for(lambda: not again.runner._claims)
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".lock", ".new", ".cancel")]  # noqa: ASYNC240


def outputs_of(folder: Path) -> list[Path]:
    """The data of the files that a batch has begun to write."""
    metadata = [json.loads(path.read_text()) for path in folder.glob("file-*.json")]
    return [folder / f"{each['id']}.jsonl" for each in metadata if each["purpose"] == "batch_output"]


async def test_an_input_that_is_deleted_after_its_check_ends_the_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    validate = server.runner._validate

    async def checked(batch: BatchJob) -> int:
        count = await validate(batch)
        server.runner.files.path(batch.input_file_id).unlink()
        return count

    server.runner._validate = checked  # type: ignore[method-assign]
    batch = await server.over(await server.begin(3))
    assert (batch.status, server.asked, caplog.text) == ("failed", [], "")
    assert batch.error == "its input file has been deleted; upload it again; no request finished; create it again"


async def test_a_folder_that_is_gone_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "SCAN_INTERVAL", 0.001)
    server, looks = Server(tmp_path, 10**6), 0

    async def refresh(name: str | None = None) -> None:
        nonlocal looks
        looks += 1
        if looks % 10:  # readable at each tenth
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(server.runner.files, "refresh", refresh)
    async with server.watching():
        await wait_for(lambda: looks >= 19)
    assert caplog.text.count("the batch folder cannot be read: No such file or directory") == 2


async def test_a_state_that_is_not_saved_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "SCAN_INTERVAL", 0.001)
    server, disk = Server(tmp_path, 10**6), BrokenDisk(monkeypatch, errno.ENOSPC)
    server.gate.clear()
    batch = await begin(server, 2)
    await wait_for(lambda: server.asked)
    disk.room["metadata"] = 0
    server.gate.set()
    await server.over(batch)
    async with server.watching():
        await asyncio.sleep(0.1)
    assert caplog.text.count(f"the state of {batch.id} was not saved") == 1


async def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    server = Server(tmp_path, 10**6)
    line = json.dumps({"custom_id": "a", "url": CHAT, "body": {}}).encode()
    card = await server.runner.files.create(b"\xef\xbb\xbf" + line, "in.jsonl", "batch", "")
    batch = await server.over(await server.runner.start(card.id, CHAT, None, ""))
    assert (batch.status, batch.completed) == ("completed", 1)


async def test_a_refused_file_is_not_among_those_that_fill_the_quota(tmp_path: Path) -> None:
    store = Server(tmp_path, 3000, max_bytes_per_key=2000).runner.files
    for size, sentence in (
        (600, "other files of this key have 0 of 2000 bytes .*, and the first 2400 of this one do not fit; send a smaller file"),
        (300, "other files of this key have 1200 of 2000 bytes .*, and the first 900 of this one do not fit; delete some"),
    ):
        output = await store.open_writer("a", "batch", "key")
        with pytest.raises(StorageFullError, match=sentence):
            for _ in range(4):
                await output.write(b"x" * size)
        output.abandon()
        if not store.list_files("key"):
            await store.create(b"x" * 1200, "a", "batch", "key")
