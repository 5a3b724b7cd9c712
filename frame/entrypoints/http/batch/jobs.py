"""Runs jobs of the Batch API: each line of a file is a low-priority request to the own routes.

Servers that share the folder share the batches: each takes those that no live server has, and goes
on with the lines that have no result yet. Used by the routes of batches. Must not depend on the
engine: a line takes the path of an HTTP request, without the connection and the API key.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from frame.config.server_sections import BatchesSection
from frame.entrypoints.engine_client.quotas import FairSemaphore
from frame.entrypoints.http.batch.files import OUTPUT, FileStore, FileWriter, StorageFullError
from frame.entrypoints.http.batch.folder import Claim, FailureLog, FolderReader
from frame.entrypoints.http.batch.lines import (
    BLOCK_BYTES,
    Endpoint,
    InvalidInputError,
    InvalidLinesError,
    LineFault,
    LineReader,
    Validator,
    parse_line,
    read_results,
)
from frame.entrypoints.http.batch.sending import ExpiredError, LineSender, StoppedError
from frame.entrypoints.logs import PROGRESS
from frame.host.progress import LINE_SECONDS, Count

log = logging.getLogger(__name__)

T = TypeVar("T")

COMPLETION_WINDOW = 24 * 3600  # seconds
MAX_BATCHES = 10_000
MAX_RUNNING = 16  # batches of one key that run at the same time, each with four open files; more wait
ERROR_PAUSE = 0.02  # seconds after a line that failed: such lines end at once, and would take the whole event loop
SCAN_INTERVAL = 1.0  # seconds between two looks at the folder
RELEASE_TIME = 5.0  # seconds in which the batches of a server that ends save their state
FINAL_STATUSES = frozenset({"completed", "failed", "expired", "cancelled"})
Status = Literal["validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"]
Kind = Literal["output", "error"]
Outputs = dict[Kind, FileWriter]  # of a batch
KINDS: tuple[Kind, ...] = ("output", "error")


class BatchJob(msgspec.Struct, kw_only=True):
    """OpenAI's batch object and its owner. Times are in seconds since the epoch."""

    id: str
    endpoint: Endpoint
    input_file_id: str
    created_at: int
    expires_at: int
    tenant: str  # owner; not shown to clients
    status: Status = "validating"
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

    def update(self, other: BatchJob) -> None:
        """Become what another server has saved."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(other, name))

    def set_status(self, status: Status) -> None:
        """Set the status and the time of the change."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


_HIDDEN = frozenset({"tenant", "total", "completed", "failed", "error", "faults"})
_batch_decoder = msgspec.json.Decoder(BatchJob)


