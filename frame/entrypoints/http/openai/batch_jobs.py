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
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from frame.config.server_sections import BatchesSection
from frame.entrypoints.engine_client.quotas import FairSemaphore, QuotaExceededError, QuotaLease, TenantQuotas
from frame.entrypoints.http.errors import ApiError
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
from frame.entrypoints.logs import PROGRESS
from frame.host.progress import LINE_SECONDS, Count

log = logging.getLogger(__name__)

T = TypeVar("T")

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations"]
PRIORITY = -1000  # of a line without a priority
COMPLETION_WINDOW = 24 * 3600  # seconds
MAX_BATCHES = 10_000
MAX_LINE_VALUES = 1024 * 1024  # JSON values of a line; the route of its request may accept fewer
FIELDS = ("custom_id", "method", "url", "body")  # of a line
MAX_NAME = 512  # characters of a line's custom_id
MAX_FAULTS = 100  # lines that are no requests, after which no more are read
MAX_RUNNING = 16  # batches of one key that run at the same time, each with three open files; more wait
ERROR_PAUSE = 0.02  # seconds after a line that failed: such lines end at once, and would take the whole event loop
RETRY_INTERVAL = 0.5  # seconds before a line that got 429 or 503 is sent again
FINAL_STATUSES = frozenset({"completed", "failed", "expired", "cancelled"})


