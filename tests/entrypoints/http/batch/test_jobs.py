"""Batches with a route of the test: restart, expiry, quotas, full disk, shutdown; and multipart
bodies of uploads.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from frame.config.server_sections import BatchesSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.engine_client.quotas import QuotaExceededError, TenantQuotas
from frame.entrypoints.http.batch import jobs, lines, sending
from frame.entrypoints.http.batch.files import FileStore, StorageFullError
from frame.entrypoints.http.batch.folder import LOCK, Claim, make_folder, private
from frame.entrypoints.http.batch.jobs import FINAL_STATUSES, BatchJob, BatchJobRunner
from frame.entrypoints.http.batch.lines import LineReader
from frame.entrypoints.http.batch.sending import LineSender
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.request_body import FormReader

CHAT = "/v1/chat/completions"


class Server:
    """A runner whose route responds with the body of the request once `gate` is open."""

    def __init__(self, folder: Path, max_bytes: int = 100_000, max_of_key: int | None = None, **config: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self.statuses: list[int] = []  # of the next responses; then 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_stopping = False
        self.max_concurrency = self._at_once = 0
        settings = BatchesSection(folder=str(folder), max_bytes=max_bytes, **config)
        self.quotas = TenantQuotas(max_of_key)
        sender = LineSender(settings.concurrency, self.quotas, lambda: self.is_stopping)
        self.runner = BatchJobRunner(settings, FileStore(folder, settings), sender, lambda: self.is_stopping)
        sender.route = self._route

    async def _route(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body = (await receive())["body"]
        self.asked.append(scope | {"body": json.loads(body)})
        self._at_once += 1
        self.max_concurrency = max(self.max_concurrency, self._at_once)
        try:
            await self.gate.wait()
        finally:
            self._at_once -= 1
        headers = [(b"x-frame-ignored-fields", b"zig")] if b"zig" in body else []
        await send({"type": "http.response.start", "status": self.statuses.pop(0) if self.statuses else 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def begin(self, count: int, tenant: str = "") -> BatchJob:
        lines = "".join(json.dumps({"custom_id": str(i), "method": "POST", "url": CHAT, "body": {"i": i}}) + "\n" for i in range(count))
        card = await self.runner.files.create(lines.encode(), "in.jsonl", "batch", tenant)
        return await self.runner.start(card.id, CHAT, None, tenant)

    async def over(self, batch: BatchJob) -> BatchJob:
        async with asyncio.timeout(30):
            while batch.status not in FINAL_STATUSES:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.001)
        return batch

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """As a server that runs."""
        task = asyncio.create_task(self.runner.watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def end(self) -> None:
        """Drain."""
        self.is_stopping = True
        await self.runner.close()
        self.runner.files.close()

    def die(self) -> None:
        """Unlock all, as at the end of a process that is killed."""
        for claim in self.runner._claims.values():
            claim._handle.close()
        for task in self.runner._tasks.values():
            task.cancel()
        self.runner.files.close()

    def lines(self, name: str | None) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.runner.files.path(name or "").read_text().splitlines()]


async def test_each_line_runs_once_within_the_concurrency(tmp_path: Path) -> None:
    server = Server(tmp_path / "new", concurrency=3)
    server.gate.clear()
    one, two = await server.begin(10, "a"), await server.begin(10, "b")
    async with asyncio.timeout(30):
        while len(server.asked) < 3:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.001)
    server.gate.set()
    await server.over(one)
    await server.over(two)
    assert {line["custom_id"] for line in server.lines(one.output_file_id)} == {str(i) for i in range(10)}
    assert (one.completed, two.completed, one.error_file_id, server.max_concurrency) == (10, 10, None, 3)
    assert {(asked["tenant"], asked["path"], asked["body"]["priority"]) for asked in server.asked} == {
        ("a", CHAT, -1000),
        ("b", CHAT, -1000),
    }
    assert server.runner.get(one.id, "b") is None
    assert [batch.id for batch in server.runner.list_batches("b")] == [two.id]


async def test_lines_are_sent_again_while_the_queue_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "RETRY_INTERVAL", 0.0)
    server = Server(tmp_path)
    server.statuses = [503, 429, 503, 200, 500]
    batch = await server.over(await server.begin(2))
    assert (batch.status, batch.completed, batch.failed, len(server.asked)) == ("completed", 1, 1, 5)
    assert server.lines(batch.error_file_id)[0]["response"]["status_code"] == 500


async def test_final_statuses_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, concurrency=1, max_requests=5)
    assert "more than 5 requests" in ((await server.over(await server.begin(6))).error or "")
    assert "no requests" in ((await server.over(await server.begin(0))).error or "")
    server.gate.clear()
    cancelled = await server.begin(3)
    await asyncio.sleep(0)
    await server.runner.cancel(cancelled)
    assert cancelled.status == "cancelled"
    server.gate.set()
    monkeypatch.setattr(jobs, "COMPLETION_WINDOW", -1)
    assert (await server.over(await server.begin(3))).status == "expired"
    monkeypatch.undo()
    server.gate.clear()
    before, running = len(server.asked), await server.begin(3)
    async with asyncio.timeout(30):
        while len(server.asked) == before:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.001)
    server.is_stopping = True
    server.gate.set()
    await server.end()
    # The line that was running has finished; the others are those of the next start
    assert (running.status, running.completed) == ("in_progress", 1)
    waiting = await server.begin(3)
    assert waiting.status == "validating"
    again = Server(tmp_path)
    found = [again.runner.get(batch.id, "") for batch in (running, waiting)]
    async with again.watching():
        for batch in found:
            assert batch is not None and (await again.over(batch)).status == "completed"
            assert [line["custom_id"] for line in again.lines(batch.output_file_id)] == ["0", "1", "2"]
    assert len(again.asked) == 5


@pytest.mark.parametrize("moment", [0.0, 0.02, 0.1])
async def test_a_batch_is_cancelled_at_once_while_it_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: float) -> None:
    take = Claim.take

    def take_late(path: Path) -> Claim | None:
        claim = take(path)
        time.sleep(0.05)
        return claim

    monkeypatch.setattr(Claim, "take", take_late)
    server = Server(tmp_path, concurrency=1)
    server.gate.clear()
    batch = await server.begin(3)
    await asyncio.sleep(moment)
    await server.runner.cancel(batch)
    assert batch.status == "cancelled"
    assert not server.runner._claims


async def test_byte_limit_of_all_files(tmp_path: Path) -> None:
    server = Server(tmp_path, max_bytes=2000)
    batch = await server.over(await server.begin(20))  # its output does not fit
    assert (batch.status, "delete some" in (batch.error or "")) == ("failed", True)
    with pytest.raises(StorageFullError, match="delete some"):
        await server.begin(20)
    for card in server.runner.files.list_files(""):
        await server.runner.files.delete(card)
    assert server.runner.files.num_bytes == 0
    assert (await server.over(await server.begin(2))).status == "completed"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="the batch folder"):
        FileStore(tmp_path / "file" / "below", BatchesSection())


def file_ids(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("file-*.jsonl")]


async def test_empty_lines_are_bounded_and_cost_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ERROR_PAUSE", 0.0)
    server, read = Server(tmp_path, 10**8), list[int]()

    def read_block(reader: LineReader) -> list[bytes] | None:
        read.append(1)
        return read_some(reader)

    read_some = LineReader.read_block
    monkeypatch.setattr(LineReader, "read_block", read_block)
    for content in (b"\n" * 10_000_000, b" \r\n" * 300_000, b"\n" * 100_001 + b"{}\n"):
        card = await server.runner.files.create(content, "in.jsonl", "batch", "")
        batch = await server.over(await server.runner.start(card.id, CHAT, None, ""))
        assert "more than 50000 requests and as many empty lines" in (batch.error or "")
    assert len(read) < 20
    read.clear()
    card = await server.runner.files.create(b"\n \n{}\n" * 30_000 + b" " * 70_000 + b"\n[]", "in.jsonl", "batch", "")
    batch = await server.over(await server.runner.start(card.id, CHAT, None, ""))
    assert (batch.status, len(batch.faults)) == ("failed", lines.MAX_FAULTS)
    assert len(read) < 20


async def test_lines_make_no_thread_hops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work waits for the threads of a server, such as that of uploads."""
    monkeypatch.setattr(jobs, "ERROR_PAUSE", 0.0)
    server, hops = Server(tmp_path, 10**7), list[Any]()
    lines = [json.dumps({"custom_id": str(i), "url": CHAT, "body": {}}) for i in range(3000)]
    server.statuses = [400] * 3000
    card = await server.runner.files.create("\n".join(lines).encode(), "in.jsonl", "batch", "")

    async def to_thread(work: Callable[..., Any], *arguments: Any) -> Any:
        hops.append(work)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    batch = await server.over(await server.runner.start(card.id, CHAT, None, ""))
    assert (batch.failed, len(hops) < 30) == (3000, True), len(hops)