class BatchJobRunner:
    """Runs the batches of one server. `stopping`: returns whether the server is shutting down."""

    def __init__(self, config: BatchesSection, files: FileStore, sender: LineSender, stopping: Callable[[], bool]) -> None:
        self.files = files
        self.sender = sender
        self._config = config
        self._stopping = stopping
        self._reading = FairSemaphore(1)  # held while a thread reads a block of a file, or a long line
        # By tenant, as many entries as keys: bounds its lines in memory, waiting ones included.
        self._lines: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, config.concurrency))
        self._running: defaultdict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, MAX_RUNNING))  # likewise
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._claims: dict[str, Claim] = {}  # of the batches that this server runs
        self._reader = FolderReader(files.folder, "batch", _batch_decoder)
        self._refreshing = asyncio.Lock()
        self._failures = FailureLog(log)
        self._batches: dict[str, BatchJob] = {}
        self._apply(self._reader.read_changes(), set())
        files.recover([batch.id for batch in self._list_running()])

    # the folder -----------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Take the batches that no live server has, until the server stops; save the state of those
        that run here, and cancel those that another server was asked to cancel."""
        while not self._stopping():
            try:
                await self.files.refresh()
                await self.refresh()
                self._failures.clear("")
                for batch in sorted(self._list_running(), key=lambda batch: batch.created_at):
                    if batch.id not in self._tasks and batch.id not in self._claims:
                        self._begin(batch)
                for name in list(self._claims):
                    await self._save_running(self._batches[name])
            except OSError as error:
                self._failures.warn("", "the batch folder cannot be read: %s", error.strerror)
            await asyncio.sleep(SCAN_INTERVAL)

    async def _save_running(self, batch: BatchJob) -> None:
        """Save the state of a batch that runs, or has ended when the disk took no more."""
        if batch.status in FINAL_STATUSES:
            await asyncio.to_thread(self._save_end, batch)
        elif batch.status == "in_progress":
            with suppress(OSError):
                await self._save(batch)
            if await asyncio.to_thread(self._cancel_path(batch.id).exists):
                await self.cancel(batch)

    async def refresh(self, name: str | None = None) -> None:
        """Read what other servers have changed, of one batch or of all. Raises OSError."""
        async with self._refreshing:
            self._apply(*await asyncio.to_thread(self._read, name))

    def _read(self, name: str | None) -> tuple[dict[str, BatchJob | None], set[str]]:
        """The changes, and those of the batches that run which are to be cancelled."""
        # First: a batch is saved as cancelled before the request to cancel it is removed.
        cancelled = {each.id for each in self._list_running() if name in (None, each.id) and self._cancel_path(each.id).exists()}
        return self._reader.read_changes() if name is None else self._reader.read_change(name), cancelled

    def _list_running(self) -> list[BatchJob]:
        """Of all servers."""
        return [batch for batch in list(self._batches.values()) if batch.status not in FINAL_STATUSES]

    def _apply(self, changes: dict[str, BatchJob | None], cancelled: set[str]) -> None:
        for name, batch in changes.items():
            if name in self._claims:
                continue  # this server knows more
            if batch is None:
                self._batches.pop(name, None)
            elif name in self._batches:
                self._batches[name].update(batch)
            else:
                self._batches[name] = batch
        for name in cancelled - self._claims.keys():
            if (known := self._batches.get(name)) is not None and known.status in ("validating", "in_progress"):
                known.set_status("cancelling")

    def _cancel_path(self, name: str) -> Path:
        """The file whose existence asks the server of a batch to cancel it."""
        return self.files.path(name).with_suffix(".cancel")

    def get(self, name: str, tenant: str) -> BatchJob | None:
        """The batch of this tenant; None if there is none."""
        batch = self._batches.get(name)
        return batch if batch is not None and batch.tenant == tenant else None

    def list_batches(self, tenant: str) -> list[BatchJob]:
        """The batches of this tenant, oldest first."""
        return sorted((batch for batch in self._batches.values() if batch.tenant == tenant), key=lambda batch: batch.created_at)

    async def start(self, input_file_id: str, endpoint: Endpoint, metadata: dict[str, str] | None, tenant: str) -> BatchJob:
        """Create and start a batch. Raises StorageFullError, OSError."""
        await self.refresh()
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
        self._batches[batch.id] = batch
        try:
            await self._save(batch)
        except BaseException:
            self._batches.pop(batch.id, None)
            raise
        if batch.id not in self._tasks and not self._stopping():
            self._begin(batch)
        return batch

    def _begin(self, batch: BatchJob) -> None:
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch))
        task.add_done_callback(partial(self._end_task, batch.id))

    def _end_task(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the folder of %s cannot be used: %s", name, error)

    async def cancel(self, batch: BatchJob) -> None:
        """Cancel a batch; where another server runs it, ask that one. Lines that have finished stay
        in its output files. Raises OSError."""
        task = self._tasks.get(batch.id)
        if batch.id in self._claims:
            if task is not None and batch.status in ("validating", "in_progress"):
                batch.set_status("cancelling")
                task.cancel()
                await asyncio.wait({task})
            return
        if batch.status in FINAL_STATUSES:
            return
        await asyncio.to_thread(partial(self._cancel_path(batch.id).touch, 0o600))
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._begin(batch)  # ends at once, unless another server has the batch
        await asyncio.wait({self._tasks[batch.id]})
        await self.refresh(batch.id)

    async def close(self) -> None:
        """Give the batches back, for other servers and the next start. The server has stopped."""
        for name, task in list(self._tasks.items()):
            if name not in self._claims:
                task.cancel()
        tasks = list(self._tasks.values())
        _, late = await asyncio.wait(tasks, timeout=RELEASE_TIME) if tasks else ((), ())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for claim in self._claims.values():
            claim.release()
        self._claims.clear()

    async def _drop_oldest(self, tenant: str) -> None:
        """Delete the tenant's oldest finished batch at a limit. Raises StorageFullError."""
        batches, maximum = self.list_batches(tenant), self._config.max_batches_per_key
        is_full = bool(tenant) and len(batches) >= maximum
        if not is_full and len(self._batches) < MAX_BATCHES:
            return
        oldest = next((batch for batch in batches if batch.status in FINAL_STATUSES and batch.id not in self._claims), None)
        if oldest is None:
            limit = f"this key has {maximum} batches" if is_full else f"the server has {MAX_BATCHES} batches"
            raise StorageFullError(f"{limit}, the limit, and none of yours has ended; try again later")
        await asyncio.to_thread((self.files.folder / f"{oldest.id}.json").unlink, missing_ok=True)
        self._batches.pop(oldest.id, None)

    async def _save(self, batch: BatchJob) -> None:
        await asyncio.to_thread(self.files.save, batch.id, msgspec.json.encode(batch))

    def _save_end(self, batch: BatchJob) -> None:
        """Save the last state and give the batch up. Where the disk takes no more, the batch stays
        with this server, which tries again; the next start goes on with its lines."""
        try:
            self.files.save(batch.id, msgspec.json.encode(batch))
        except OSError as error:
            self._failures.warn(batch.id, "the state of %s was not saved: %s", batch.id, error.strerror)
            return
        self._failures.clear(batch.id)
        with suppress(OSError):
            self._cancel_path(batch.id).unlink(missing_ok=True)
        if (claim := self._claims.pop(batch.id, None)) is not None:
            claim.release()

    # one batch ------------------------------------------------------------------------------------

    async def _run(self, batch: BatchJob) -> None:
        """Run a batch unless another server has it, or has ended it."""
        is_cancelled = await asyncio.to_thread(self._cancel_path(batch.id).exists)
        async with nullcontext() if is_cancelled else self._running[batch.tenant]:  # to cancel it needs no turn
            await self._claim_and_run(batch)

    async def _claim_and_run(self, batch: BatchJob) -> None:
        taking = asyncio.ensure_future(asyncio.to_thread(Claim.take, self.files.path(batch.id).with_suffix(".lock")))
        try:
            claim = await asyncio.shield(taking)
        except asyncio.CancelledError:
            if (claim := await taking) is not None:  # its thread cannot be stopped
                claim.release()
            raise
        if claim is None:
            return
        try:
            await self.refresh(batch.id)  # as the owner before has left it
        except BaseException:
            claim.release()
            raise
        if batch.status in FINAL_STATUSES or batch.id not in self._batches or self._stopping():
            if batch.status in FINAL_STATUSES:  # another server was asked to cancel it too late
                self._cancel_path(batch.id).unlink(missing_ok=True)
            claim.release()
            return
        self._claims[batch.id] = claim
        try:
            await self._run_claimed(batch)
        finally:
            if batch.status not in FINAL_STATUSES:
                self._claims.pop(batch.id, claim).release()

    async def _run_claimed(self, batch: BatchJob) -> None:
        outputs: Outputs = {}
        ending: Status = "completed"
        try:
            done = await self._reopen_outputs(batch, outputs)
            if await asyncio.to_thread(self._cancel_path(batch.id).exists):
                ending = "cancelled"
            else:
                await self._run_file(batch, outputs, done)
        except asyncio.CancelledError:
            if batch.cancelling_at is None:
                await self._release(batch, outputs)
                raise
            ending = "cancelled"
        except StoppedError:
            await self._release(batch, outputs)
            return
        except ExpiredError:
            ending = "expired"
        except OSError as error:
            batch.error, ending = f"the batch folder cannot be used: {error.strerror}", "failed"
        except InvalidLinesError as error:
            batch.faults, ending = error.faults, "failed"
        except (StorageFullError, InvalidInputError) as error:
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

    async def _release(self, batch: BatchJob, outputs: Outputs) -> None:
        """Leave the batch to the next owner."""
        for output in outputs.values():
            output.release()
        with suppress(OSError):
            await asyncio.shield(self._save(batch))

    async def _reopen_outputs(self, batch: BatchJob, outputs: Outputs) -> set[str]:
        """Add the output files that an owner before has begun. Returns the names of their lines."""
        await self.files.refresh()
        done: dict[Kind, set[str]] = {"output": set(), "error": set()}
        for kind, names in done.items():
            if (writer := await self.files.reopen_writer(f"{batch.id}_{kind}.jsonl", batch.tenant)) is not None:
                outputs[kind] = writer
                names |= await self._read_block(batch, partial(read_results, writer.path))
        batch.completed, batch.failed = len(done["output"]), len(done["error"])
        return done["output"] | done["error"]

    async def _run_file(self, batch: BatchJob, outputs: Outputs, done: set[str]) -> None:
        """Run the lines without a result. Raises the error that ends the batch."""
        batch.total = await self._validate(batch)
        for kind in (each for each in KINDS if each not in outputs):
            outputs[kind] = await self.files.open_writer(f"{batch.id}_{kind}.jsonl", OUTPUT, batch.tenant)
        batch.in_progress_at = batch.in_progress_at or int(time.time())
        batch.status = "in_progress"
        await self._save(batch)
        reporting = asyncio.create_task(_report_progress(batch))
        try:
            await self._run_lines(batch, outputs, done)
        finally:
            reporting.cancel()

    async def _read_block(self, batch: BatchJob, read: Callable[[], T]) -> T:
        """`read` in a thread, one block of all batches at a time."""
        async with self._reading.hold_slot(batch.tenant):
            return await asyncio.to_thread(read)

    async def _validate(self, batch: BatchJob) -> int:
        """The number of lines that are not empty. Raises InvalidLinesError where one is no request
        of this batch, InvalidInputError, OSError."""
        if self.files.get(batch.input_file_id, batch.tenant) is None:
            raise InvalidInputError("its input file has been deleted; upload it again")
        validator = Validator(batch.endpoint)
        with LineReader(self.files.path(batch.input_file_id), self._config.max_requests) as reader:
            while await self._read_block(batch, lambda: validator.check_lines(reader.read_block())):
                pass
        if validator.faults:
            raise InvalidLinesError(validator.faults)
        if not validator.num_lines:
            raise InvalidInputError("the file has no requests; send one JSON object per line")
        return validator.num_lines

    async def _run_lines(self, batch: BatchJob, outputs: Outputs, done: set[str]) -> None:
        """Run all lines but those in `done`. Raises the error that ends the batch."""
        errors: list[Exception] = []
        permits = self._lines[batch.tenant]
        with LineReader(self.files.path(batch.input_file_id), self._config.max_requests) as reader:
            lines = await self._read_block(batch, reader.read_block)  # opens the file, which may be deleted by now
            async with asyncio.TaskGroup() as group:
                while not errors and lines is not None:
                    for line in lines:
                        await permits.acquire()
                        task = group.create_task(self._run_line(batch, line, (outputs, done), errors))
                        task.add_done_callback(lambda _: permits.release())
                    lines = await self._read_block(batch, reader.read_block)
        if errors:
            raise errors[0]

    async def _run_line(self, batch: BatchJob, line: bytes, results: tuple[Outputs, set[str]], errors: list[Exception]) -> None:
        """Answer a line. An error that ends the batch goes into `errors`; others finish."""
        try:
            if not errors:
                await self._reply_to_line(batch, line, *results)
        except (OSError, InvalidInputError, StorageFullError, StoppedError, ExpiredError) as error:
            errors.append(error)

    async def _reply_to_line(self, batch: BatchJob, line: bytes, outputs: Outputs, done: set[str]) -> None:
        """Send the request of a line that is not in `done`, and append its record to the output or
        the error file."""
        name, body, unknown = await self._parse_line(batch, line)
        if name in done:
            return
        reply = await self.sender.send_until_accepted(batch, body)
        is_fine, rid = reply.status == 200, f"batch_req_{uuid.uuid4().hex}"
        response = {"status_code": reply.status, "request_id": rid, "body": msgspec.Raw(reply.body)}
        if ignored := ", ".join(each for each in (unknown, reply.ignored) if each):
            response["ignored_fields"] = ignored
        piece = msgspec.json.encode({"id": rid, "custom_id": name, "response": response, "error": None}) + b"\n"
        outputs["output" if is_fine else "error"].append(piece)
        batch.completed += is_fine
        batch.failed += not is_fine
        if not is_fine:
            await asyncio.sleep(0.0 if self._stopping() else ERROR_PAUSE)

    async def _parse_line(self, batch: BatchJob, line: bytes) -> tuple[str, bytes, str]:
        """`parse_line`; a long line takes a turn of the thread that reads. Raises LineError."""
        if len(line) <= BLOCK_BYTES:
            return parse_line(line, batch.endpoint)
        return await self._read_block(batch, partial(parse_line, line, batch.endpoint))

    async def _finish(self, batch: BatchJob, outputs: Outputs) -> None:
        """Publish the output files that are not empty; delete the others."""
        for kind, output in outputs.items():
            if output.is_empty:
                output.abandon()
            else:
                setattr(batch, f"{kind}_file_id", (await output.publish()).id)


async def _report_progress(batch: BatchJob) -> None:
    """Log a line every ten seconds."""
    count = Count(batch.id, batch.total)
    while True:
        await asyncio.sleep(LINE_SECONDS)
        count.advance(batch.completed + batch.failed - count.done)
        PROGRESS.info("%s", count.describe())


def _remedy(batch: BatchJob) -> str:
    """What the client of a failed batch does."""
    if not (done := batch.completed + batch.failed):
        return "no request finished; create it again"
    return f"{done} of {batch.total} requests finished and are in its files; send the others in a new batch"
