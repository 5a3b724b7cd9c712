"""The routes of OpenAI's Files and Batch APIs: a file of requests becomes a file of responses. Off
without `batches.folder` and `server.state_dir`. Must not depend on the engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from typing import Any, BinaryIO, Literal, TypeVar

from frame.entrypoints.http.batch.files import FileObject, FileStore, FileWriter, StorageFullError
from frame.entrypoints.http.batch.folder import private
from frame.entrypoints.http.batch.jobs import BatchJob, BatchJobRunner
from frame.entrypoints.http.batch.lines import Endpoint
from frame.entrypoints.http.errors import CLOSE, ApiError
from frame.entrypoints.http.protocol.api_route import FILE_BODY, SMALL_BODY, Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.protocol.list_pages import make_page
from frame.entrypoints.http.request_body import FormReader, Metadata, RequestBody
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.response_types import Page, array, declare
from frame.entrypoints.http.services import Services

router = ApiRouter(access=Access.USER)

T = TypeVar("T")
LARGEST_LIMIT = 10_000
PURPOSE = "batch"  # the only purpose of uploads
MAX_PURPOSE_LENGTH = 64  # bytes
PIECE = 256 * 1024  # bytes that are read from a file at a time

File = declare("File", "id filename purpose created_at", object="file", bytes=int, status="processed")
FileList = declare("FileList", base=Page, data=array(File))
DeletedFile = declare("DeletedFile", "id deleted", object="file")
BatchErrorEntry = declare(
    "BatchErrorEntry", "code message param", "`line`: the number of a line of the input file, without empty ones.", line=int | None
)
BatchErrors = declare("BatchErrors", object="list", data=array(BatchErrorEntry))
BatchCounts = declare("BatchCounts", "total completed failed")
Batch = declare(
    "Batch",
    "id endpoint input_file_id status completion_window output_file_id error_file_id created_at expires_at in_progress_at finalizing_at"
    " cancelling_at completed_at failed_at expired_at cancelled_at",
    "Times are in seconds since the epoch.",
    object="batch",
    metadata=dict[str, str] | None,
    request_counts=BatchCounts,
    requests_per_second=float | None,
    remaining_seconds=int | None,
    errors=BatchErrors | None,
)
BatchList = declare("BatchList", base=Page, data=array(Batch))


class BatchRequest(RequestBody):
    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata | None = None


# files --------------------------------------------------------------------------------------------


@router.post("/v1/files", dependencies=[FILE_BODY], responses=responds_with(File))
async def upload(context: ContextDep, services: ServicesDep) -> Any:
    """Upload a file of requests, as multipart/form-data."""
    try:
        return (await _store(_receive_file(context, _batch_runner(services).files))).to_object()
    except ApiError as error:
        error.headers = CLOSE
        raise


async def _receive_file(context: RequestContext, store: FileStore) -> FileObject:
    """Write an upload to disk as it arrives. Raises ApiError, StorageFullError, OSError."""
    reader = FormReader(context.header(b"content-type") or "")
    purpose: bytes | None = None
    output: FileWriter | None = None
    try:
        async for piece in context.pieces():
            for part, content in reader.feed(piece):  # the first content of each part is empty
                if part.name not in ("file", "purpose"):
                    raise ApiError(400, f"the field {part.name[:50]!r} is unknown; send file and purpose", part.name[:50] or None)
                if not content and (output if part.name == "file" else purpose) is not None:
                    raise ApiError(400, f"{part.name} is given twice; send it once", part.name)
                if part.name == "purpose":
                    purpose = (purpose or b"") + content
                    if len(purpose) > MAX_PURPOSE_LENGTH:
                        _check_purpose(purpose)
                elif output is None:
                    output = await store.open_writer(part.filename or "batch.jsonl", PURPOSE, context.tenant)
                else:
                    await output.write(content)
        reader.close()
        _check_purpose(purpose or b"")
        if output is None:
            raise ApiError(400, "file is missing; send it", "file")
        card, output = await output.finish(), None
        return card
    finally:
        if output is not None:
            output.abandon()


def _check_purpose(value: bytes) -> None:
    purpose = value.decode("utf-8", "replace")
    if purpose != PURPOSE:
        raise ApiError(400, f"purpose is {purpose[:50]!r}; it must be {PURPOSE}", "purpose")


@router.get("/v1/files", responses=responds_with(FileList))
async def files(
    context: ContextDep, services: ServicesDep, purpose: str | None = None, limit: str = "20", order: str = "desc", after: str = ""
) -> Any:
    """List your files, newest first unless `order` is asc."""
    store = _batch_runner(services).files
    await _store(store.refresh())
    cards = store.list_files(context.tenant)
    return make_page([card.to_object() for card in cards if purpose in (None, card.purpose)], limit, order, after, LARGEST_LIMIT)


@router.get("/v1/files/{name}", responses=responds_with(File))
async def file(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Retrieve the metadata of a file."""
    return (await _find_file(context, services, name)).to_object()