async def test_few_batches_of_a_key_run_at_once(tmp_path: Path) -> None:
    server = Server(tmp_path, 10**6)
    server.gate.clear()
    many = [await server.begin(1, "a") for _ in range(jobs.MAX_RUNNING + 3)]
    other = await server.begin(1, "b")
    async with asyncio.timeout(30):
        while other.status != "in_progress":  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.001)
    assert sum(batch.status == "in_progress" for batch in many) <= jobs.MAX_RUNNING
    await server.runner.cancel(many[-1])
    assert many[-1].status == "cancelled"
    server.gate.set()
    assert {(await server.over(batch)).status for batch in (*many[:-1], other)} == {"completed"}


@pytest.mark.slow
async def test_restart_loads_files_and_batches(tmp_path: Path) -> None:
    first = Server(tmp_path)
    done = await first.over(await first.begin(2))
    first.gate.clear()
    waiting = await first.begin(2)
    await wait_for(lambda: len(first.asked) == 4)
    await first.end()
    (tmp_path / f"batch-{'0' * 32}.json").write_text("{half a file")
    second = Server(tmp_path)
    found = {batch.id: batch for batch in second.runner.list_batches("")}
    assert {name: batch.status for name, batch in found.items()} == {done.id: "completed", waiting.id: "in_progress"}
    assert second.lines(done.output_file_id)
    async with second.watching():
        assert (await second.over(found[waiting.id])).completed == 2
    # The unfinished output is deleted
    assert set(file_ids(tmp_path)) == {card.id for card in second.runner.files.list_files("")}
    assert second.runner.files.num_bytes == sum(card.bytes for card in second.runner.files.list_files(""))


