"""Runs batches: each line of a file is a request to this server's own routes, a few at a time and behind everybody else's.

Knows no engine: a line goes the way of a request that came by network, but for the network and the key.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from frame.entrypoints.engine_client.quotas import Places, QuotaExceededError, QuotaLease, TenantQuotas
from frame.entrypoints.http.openai.batch_files import FileStore, NoRoomError, Output, read_all
from frame.entrypoints.http.protocol.bodies import problem_of

if TYPE_CHECKING:
    from frame.core.config.schema import BatchesSection
    from frame.entrypoints.http.request_context import Receive, Scope, Send

log = logging.getLogger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations")
PRIORITY = -1000  # of a line that says nothing else
WINDOW = 24 * 3600  # seconds that a batch may take
MOST_BATCHES = 10_000
MOST_BYTES = 32 * 1024 * 1024  # of one line
MOST_VALUES = 1024 * 1024  # of one line's JSON; its request's route may take fewer
RETRY = 0.5  # seconds before a line that found no place tries again
OVER = frozenset({"completed", "failed", "expired", "cancelled"})


class Batch(msgspec.Struct, kw_only=True):
    """As OpenAI's clients know it, and whose it is. Times in seconds since the epoch."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    tenant: str
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
    total: int = 0
    completed: int = 0
    failed: int = 0
    error: str | None = None

    def shown(self) -> dict[str, Any]:
        """As a response has it."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _HIDDEN}
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        errors = None if self.error is None else {"object": "list", "data": [{"code": "batch_failed", "message": self.error}]}
        return {**shown, "object": "batch", "request_counts": counts, "errors": errors}

    def turn(self, status: str) -> None:
        """Enter a status, now."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


_HIDDEN = frozenset({"tenant", "total", "completed", "failed", "error"})
_batch_decoder = msgspec.json.Decoder(Batch)


