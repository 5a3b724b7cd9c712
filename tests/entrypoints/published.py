"""The published OpenAPI description, and checks that real responses match it.

A field that the description does not have is an error."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jsonschema
import msgspec
from fastapi.openapi.utils import get_openapi

from frame.entrypoints.http.app import complete_schema
from frame.entrypoints.http.extensions import CORE_ROUTES, load_built_in
from frame.entrypoints.http.protocol.routing import PathIndex

ROUTES = (*load_built_in().routes, *CORE_ROUTES)  # of a server as it is configured by default


@cache
def description() -> dict[str, Any]:
    return complete_schema(get_openapi(title="frame", version="0", routes=ROUTES), ROUTES)


@cache
def _operations() -> PathIndex[Any]:
    return PathIndex((route.path, route.methods, (route, method)) for route in ROUTES for method in route.methods)


@cache
def _closed() -> dict[str, Any]:
    """The description with no further fields allowed where none are declared."""
    found = msgspec.json.decode(msgspec.json.encode(description()))
    pending: list[Any] = [found]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if isinstance(part.get("properties"), dict):
                part.setdefault("additionalProperties", False)
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return found


@cache
def _validator(reference: str) -> Any:
    return jsonschema.Draft202012Validator({**_closed(), **msgspec.json.decode(reference)})


def bodies(media_type: str, data: bytes) -> list[Any]:
    """The JSON values of a response: one, or one for each event or line."""
    if media_type == "application/json":
        return [msgspec.json.decode(data)]
    if media_type in ("application/x-ndjson", "application/stream+json"):
        return [msgspec.json.decode(line) for line in data.splitlines()]
    if media_type == "text/event-stream":
        found = re.findall(rb"^data: (.+)$", data, re.MULTILINE)
        return [msgspec.json.decode(each) for each in found if each != b"[DONE]"]
    return [data.decode()]


def check_response(method: str, path: str, status: int, media_type: str, data: bytes) -> str:
    """Assert that a response is as published; returns `METHOD path media-type` of its schema."""
    found = _operations().find(path)
    assert found is not None, path
    route, _ = found.endpoint(method)
    responses = description()["paths"][route.path_format][method.lower()]["responses"]
    shown = responses.get(str(status)) or responses[f"{status // 100}XX"]
    kind = media_type.partition(";")[0]
    content = shown["content"]
    schema = content[kind if kind in content else "*/*"]["schema"]
    for body in bodies(kind, data):
        error = next(_validator(msgspec.json.encode(schema).decode()).iter_errors(body), None)
        assert error is None, f"{method} {path} {status} {error.json_path}: {error.message[:600]}"
    return f"{method} {route.path} {kind if status == 200 else status}"
