"""Runs jobs of the Batch API: each line of a file is a low-priority request to the own routes.

Used by the routes of batches. Must not depend on the engine: a line takes the path of an HTTP
request, without the connection and the API key.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from frame.config.schema import BatchesSection
from frame.entrypoints.engine_client.quotas import FairSemaphore, QuotaExceededError, QuotaLease, TenantQuotas
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.openai.batch_files import (
    BLOCK_BYTES,
    FileStore,
    FileWriter,
    InvalidInputError,
    LineReader,
    StorageFullError,
    load_all,
)
from frame.entrypoints.http.protocol.bodies import problem_of
from frame.entrypoints.http.protocol.fields import IGNORED, check_spelling, ignored_header
from frame.entrypoints.http.request_context import Receive, Scope, Send
from frame.entrypoints.http.validation_errors import repeated_error, repeated_name, type_name

log = logging.getLogger(__name__)

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations"]
PRIORITY = -1000  # of a line without a priority
COMPLETION_WINDOW = 24 * 3600  # seconds
MAX_BATCHES = 10_000
MAX_LINE_VALUES = 1024 * 1024  # JSON values of a line; the route of its request may accept fewer
FIELDS = ("custom_id", "method", "url", "body")  # of a line
MAX_NAME = 512  # characters of a line's custom_id
MAX_RUNNING = 16  # batches of one key that run at the same time, each with three open files; more wait
ERROR_PAUSE = 0.02  # seconds after a line that failed: such lines end at once, and would take the whole event loop
RETRY_INTERVAL = 0.5  # seconds before a line that got 429 or 503 is sent again
FINAL_STATUSES = frozenset({"completed", "failed", "expired", "cancelled"})


class BatchJob(msgspec.Struct, kw_only=True):
    """OpenAI's batch object and its owner. Times are in seconds since the epoch."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    tenant: str  # owner; not shown to clients
    status: str = "validating"
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0  # lines of the input file
    completed: int = 0  # lines whose response has status 200
    failed: int = 0  # all other lines that were run
    error: str | None = None  # why the whole batch failed

    def to_object(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _HIDDEN}
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        errors = None if self.error is None else {"object": "list", "data": [{"code": "batch_failed", "message": self.error}]}
        return {**fields, "object": "batch", "request_counts": counts, "errors": errors}

    def set_status(self, status: str) -> None:
        """Set the status and the time of the change."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


_HIDDEN = frozenset({"tenant", "total", "completed", "failed", "error"})
_batch_decoder = msgspec.json.Decoder(BatchJob)


class BatchJobRunner:
    """Runs the batches of one server.

    `quotas`: quotas of the API keys, in which lines count like requests over HTTP. `stopping`:
    returns whether the server is shutting down. `route`: the application behind access control; set
    before the first batch.
    """

    def __init__(self, config: BatchesSection, files: FileStore, quotas: TenantQuotas, stopping: Callable[[], bool]) -> None:
        self.files = files
        self.route: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None
        self.max_requests = config.max_requests
        self._stopping = stopping
        self._quotas = quotas
        self._max_batches = config.max_batches_per_key
        self._places = FairSemaphore(config.concurrency)
        self._reading = FairSemaphore(1)  # held while a thread reads a block of a file, or a long line
        # By tenant: bounds its lines in memory, waiting ones included. There are as many entries as
        # keys.
        self._lines: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, config.concurrency))
        self._running: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, MAX_RUNNING))  # likewise
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._batches = self._load()

    def _load(self) -> dict[str, BatchJob]:
        """The batches of earlier runs. Those that had not ended have failed, and get the output
        files that `FileStore` has recovered."""
        batches = load_all(self.files.folder, "batch-*.json", _batch_decoder)
        for batch in batches:
            if batch.status not in FINAL_STATUSES:
                with suppress(OSError):
                    self._recover(batch)
                is_whole = 0 < batch.total == batch.completed + batch.failed  # only its last state was not saved
                batch.error = None if is_whole else f"the server was stopped before the batch finished; {_remedy(batch)}"
                batch.set_status("completed" if is_whole else "failed")
                self._save_end(batch)
        return {batch.id: batch for batch in sorted(batches, key=lambda batch: batch.created_at)}

    def _recover(self, batch: BatchJob) -> None:
        """Set the output files of a batch that an earlier run did not end. Raises OSError."""
        files = {file.filename: file.id for file in self.files.list_files(batch.tenant) if file.purpose == "batch_output"}
        batch.output_file_id, batch.error_file_id = files.get(f"{batch.id}_output.jsonl"), files.get(f"{batch.id}_error.jsonl")
        if batch.output_file_id is not None:
            batch.completed = _count_lines(self.files.path(batch.output_file_id))
        if batch.error_file_id is not None:
            batch.failed = _count_lines(self.files.path(batch.error_file_id))

    def get(self, name: str, tenant: str) -> BatchJob | None:
        """The batch of this tenant; None if there is none."""
        batch = self._batches.get(name)
        return batch if batch is not None and batch.tenant == tenant else None

    def list_batches(self, tenant: str) -> list[BatchJob]:
        """The batches of this tenant, oldest first."""
        return [batch for batch in self._batches.values() if batch.tenant == tenant]

    async def start(self, input_file_id: str, endpoint: str, metadata: dict[str, str] | None, tenant: str) -> BatchJob:
        """Create and start a batch. Raises StorageFullError, OSError."""
        await self._drop_oldest(tenant)
        now = int(time.time())
        batch = BatchJob(
            id=f"batch-{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + COMPLETION_WINDOW,
            tenant=tenant,
            metadata=metadata,
        )
        await self._save(batch)
        self._batches[batch.id] = batch
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))
        return batch

    async def cancel(self, batch: BatchJob) -> None:
        """Cancel a batch. Lines that have finished stay in its output files."""
        task = self._tasks.get(batch.id)
        if task is None or batch.status not in ("validating", "in_progress"):
            return
        batch.set_status("cancelling")
        task.cancel()
        await asyncio.wait({task})
        if batch.status not in FINAL_STATUSES:  # its task had not started
            batch.set_status("cancelled")
            await asyncio.to_thread(self._save_end, batch)

    async def _drop_oldest(self, tenant: str) -> None:
        """Delete the tenant's oldest finished batch at a limit. Raises StorageFullError."""
        batches = self.list_batches(tenant)
        is_full = bool(tenant) and len(batches) >= self._max_batches
        if not is_full and len(self._batches) < MAX_BATCHES:
            return
        oldest = next((batch for batch in batches if batch.status in FINAL_STATUSES), None)
        if oldest is None:
            limit = f"this key has {self._max_batches} batches" if is_full else f"the server has {MAX_BATCHES} batches"
            raise StorageFullError(f"{limit}, the limit, and none of yours has ended; try again later")
        await asyncio.to_thread((self.files.folder / f"{oldest.id}.json").unlink, missing_ok=True)
        self._batches.pop(oldest.id, None)

    async def _save(self, batch: BatchJob) -> None:
        await asyncio.to_thread(self.files.save, batch.id, msgspec.json.encode(batch))

    def _save_end(self, batch: BatchJob) -> None:
        """Save a state that stays as it is where the disk takes no more: the next start finds the
        state from the output files."""
        try:
            self.files.save(batch.id, msgspec.json.encode(batch))
        except OSError as error:
            log.warning("the state of %s was not saved (%s); after a restart its output files tell what finished", batch.id, error.strerror)

    # one batch ------------------------------------------------------------------------------------

    async def _run(self, batch: BatchJob) -> None:
        outputs: list[FileWriter] = []
        try:
            async with self._running[batch.tenant]:
                batch.total = await self._count_requests(batch)
                for kind in ("output", "error"):
                    outputs.append(await self.files.open_writer(f"{batch.id}_{kind}.jsonl", "batch_output", batch.tenant))  # noqa: PERF401
                batch.set_status("in_progress")
                await self._save(batch)
                await self._run_lines(batch, outputs)
            ending = "completed"
        except asyncio.CancelledError:
            if batch.cancelling_at is None:
                raise
            ending = "cancelled"
        except _ExpiredError:
            ending = "expired"
        except OSError as error:
            batch.error, ending = f"the batch folder cannot be used: {error.strerror}", "failed"
        except (StorageFullError, InvalidInputError, _StoppedError) as error:
            batch.error, ending = str(error), "failed"
        except Exception:
            log.exception("batch %s failed", batch.id)
            batch.error, ending = "the server failed on this batch; its log says why", "failed"
        batch.set_status("finalizing")
        await self._finish(batch, outputs)
        if batch.error is not None and batch.in_progress_at is not None:
            batch.error += f"; {_remedy(batch)}"
        batch.set_status(ending)
        await asyncio.to_thread(self._save_end, batch)

    async def _read_block(self, batch: BatchJob, reader: LineReader) -> list[bytes] | None:
        """`LineReader.read_block` in a thread, one block of all batches at a time."""
        async with self._reading.hold_slot(batch.tenant):
            return await asyncio.to_thread(reader.read_block)

    async def _count_requests(self, batch: BatchJob) -> int:
        """The number of lines that are not empty. Raises InvalidInputError, OSError."""
        total = 0
        with LineReader(self.files.path(batch.input_file_id), self.max_requests) as reader:
            while (lines := await self._read_block(batch, reader)) is not None:
                total += len(lines)
        if not total:
            raise InvalidInputError("the file has no requests; send one JSON object per line")
        return total

    async def _run_lines(self, batch: BatchJob, outputs: list[FileWriter]) -> None:
        """Run all lines. Raises the error that ends the batch."""
        errors: list[Exception] = []
        names: set[int] = set()  # hashes of the lines' custom_ids
        permits = self._lines[batch.tenant]
        with LineReader(self.files.path(batch.input_file_id), self.max_requests) as reader:
            async with asyncio.TaskGroup() as group:
                while not errors and (lines := await self._read_block(batch, reader)) is not None:
                    for line in lines:
                        await permits.acquire()
                        task = group.create_task(self._run_line(batch, line, outputs, names, errors))
                        task.add_done_callback(lambda _: permits.release())
        if errors:
            raise errors[0]

    async def _run_line(self, batch: BatchJob, line: bytes, outputs: list[FileWriter], names: set[int], errors: list[Exception]) -> None:
        """Answer a line. An error that ends the batch goes into `errors`; others finish."""
        try:
            if not errors:
                await self._reply_to_line(batch, line, outputs, names)
        except (OSError, StorageFullError, _StoppedError, _ExpiredError) as error:
            errors.append(error)

    async def _reply_to_line(self, batch: BatchJob, line: bytes, outputs: list[FileWriter], names: set[int]) -> None:
        """Send the request of a line and append its record to the output or the error file. Adds
        the hash of its custom_id to `names`."""
        name: str | None = None
        record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}"}
        try:
            name, body, unknown = await self._parse_line(batch, line)
            if hash(name) in names:
                raise _LineError(f"another line has the custom_id {quoted(name)}; give each line its own")
            names.add(hash(name))
            reply = await self._send_until_accepted(batch, body)
            is_fine = reply.status == 200
            response = {"status_code": reply.status, "request_id": record["id"], "body": msgspec.Raw(reply.body)}
            if ignored := ", ".join(each for each in (unknown, reply.ignored) if each):
                response["ignored_fields"] = ignored
            record |= {"custom_id": name, "response": response, "error": None}
        except _LineError as error:
            is_fine = False
            record |= {"custom_id": name or error.name, "response": None, "error": {"code": "invalid_request", "message": str(error)}}
        piece = msgspec.json.encode(record) + b"\n"
        outputs[0 if is_fine else 1].append(piece)
        batch.completed += is_fine
        batch.failed += not is_fine
        if not is_fine:
            await asyncio.sleep(0.0 if self._stopping() else ERROR_PAUSE)

    async def _parse_line(self, batch: BatchJob, line: bytes) -> tuple[str, bytes, str]:
        """`_parse_line` of a line; a long one takes a turn of the thread that reads. Raises
        _LineError."""
        if len(line) <= BLOCK_BYTES:
            return _parse_line(line, batch.endpoint)
        async with self._reading.hold_slot(batch.tenant):
            return await asyncio.to_thread(_parse_line, line, batch.endpoint)

    async def _send_until_accepted(self, batch: BatchJob, body: bytes) -> _Reply:
        """The response of a request, sent again while the status is 429 or 503."""
        while True:
            if time.time() > batch.expires_at:
                raise _ExpiredError
            if self._stopping():
                raise _StoppedError("the server was stopped before the batch finished")
            async with self._places.hold_slot(batch.tenant):
                reply = await self._send_once(batch, body)
            if reply.status not in (429, 503):
                return reply
            await asyncio.sleep(0.0 if self._stopping() else RETRY_INTERVAL)

    async def _send_once(self, batch: BatchJob, body: bytes) -> _Reply:
        """Send a request within its key's quota; status 429 where that is exhausted."""
        try:
            with self._quotas.open_lease(batch.tenant) as lease:
                return await self._call_route(batch, body, lease)
        except QuotaExceededError:
            return _Reply(429, b"")

    async def _call_route(self, batch: BatchJob, body: bytes, lease: QuotaLease) -> _Reply:
        assert self.route is not None
        bodies, pieces, status, ignored = [body], [], 0, ""

        async def receive() -> MutableMapping[str, Any]:
            if not bodies:
                await asyncio.Event().wait()  # a batch has no client that disconnects
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, ignored
            status = message.get("status", status)
            ignored = next((value.decode() for name, value in message.get("headers", ()) if name == IGNORED), ignored)
            pieces.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": batch.endpoint, "root_path": "", "query_string": b""}
        scope |= {"client": None, "headers": headers, "tenant": batch.tenant, "lease": lease, "arrived": time.perf_counter()}
        await self.route(scope, receive, send)
        return _Reply(status, b"".join(pieces), ignored)

    async def _finish(self, batch: BatchJob, outputs: list[FileWriter]) -> None:
        """Publish the output files that are not empty; delete the others."""
        for attribute, output in zip(("output_file_id", "error_file_id"), outputs, strict=False):
            if output.is_empty:
                output.abandon()
            else:
                setattr(batch, attribute, (await output.publish()).id)