@router.get("/v1/files/{name}/content", responses=responds_with(str, media_type="application/jsonl"))
async def file_content(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Retrieve the content of a file."""
    card = await _find_file(context, services, name)
    try:
        handle = await asyncio.to_thread(open, _batch_runner(services).files.path(card.id), "rb", opener=private)
    except OSError as error:
        raise ApiError(500, f"the file cannot be read: {error.strerror}") from None
    with handle:  # an open file can be read to its end after it was deleted
        size = min(card.bytes, os.fstat(handle.fileno()).st_size)  # a read-only disk may keep a piece of a line behind
        await context.respond_pieces(_pieces_of(handle, size), size, ((b"content-type", b"application/jsonl"),))


async def _pieces_of(handle: BinaryIO, size: int) -> AsyncIterator[bytes]:
    while size and (piece := await asyncio.to_thread(handle.read, min(size, PIECE))):
        size -= len(piece)
        yield piece


@router.delete("/v1/files/{name}", responses=responds_with(DeletedFile))
async def delete_file(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Delete a file."""
    card = await _find_file(context, services, name)
    await _store(_batch_runner(services).files.delete(card))
    return {"id": card.id, "object": "file", "deleted": True}


# batches ------------------------------------------------------------------------------------------


@router.post("/v1/batches", dependencies=[SMALL_BODY], responses=responds_with(Batch))
async def create(request: BatchRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create a batch from an uploaded file."""
    runner = _batch_runner(services)
    await _store(runner.files.refresh(request.input_file_id))
    if runner.files.get(request.input_file_id, context.tenant) is None:
        raise ApiError(404, f"there is no file {request.input_file_id[:100]!r}; upload it to /v1/files", "input_file_id")
    batch = await _store(runner.start(request.input_file_id, request.endpoint, request.metadata, context.tenant))
    return batch.to_object()


@router.get("/v1/batches", responses=responds_with(BatchList))
async def batches(context: ContextDep, services: ServicesDep, limit: str = "20", after: str = "") -> Any:
    """List your batches, newest first."""
    runner = _batch_runner(services)
    await _store(runner.refresh())
    return make_page([batch.to_object() for batch in runner.list_batches(context.tenant)], limit, "desc", after, LARGEST_LIMIT)


@router.get("/v1/batches/{name}", responses=responds_with(Batch))
async def batch(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Retrieve a batch."""
    return (await _find_batch(context, services, name)).to_object()


@router.post("/v1/batches/{name}/cancel", responses=responds_with(Batch))
async def cancel(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Cancel a batch. Finished lines stay in its output files. A batch that another server runs is
    `cancelling` until that one has ended it."""
    job = await _find_batch(context, services, name)
    await _store(_batch_runner(services).cancel(job))
    return job.to_object()


# parts --------------------------------------------------------------------------------------------


def _batch_runner(services: Services) -> BatchJobRunner:
    if services.batches is None:
        raise ApiError(404, "this server has no batch folder; start it with --batch-folder FOLDER or --state-dir FOLDER")
    return services.batches


async def _find_file(context: RequestContext, services: Services, name: str) -> FileObject:
    store = _batch_runner(services).files
    await _store(store.refresh(name))
    return _require(store.get(name, context.tenant), f"file {name[:100]!r}")


async def _find_batch(context: RequestContext, services: Services, name: str) -> BatchJob:
    runner = _batch_runner(services)
    await _store(runner.refresh(name))
    return _require(runner.get(name, context.tenant), f"batch {name[:100]!r}")


def _require(stored: T | None, what: str) -> T:
    if stored is None:
        raise ApiError(404, f"there is no {what}")
    return stored


async def _store(work: Awaitable[T]) -> T:
    """The result of work on the folder. Raises ApiError 413 at a limit, 503 for the disk."""
    try:
        return await work
    except StorageFullError as error:
        raise ApiError(413, str(error), "file") from None
    except OSError as error:
        raise ApiError(503, f"the batch folder cannot be used: {error.strerror}") from None