async def test_only_files_of_the_store_are_deleted(tmp_path: Path) -> None:
    server = Server(tmp_path)
    done = await server.over(await server.begin(1))
    half = await server.runner.files.open_writer("half.jsonl", "batch_output", "")
    half.append(b"half")
    half._handle.close()
    server.runner.files.close()
    foreign = {
        tmp_path / f"file-{'0' * 32}.jsonl": "not of this server",
        tmp_path / f"file-{'1' * 32}.json": json.dumps({"id": "../outside", "filename": "", "purpose": "", "bytes": 0, "created_at": 0,
                                                        "tenant": "", "is_complete": False}),
        tmp_path / "file-notes.jsonl": "notes",
        tmp_path / "file-notes.json": "{}",
        tmp_path.parent / "outside.jsonl": "outside",
    }  # fmt: skip
    for path, text in foreign.items():
        path.write_text(text)
    again = Server(tmp_path)
    assert {path: path.read_text() for path in foreign} == foreign
    assert {card.id for card in again.runner.files.list_files("")} == {done.input_file_id, done.output_file_id}
    assert half._file.id not in file_ids(tmp_path)
    (tmp_path.parent / "outside.jsonl").unlink()


async def test_a_server_that_locks_the_folder_is_not_joined(tmp_path: Path) -> None:
    """Versions before shared folders lock it for themselves."""
    first, second = Server(tmp_path), Server(tmp_path)
    for server in (first, second):
        server.runner.files.close()
    with open(tmp_path / LOCK, "ab", opener=private) as lock:  # noqa: ASYNC230 - as the server does
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match=r"the batch folder .* is in use by a server of an older version; choose another"):
            make_folder(tmp_path)
    make_folder(tmp_path)


async def test_a_key_has_its_share_of_the_room(tmp_path: Path) -> None:
    server = Server(tmp_path, max_bytes=10_000, max_bytes_per_key=2000, max_files_per_key=4)
    files = server.runner.files
    with pytest.raises(StorageFullError, match="max_bytes_per_key"):
        await files.create(b"x" * 2001, "a", "batch", "greedy")
    assert (files.num_bytes, file_ids(tmp_path)) == (0, [])
    # Files that are being written count too
    open_files = [await files.open_writer("a", "batch", "greedy") for _ in range(4)]
    with pytest.raises(StorageFullError, match="max_files_per_key"):
        await files.open_writer("a", "batch", "greedy")
    await files.create(b"x" * 2000, "b", "batch", "modest")
    for output in open_files:
        output.abandon()
    for _ in range(4):
        await files.create(b"x" * 500, "a", "batch", "greedy")
    with pytest.raises(StorageFullError, match="max_files_per_key"):
        await files.create(b"", "a", "batch", "greedy")
    files.close()
    again = Server(tmp_path, max_bytes=10_000, max_bytes_per_key=2000, max_files_per_key=4).runner.files
    with pytest.raises(StorageFullError, match="max_files_per_key"):
        await again.create(b"", "a", "batch", "greedy")
    await again.delete(again.list_files("greedy")[0])
    await again.create(b"x" * 500, "a", "batch", "greedy")