class LineFault(msgspec.Struct):
    """Why a line of the input file is not a request. `line`: its number from 1, without empty
    ones."""

    line: int
    code: str
    message: str


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
    faults: list[LineFault] = msgspec.field(default_factory=list)  # lines for which it did not begin

    def to_object(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _HIDDEN}
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        entries = [{"code": each.code, "message": each.message, "line": each.line, "param": None} for each in self.faults]
        if self.error is not None:
            entries.append({"code": "batch_failed", "message": self.error, "line": None, "param": None})
        fields["errors"] = {"object": "list", "data": entries} if entries else None
        return {**fields, "object": "batch", "request_counts": counts, **self._measure_progress()}

    def _measure_progress(self) -> dict[str, float | int | None]:
        """The rate and the remaining time of a batch that runs."""
        done, began = self.completed + self.failed, self.in_progress_at
        rate = done / max(1.0, time.time() - began) if self.status == "in_progress" and began is not None and done else None
        left = rate and round((self.total - done) / rate)
        return {"requests_per_second": rate and round(rate, 3), "remaining_seconds": left}

    def set_status(self, status: str) -> None:
        """Set the status and the time of the change."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


_HIDDEN = frozenset({"tenant", "total", "completed", "failed", "error", "faults"})
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
                batch.total = await self._validate(batch)
                for kind in ("output", "error"):
                    outputs.append(await self.files.open_writer(f"{batch.id}_{kind}.jsonl", "batch_output", batch.tenant))  # noqa: PERF401
                batch.set_status("in_progress")
                await self._save(batch)
                reporting = asyncio.create_task(_report_progress(batch))
                try:
                    await self._run_lines(batch, outputs)
                finally:
                    reporting.cancel()
            ending = "completed"
        except asyncio.CancelledError:
            if batch.cancelling_at is None:
                raise
            ending = "cancelled"
        except _ExpiredError:
            ending = "expired"
        except OSError as error:
            batch.error, ending = f"the batch folder cannot be used: {error.strerror}", "failed"
        except _InvalidLinesError as error:
            batch.faults, ending = error.faults, "failed"
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

    async def _read_block(self, batch: BatchJob, read: Callable[[], T]) -> T:
        """`read` in a thread, one block of all batches at a time."""
        async with self._reading.hold_slot(batch.tenant):
            return await asyncio.to_thread(read)

    async def _validate(self, batch: BatchJob) -> int:
        """The number of lines that are not empty. Raises _InvalidLinesError where one is no request
        of this batch, InvalidInputError, OSError."""
        validator = _Validator(batch.endpoint)
        with LineReader(self.files.path(batch.input_file_id), self.max_requests) as reader:
            while await self._read_block(batch, lambda: validator.check_lines(reader.read_block())):
                pass
        if validator.faults:
            raise _InvalidLinesError(validator.faults)
        if not validator.num_lines:
            raise InvalidInputError("the file has no requests; send one JSON object per line")
        return validator.num_lines

    async def _run_lines(self, batch: BatchJob, outputs: list[FileWriter]) -> None:
        """Run all lines. Raises the error that ends the batch."""
        errors: list[Exception] = []
        permits = self._lines[batch.tenant]
        with LineReader(self.files.path(batch.input_file_id), self.max_requests) as reader:
            async with asyncio.TaskGroup() as group:
                while not errors and (lines := await self._read_block(batch, reader.read_block)) is not None:
                    for line in lines:
                        await permits.acquire()
                        task = group.create_task(self._run_line(batch, line, outputs, errors))
                        task.add_done_callback(lambda _: permits.release())
        if errors:
            raise errors[0]

    async def _run_line(self, batch: BatchJob, line: bytes, outputs: list[FileWriter], errors: list[Exception]) -> None:
        """Answer a line. An error that ends the batch goes into `errors`; others finish."""
        try:
            if not errors:
                await self._reply_to_line(batch, line, outputs)
        except (OSError, InvalidInputError, StorageFullError, _StoppedError, _ExpiredError) as error:
            errors.append(error)

    async def _reply_to_line(self, batch: BatchJob, line: bytes, outputs: list[FileWriter]) -> None:
        """Send the request of a line and append its record to the output or the error file."""
        name, body, unknown = await self._parse_line(batch, line)
        reply = await self._send_until_accepted(batch, body)
        is_fine, rid = reply.status == 200, f"batch_req_{uuid.uuid4().hex}"
        response = {"status_code": reply.status, "request_id": rid, "body": msgspec.Raw(reply.body)}
        if ignored := ", ".join(each for each in (unknown, reply.ignored) if each):
            response["ignored_fields"] = ignored
        piece = msgspec.json.encode({"id": rid, "custom_id": name, "response": response, "error": None}) + b"\n"
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


async def _report_progress(batch: BatchJob) -> None:
    """Log a line every ten seconds."""
    count = Count(batch.id, batch.total)
    while True:
        await asyncio.sleep(LINE_SECONDS)
        count.advance(batch.completed + batch.failed - count.done)
        PROGRESS.info("%s", count.describe())


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


class _LineError(InvalidInputError):
    """A sentence for the client about a line."""

    def __init__(self, sentence: str, code: str = "invalid_request") -> None:
        super().__init__(sentence)
        self.code = code


class _InvalidLinesError(Exception):
    """Lines of the file are no requests of the batch."""

    def __init__(self, faults: list[LineFault]) -> None:
        super().__init__()
        self.faults = faults


class _Validator:
    """Checks the lines of a file before the first one runs."""

    def __init__(self, endpoint: str) -> None:
        self.num_lines = 0
        self.faults: list[LineFault] = []
        self._endpoint = endpoint
        self._names: set[int] = set()  # hashes of the lines' custom_ids

    def check_lines(self, lines: list[bytes] | None) -> bool:
        """Check the lines of a block; whether to read on."""
        for line in lines or ():
            self.num_lines += 1
            try:
                name = hash(_parse_line(line, self._endpoint)[0])
                if name in self._names:
                    raise _LineError("another line has this custom_id; give each line its own", "duplicate_custom_id")
                self._names.add(name)
            except _LineError as error:
                self.faults.append(LineFault(self.num_lines, error.code, str(error)))
                if len(self.faults) >= MAX_FAULTS:
                    return False
        return lines is not None


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
        sentence = f"the line is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
        raise _LineError(sentence, "invalid_json_line") from None
    if not isinstance(fields, dict):
        raise _LineError(f"the line is {type_name(fields)}; send an object")
    name = fields.get("custom_id")
    if name is None:
        raise _LineError("custom_id is missing; give each line its own", "missing_custom_id")
    if not isinstance(name, str):
        raise _LineError(f"custom_id is {type_name(name)}; send a string")
    if len(name) > MAX_NAME:
        raise _LineError(f"custom_id has {len(name)} characters; it may have {MAX_NAME}")
    url, body = fields.get("url"), fields.get("body")
    if fields.get("method", "POST") != "POST" or url != endpoint:
        raise _LineError(f"method and url must be POST and {endpoint}, the endpoint of the batch", "mismatched_url")
    if not isinstance(body, dict):
        raise _LineError("body: expected an object")
    for field in ("stream", "background"):
        if body.get(field):
            raise _LineError(f"{field} is not supported in a batch; leave it out")
    if (repeated := repeated_name(line, fields)) is not None:
        raise _LineError(repeated_error(repeated, "the line").message)
    try:
        unknown = check_spelling([each for each in fields if each not in FIELDS], FIELDS, owner="a line")
    except ApiError as error:
        raise _LineError(error.message) from None
    return name, msgspec.json.encode({"priority": PRIORITY, **body}), ignored_header(unknown)[1].decode()
