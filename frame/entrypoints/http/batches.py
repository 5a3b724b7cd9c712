"""`/v1/files` and `/v1/batches`, as OpenAI's: a file of requests in, a file of answers out. Off without a folder for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from frame.entrypoints.http.batch_files import Card, NoRoomError
from frame.entrypoints.http.batch_runner import ENDPOINTS, Batch, BatchRunner
from frame.entrypoints.http.call import Call
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.services import Access, Operation, Routes, Services

T = TypeVar("T")
MOST_LISTED = 100
_FIELD = re.compile(rb'name="?([^";\r\n]*)"?', re.IGNORECASE)
_FILENAME = re.compile(rb'filename="([^"\r\n]*)"', re.IGNORECASE)
_BOUNDARY = re.compile(r'multipart/form-data;.*boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)


class BatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


_decoder = msgspec.json.Decoder(BatchRequest)


# files -------------------------------------------------------------------------------------------------------------


async def upload(call: Call, services: Services) -> None:
    """Upload a file of requests, as multipart/form-data."""
    runner = _runner(services)
    boundary = _BOUNDARY.match(call.header(b"content-type") or "")
    if boundary is None:
        raise ApiError(400, "the body must be multipart/form-data with the fields file and purpose", "file")
    parts = form_parts(await call.body(), boundary[1].encode("latin-1"))
    purpose = parts.get("purpose", (None, b""))[1].decode("utf-8", "replace")
    if purpose != "batch":
        raise ApiError(400, f"purpose is {purpose[:50]!r}; it must be batch", "purpose")
    if "file" not in parts:
        raise ApiError(400, "file is missing; send it", "file")
    filename, content = parts["file"]
    await call.respond_json((await _kept(runner.files.create(content, filename or "batch.jsonl", purpose, call.tenant))).shown())


async def files(call: Call, services: Services) -> None:
    """Your files, the newest first."""
    purpose = call.query("purpose")
    cards = _runner(services).files.owned(call.tenant)
    await _respond_list(call, [card.shown() for card in cards if purpose in (None, card.purpose)])


async def file(call: Call, services: Services) -> None:
    """What is known of a file."""
    await call.respond_json(_card(call, services).shown())


async def file_content(call: Call, services: Services) -> None:
    """A file's content."""
    path = _runner(services).files.path(_card(call, services).id)
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        raise ApiError(500, f"the file cannot be read: {error.strerror}") from None
    await call.respond(content, headers=((b"content-type", b"application/jsonl"),))


async def delete_file(call: Call, services: Services) -> None:
    """Forget a file."""
    card = _card(call, services)
    await _runner(services).files.delete(card)
    await call.respond_json({"id": card.id, "object": "file", "deleted": True})


# batches -----------------------------------------------------------------------------------------------------------


async def create(call: Call, services: Services) -> None:
    """Begin a batch over an uploaded file."""
    runner = _runner(services)
    request = await call.json(_decoder)
    if request.endpoint not in ENDPOINTS:
        raise ApiError(400, f"endpoint is {request.endpoint[:100]!r}; it must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if request.completion_window != "24h":
        raise ApiError(400, f"completion_window is {request.completion_window[:50]!r}; it must be 24h", "completion_window")
    if runner.files.get(request.input_file_id, call.tenant) is None:
        raise ApiError(404, f"there is no file {request.input_file_id[:100]!r}; upload it to /v1/files", "input_file_id")
    batch = await _kept(runner.start(request.input_file_id, request.endpoint, request.metadata, call.tenant))
    await call.respond_json(batch.shown())


async def batches(call: Call, services: Services) -> None:
    """Your batches, the newest first."""
    await _respond_list(call, [batch.shown() for batch in _runner(services).owned(call.tenant)])


async def batch(call: Call, services: Services) -> None:
    """A batch and how far it is."""
    await call.respond_json(_batch(call, services).shown())


async def cancel(call: Call, services: Services) -> None:
    """End a batch; what it has done stays."""
    found = _batch(call, services)
    await _runner(services).cancel(found)
    await call.respond_json(found.shown())


# parts -------------------------------------------------------------------------------------------------------------


def form_parts(body: bytes, boundary: bytes) -> dict[str, tuple[str | None, bytes]]:
    """The parts of a multipart/form-data body by name: (file name, content). Raises ApiError."""
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise ApiError(400, "the multipart body is cut off or has another boundary than its header says", "file")
    parts: dict[str, tuple[str | None, bytes]] = {}
    for piece in pieces[1:-1]:
        head, _, content = piece.partition(b"\r\n\r\n")
        disposition = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b"")
        named, filename = re.search(rb"[;\s]" + _FIELD.pattern, disposition, re.IGNORECASE), _FILENAME.search(disposition)
        if named is not None:
            shown = filename[1].decode("utf-8", "replace") if filename is not None else None
            parts[named[1].decode("utf-8", "replace")] = (shown, content)
    return parts


def _runner(services: Services) -> BatchRunner:
    if services.batches is None:
        raise ApiError(404, "this server takes no batches; start it with --batch-folder FOLDER")
    return services.batches


def _card(call: Call, services: Services) -> Card:
    name = call.scope["path_params"]["name"]
    card = _runner(services).files.get(name, call.tenant)
    if card is None:
        raise ApiError(404, f"there is no file {name[:100]!r}")
    return card


def _batch(call: Call, services: Services) -> Batch:
    name = call.scope["path_params"]["name"]
    found = _runner(services).get(name, call.tenant)
    if found is None:
        raise ApiError(404, f"there is no batch {name[:100]!r}")
    return found


async def _kept(work: Awaitable[T]) -> T:
    """What is to be written to the folder; why not, as an ApiError."""
    try:
        return await work
    except NoRoomError as error:
        raise ApiError(413, str(error), "file") from None
    except OSError as error:
        raise ApiError(503, f"the batch folder cannot be written: {error.strerror}") from None


async def _respond_list(call: Call, shown: list[dict[str, Any]]) -> None:
    """One page: `limit` of those after the one named `after`."""
    given, after = call.query("limit") or "20", call.query("after")
    if not given.isdigit() or not 1 <= int(given[:9]) <= 10_000:
        raise ApiError(400, f"limit is {given[:50]!r}; it must be from 1 to 10000", "limit")
    names = [entry["id"] for entry in shown]
    start = names.index(after) + 1 if after in names else 0
    page = shown[start : start + min(int(given[:9]), MOST_LISTED)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    await call.respond_json({"object": "list", "data": page, **ends, "has_more": start + len(page) < len(shown)})


ROUTES: Routes = (
    Operation("/v1/files", ("POST",), Access.USER, upload),
    Operation("/v1/files", ("GET",), Access.USER, files, query=("purpose", "limit", "after")),
    Operation("/v1/files/{name}", ("GET",), Access.USER, file),
    Operation("/v1/files/{name}", ("DELETE",), Access.USER, delete_file),
    Operation("/v1/files/{name}/content", ("GET",), Access.USER, file_content),
    Operation("/v1/batches", ("POST",), Access.USER, create, BatchRequest),
    Operation("/v1/batches", ("GET",), Access.USER, batches, query=("limit", "after")),
    Operation("/v1/batches/{name}", ("GET",), Access.USER, batch),
    Operation("/v1/batches/{name}/cancel", ("POST",), Access.USER, cancel),
)