class BatchRunner:
    """One a server that has a folder for batches. `route` is the application, past its guards; `stopping` tells of the server's end."""

    def __init__(self, config: BatchesSection, files: FileStore, shares: TenantQuotas, stopping: Callable[[], bool]) -> None:
        self.files = files
        self.route: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None
        self.max_requests = config.max_requests
        self._stopping = stopping
        self._shares = shares
        self._max_batches = config.max_batches_per_key
        self._places = Places(config.concurrency)
        # lines of each tenant that are in memory, those that wait for a place too; as many entries as keys
        self._lines: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, config.concurrency))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._batches = self._load()

    def _load(self) -> dict[str, Batch]:
        """The batches of earlier runs; those that were not over have failed."""
        found = read_all(self.files.folder, "batch-*.json", _batch_decoder)
        for batch in found:
            if batch.status not in OVER:
                batch.error = "the server was stopped before the batch was over; create it again"
                batch.turn("failed")
                self.files.save(batch.id, msgspec.json.encode(batch))
        return {batch.id: batch for batch in sorted(found, key=lambda batch: batch.created_at)}

    def get(self, name: str, tenant: str) -> Batch | None:
        """The batch, unless it is another's."""
        batch = self._batches.get(name)
        return batch if batch is not None and batch.tenant == tenant else None

    def owned(self, tenant: str) -> list[Batch]:
        """The newest first."""
        return [batch for batch in reversed(self._batches.values()) if batch.tenant == tenant]

    async def start(self, input_file_id: str, endpoint: str, metadata: dict[str, str] | None, tenant: str) -> Batch:
        """Begin a batch. Raises NoRoomError, OSError."""
        await self._make_room(tenant)
        now = int(time.time())
        batch = Batch(
            id=f"batch-{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW,
            tenant=tenant,
            metadata=metadata,
        )
        await self._save(batch)
        self._batches[batch.id] = batch
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))
        return batch

    async def cancel(self, batch: Batch) -> None:
        """End a batch; what it has done stays."""
        task = self._tasks.get(batch.id)
        if task is None or batch.status not in ("validating", "in_progress"):
            return
        batch.turn("cancelling")
        task.cancel()
        await asyncio.wait({task})
        if batch.status not in OVER:  # it had not even begun
            batch.turn("cancelled")
            await self._save(batch)

    async def _make_room(self, tenant: str) -> None:
        """For one batch more: the tenant's own oldest gives its place, never another's. Raises NoRoomError, OSError."""
        own = self.owned(tenant)
        is_full = bool(tenant) and len(own) >= self._max_batches
        if not is_full and len(self._batches) < MOST_BATCHES:
            return
        oldest = next((batch for batch in reversed(own) if batch.status in OVER), None)
        if oldest is None:
            most = f"{self._max_batches} batches of this key" if is_full else f"{MOST_BATCHES} batches"
            raise NoRoomError(f"{most} are kept, which is all that may be, and none of yours is over; try again later")
        del self._batches[oldest.id]
        await asyncio.to_thread((self.files.folder / f"{oldest.id}.json").unlink, missing_ok=True)

    async def _save(self, batch: Batch) -> None:
        await asyncio.to_thread(self.files.save, batch.id, msgspec.json.encode(batch))

    # one batch -----------------------------------------------------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        outputs: list[Output] = []
        try:
            try:
                batch.total = await asyncio.to_thread(self._count, batch)
                for kind in ("output", "error"):  # the first one is known when there is no room for the second
                    outputs.append(await self.files.begin(f"{batch.id}_{kind}.jsonl", "batch_output", batch.tenant))  # noqa: PERF401
                batch.turn("in_progress")
                await self._save(batch)
                await self._all_lines(batch, outputs)
                ending = "completed"
            except asyncio.CancelledError:
                if batch.cancelling_at is None:
                    raise
                ending = "cancelled"
            except _ExpiredError:
                ending = "expired"
            except (OSError, NoRoomError, _BatchError) as error:
                batch.error = str(error) if not isinstance(error, OSError) else f"the batch folder cannot be used: {error.strerror}"
                ending = "failed"
            batch.turn("finalizing")
            await self._finish(batch, outputs)
            batch.turn(ending)
            await self._save(batch)
        except OSError as error:  # not even the end can be written
            batch.error = f"the batch folder cannot be used: {error.strerror}"
            batch.turn("failed")
        except Exception:
            log.exception("batch %s failed", batch.id)
            batch.error = "the server failed on this batch; its log says why"
            batch.turn("failed")

    def _count(self, batch: Batch) -> int:
        """How many lines there are. Raises _BatchError, OSError."""
        with self.files.path(batch.input_file_id).open("rb") as lines:
            total = 0
            while line := lines.readline(MOST_BYTES + 1):
                if len(line) > MOST_BYTES:
                    raise _BatchError(f"a line is longer than {MOST_BYTES} bytes; send less in one request")
                total += bool(line.strip())
                if total > self.max_requests:
                    raise _BatchError(
                        f"the file has more than {self.max_requests} requests; split it, or serve with more --batch-max-requests"
                    )
        if not total:
            raise _BatchError("the file has no requests; send one JSON object a line")
        return total

    async def _all_lines(self, batch: Batch, outputs: list[Output]) -> None:
        """Raises what ends the batch early: OSError, NoRoomError, _BatchError, _ExpiredError."""
        lines: BinaryIO = await asyncio.to_thread(self.files.path(batch.input_file_id).open, "rb")
        ends: list[Exception] = []
        held = self._lines[batch.tenant]
        try:
            async with asyncio.TaskGroup() as group:
                while not ends:
                    await held.acquire()
                    line = await _next_line(lines, held)
                    if not line:
                        break
                    task = group.create_task(self._line(batch, line, outputs, ends))
                    task.add_done_callback(lambda _: held.release())
        finally:
            lines.close()
        if ends:
            raise ends[0]

    async def _line(self, batch: Batch, line: bytes, outputs: list[Output], ends: list[Exception]) -> None:
        """Answer a line, or put into `ends` why the batch is over: the lines that run meanwhile are still answered."""
        try:
            if not ends:
                await self._answer_line(batch, line, outputs)
        except (OSError, NoRoomError, _BatchError, _ExpiredError) as error:
            ends.append(error)

    async def _answer_line(self, batch: Batch, line: bytes, outputs: list[Output]) -> None:
        name: str | None = None
        record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}"}
        try:
            problem = await asyncio.to_thread(problem_of, line, MOST_VALUES)  # decoding holds the event loop
            if problem is not None:
                raise _LineError(problem)
            name, body = _request(line, batch.endpoint)
            status, answer = await self._answer(batch, body)
            is_fine = status == 200
            record |= {
                "custom_id": name,
                "response": {"status_code": status, "request_id": record["id"], "body": msgspec.Raw(answer)},
                "error": None,
            }
        except _LineError as error:
            is_fine = False
            record |= {"custom_id": name or error.name, "response": None, "error": {"code": "invalid_request", "message": str(error)}}
        piece = msgspec.json.encode(record) + b"\n"
        outputs[0 if is_fine else 1].append(piece)
        batch.completed += is_fine
        batch.failed += not is_fine

    async def _answer(self, batch: Batch, body: bytes) -> tuple[int, bytes]:
        """Ask until there is a place."""
        while True:
            if time.time() > batch.expires_at:
                raise _ExpiredError
            if self._stopping():
                raise _BatchError("the server was stopped before the batch was over; create it again")
            async with self._places.hold(batch.tenant):
                status, answer = await self._ask(batch, body)
            if status not in (429, 503):
                return status, answer
            await asyncio.sleep(0.0 if self._stopping() else RETRY)

    async def _ask(self, batch: Batch, body: bytes) -> tuple[int, bytes]:
        """One request, as if it had come by network; it counts for its key as any other."""
        try:
            with self._shares.open(batch.tenant) as share:
                return await self._route(batch, body, share)
        except QuotaExceededError:
            return 429, b""

    async def _route(self, batch: Batch, body: bytes, share: QuotaLease) -> tuple[int, bytes]:
        assert self.route is not None
        bodies, parts, status = [body], [], 0

        async def receive() -> MutableMapping[str, Any]:
            if not bodies:
                await asyncio.Event().wait()  # this client does not hang up
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": batch.endpoint,
            "root_path": "",
            "query_string": b"",
            "client": None,
        }
        scope |= {"headers": [(b"content-type", b"application/json")], "tenant": batch.tenant, "share": share}
        scope["arrived"] = time.perf_counter()
        await self.route(scope, receive, send)
        return status, b"".join(parts)

    async def _finish(self, batch: Batch, outputs: list[Output]) -> None:
        """Keep what was written. Raises OSError; what cannot be kept is gone then."""
        left = dict(zip(("output_file_id", "error_file_id"), outputs, strict=False))
        try:
            for attribute in list(left):
                if not left[attribute].is_empty:
                    setattr(batch, attribute, (await left[attribute].finish()).id)
                del left[attribute]
        finally:
            for output in left.values():
                output.abandon()