class _Reply(NamedTuple):
    """The response of a route to a line. `ignored`: the fields of the body that it ignored."""

    status: int
    body: bytes
    ignored: str = ""


def _remedy(batch: BatchJob) -> str:
    """What the client of a failed batch does."""
    done = batch.completed + batch.failed
    if not done:
        return "no request finished; create it again"
    return f"{done} of {batch.total} requests finished and are in its files; send the others in a new batch"


class _ExpiredError(Exception):
    """The completion window of the batch has passed."""


class _StoppedError(Exception):
    """The server stops before the batch has ended. The message is for the client."""


class _LineError(Exception):
    """A sentence for the client about a line. `name`: its custom_id, if known."""

    def __init__(self, sentence: str, name: str | None = None) -> None:
        super().__init__(sentence)
        self.name = name


def _count_lines(path: Path) -> int:
    """The lines of an output file."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(partial(file.read, 16 * BLOCK_BYTES), b""))


def _parse_line(line: bytes, endpoint: str) -> tuple[str, bytes, str]:
    """(custom_id, body, names of fields beside it that are ignored) of a line. Raises
    _LineError."""
    problem = problem_of(line, MAX_LINE_VALUES)
    if problem is not None:
        raise _LineError(problem)
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _LineError(f"the line is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    if not isinstance(fields, dict):
        raise _LineError(f"the line is {type_name(fields)}; send an object")
    name = fields.get("custom_id")
    if name is None:
        raise _LineError("custom_id is missing; give each line its own")
    if not isinstance(name, str):
        raise _LineError(f"custom_id is {type_name(name)}; send a string")
    if len(name) > MAX_NAME:
        raise _LineError(f"custom_id has {len(name)} characters; it may have {MAX_NAME}")
    url, body = fields.get("url"), fields.get("body")
    if fields.get("method", "POST") != "POST" or url != endpoint:
        raise _LineError(f"method and url must be POST and {endpoint}, the endpoint of the batch", name)
    if not isinstance(body, dict):
        raise _LineError("body: expected an object", name)
    for field in ("stream", "background"):
        if body.get(field):
            raise _LineError(f"{field} is not supported in a batch; leave it out", name)
    if (repeated := repeated_name(line, fields)) is not None:
        raise _LineError(repeated_error(repeated, "the line").message, name)
    try:
        unknown = check_spelling([each for each in fields if each not in FIELDS], FIELDS, owner="a line")
    except ApiError as error:
        raise _LineError(error.message, name) from None
    return name, msgspec.json.encode({"priority": PRIORITY, **body}), ignored_header(unknown)[1].decode()