def batch_ids(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("batch-*.json"))


async def test_a_key_has_its_share_of_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, max_batches_per_key=3)
    other = await server.over(await server.begin(1, "modest"))
    greedy = [await server.over(await server.begin(1, "greedy")) for _ in range(5)]
    assert [batch.id for batch in server.runner.list_batches("greedy")] == [batch.id for batch in greedy[2:]]
    assert batch_ids(tmp_path) == sorted(batch.id for batch in (other, *greedy[2:]))
    monkeypatch.setattr(jobs, "MAX_BATCHES", 4)  # of all keys together
    await server.over(await server.begin(1, "greedy"))
    assert server.runner.list_batches("modest") == [other]
    with pytest.raises(StorageFullError, match="none of yours has ended"):
        await server.begin(1, "third")
    server.gate.clear()
    for _ in range(3):
        await server.begin(1, "greedy")
    with pytest.raises(StorageFullError, match="this key has 3 batches"):
        await server.begin(1, "greedy")
    server.gate.set()
    for batch in server.runner.list_batches("greedy"):
        await server.over(batch)


async def test_lines_count_in_the_quota_of_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "RETRY_INTERVAL", 0.0)
    server = Server(tmp_path, concurrency=8, max_of_key=3)
    with server.quotas.open_lease("a"):  # a request of the same key over HTTP
        server.gate.clear()
        batch = await server.begin(10, "a")
        async with asyncio.timeout(30):
            while len(server.asked) < 2:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(server.asked) == 2
        assert server.asked[0]["lease"] is not None
        with pytest.raises(QuotaExceededError):
            server.quotas.open_lease("a")
        other = await server.begin(3, "b")  # does not wait for lines that wait for another key
        async with asyncio.timeout(30):
            while len(server.asked) < 5:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.001)
        server.gate.set()
        assert (await server.over(other)).completed == 3
    assert (await server.over(batch)).completed == 10
    assert server.max_concurrency == 5


def parse_form(body: bytes, size: int) -> dict[str, tuple[str | None, bytes]]:
    """The parts of a body that arrives in pieces of `size` bytes."""
    reader, parts = FormReader("multipart/form-data; boundary=xyz"), {}
    for start in range(0, max(1, len(body)), size):
        for part, content in reader.feed(body[start : start + size]):
            parts[part.name] = (part.filename, parts.get(part.name, (None, b""))[1] + content)
    reader.close()
    return parts


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_multipart_bodies(size: int) -> None:
    content = b'{"a": "\r\n--not the boundary"}\r\n\r\n--xy\x00\xff\r\n'
    body = (
        b'preamble\r\n--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--xyz\r\ncontent-disposition: form-data; name="empty"\r\n\r\n\r\n'
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: x/y\r\n\r\n'
        + content
        + b"\r\n--xyz--\r\nepilogue"
    )
    assert parse_form(body, size) == {"purpose": (None, b"batch"), "empty": (None, b""), "file": ("a.jsonl", content)}
    bads = (b"", body[:-16], body.replace(b"--xyz", b"--abc"), b"\r\n--xyz" * 1000, b"--xyz\r\n" + b"a" * 20_000,
            b"--xyz\r\n\r\n\r\n" * 17 + b"--xyz--")  # fmt: skip
    for bad in bads:
        with pytest.raises(ApiError):
            parse_form(bad, size)
    assert parse_form(b"--xyz\r\n\r\n\r\n--xyz--", size) == {"": (None, b"")}


def test_form_of_many_parts_is_refused_early() -> None:
    reader = FormReader("multipart/form-data; boundary=x")
    with pytest.raises(ApiError, match="more than 16 parts"):
        for _ in reader.feed(b"\r\n--x\r\n\r\n" * 1000):
            pass