async def _next_line(lines: BinaryIO, held: asyncio.Semaphore) -> bytes:
    """The next line that is not empty, "" at the end. Unless it is one, `held` is released."""
    line = b""
    try:
        while (line := await asyncio.to_thread(lines.readline)) and not line.strip():
            pass
        return line
    finally:
        if not line.strip():
            held.release()


class _BatchError(Exception):
    """The whole batch cannot be; a sentence."""


class _ExpiredError(Exception):
    """The batch's time is over."""


class _LineError(Exception):
    """This line is no request; a sentence. `name`: its custom_id, if that much could be read."""

    def __init__(self, sentence: str, name: str | None = None) -> None:
        super().__init__(sentence)
        self.name = name


def _request(line: bytes, endpoint: str) -> tuple[str, bytes]:
    """-> (custom_id, body). Raises _LineError."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _LineError(f"the line is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    name = found.get("custom_id") if isinstance(found, dict) else None
    if not isinstance(name, str):
        raise _LineError("custom_id is missing; give each line one of its own")
    url, body = found.get("url"), found.get("body")
    if found.get("method", "POST") != "POST" or url != endpoint:
        raise _LineError(f"method and url must be POST and {endpoint}, as the batch says", name)
    if not isinstance(body, dict):
        raise _LineError("body: expected an object", name)
    if body.get("stream"):
        raise _LineError("stream is not possible in a batch; leave it out", name)
    return name, msgspec.json.encode({"priority": PRIORITY, **body})