async def test_line_of_many_values_is_refused_undecoded(tmp_path: Path) -> None:
    server = Server(tmp_path, max_bytes=10_000_000)
    rich = b'{"custom_id": "a", "body": [' + b"[]," * 100_000 + b"1]}\n"
    lines = rich + b'{"custom_id": "b", "url": "' + CHAT.encode() + b'", "body": {}}\n'
    card = await server.runner.files.create(lines, "in.jsonl", "batch", "")
    batch = await server.over(await server.runner.start(card.id, CHAT, None, ""))
    assert (batch.status, batch.completed, batch.failed, [each.line for each in batch.faults]) == ("failed", 0, 0, [1])
    assert "lists, objects and keys" in batch.faults[0].message


async def test_names_of_lines_are_checked(tmp_path: Path) -> None:
    """As at OpenAI, before the first line runs."""
    server = Server(tmp_path)
    names = ["a", "a", 5, "x" * 600, "b"]
    lines = [json.dumps({"custom_id": name, "url": CHAT, "body": {}}) for name in names]
    card = await server.runner.files.create("\n".join([*lines, "[1]", "{}"]).encode(), "in.jsonl", "batch", "")
    batch = await server.over(await server.runner.start(card.id, CHAT, None, ""))
    assert (batch.status, batch.output_file_id, batch.error_file_id, server.asked) == ("failed", None, None, [])
    errors = batch.to_object()["errors"]["data"]
    assert [(each["line"], each["code"], each["message"]) for each in errors] == [
        (2, "duplicate_custom_id", "another line has this custom_id; give each line its own"),
        (3, "invalid_request", "custom_id is a whole number; send a string"),
        (4, "invalid_request", "custom_id has 600 characters; it may have 512"),
        (6, "invalid_request", "the line is a list; send an object"),
        (7, "missing_custom_id", "custom_id is missing; give each line its own"),
    ]


async def test_fields_of_lines_are_known_or_reported(tmp_path: Path) -> None:
    server = Server(tmp_path, concurrency=1)
    line: dict[str, Any] = {"url": CHAT, "body": {}}
    lines = [{"frob": 1, **line, "body": {"zig": 1}}, {"headers": {}, **line}, line]
    texts = [json.dumps({"custom_id": str(place), **each}) for place, each in enumerate(lines)]
    card = await server.runner.files.create("\n".join(texts).encode(), "in.jsonl", "batch", "")
    batch = await server.over(await server.runner.start(card.id, CHAT, None, ""))
    found = [each["response"].get("ignored_fields") for each in server.lines(batch.output_file_id)]
    assert found == ["frob, zig", "headers", None]
    texts.append(json.dumps({"custom_id": "3", "metod": "POST", **line}))
    texts.append(json.dumps({"custom_id": "4", **line}).replace("{}", '{"seed": 1, "seed": 2}'))
    card = await server.runner.files.create("\n".join(texts).encode(), "in.jsonl", "batch", "")
    batch = await server.over(await server.runner.start(card.id, CHAT, None, ""))
    assert [each.message for each in batch.faults] == [
        "metod is no field of a line; did you mean method?", "the line has seed twice in one object; send it once",
    ]  # fmt: skip


async def test_progress_of_a_batch_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(jobs, "LINE_SECONDS", 0.01)
    caplog.set_level("INFO", "frame.progress")
    server = Server(tmp_path, concurrency=1)
    permits = asyncio.Semaphore(0)
    monkeypatch.setattr(server.gate, "wait", permits.acquire)
    batch = await server.begin(4)
    await wait_for(lambda: len(server.asked) == 1)
    found = batch.to_object()
    assert found["request_counts"] == {"total": 4, "completed": 0, "failed": 0}
    assert (found["requests_per_second"], found["remaining_seconds"]) == (None, None)
    permits.release()
    await wait_for(lambda: len(server.asked) == 2)
    found = batch.to_object()
    assert found["request_counts"]["completed"] == 1
    assert found["requests_per_second"] > 0
    assert found["remaining_seconds"] >= 0
    await wait_for(lambda: f"{batch.id}: 1 of 4 (25 %), " in caplog.text)
    for _ in range(3):
        permits.release()
    await server.over(batch)
    assert batch.to_object()["remaining_seconds"] is None
    assert not [task for task in asyncio.all_tasks() if "_report_progress" in str(task)]


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.001)
