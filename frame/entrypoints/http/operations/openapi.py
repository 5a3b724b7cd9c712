"""The OpenAPI 3.1 description at `/openapi.json`, made from the tables of routes and their request structs. Knows no engine."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import msgspec

from frame.entrypoints.http.request_context import Call
from frame.entrypoints.http.services import Access, Operation, Routes, Services

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_REFERENCE = "#/components/schemas/{name}"
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}


def description_of(routes: Routes) -> Operation:
    """The route that describes these routes, and itself."""

    async def openapi(call: Call, services: Services) -> None:
        """This description, as OpenAPI 3.1."""
        await call.respond(body())

    operation = Operation("/openapi.json", ("GET",), Access.USER, openapi)
    body: Callable[[], bytes] = lru_cache(maxsize=1)(lambda: msgspec.json.encode(describe((*routes, operation))))
    return operation


def describe(routes: Routes) -> dict[str, Any]:
    """The whole description."""
    types = list(dict.fromkeys(row.request for row in routes if row.request is not None))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    bodies = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in routes:
        found = paths.setdefault(_PARAMETER.sub(r"{\1}", row.path), {})
        found |= {method.lower(): _operation(row, method, bodies.get(row.request) if row.request else None) for method in row.methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "frame", "version": version("frame-serve"), "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(row: Operation, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
    name = "_".join([method.lower(), *re.findall(r"\w+", _PARAMETER.sub(r"\1", row.path))])
    described: dict[str, Any] = {
        "operationId": name,
        "summary": (inspect.getdoc(row.handler) or name).partition("\n")[0],
        "responses": {
            "200": {"description": "the answer; a stream of server-sent events where the request asks for one"},
            "default": {
                "description": "why not: a sentence that names the thing and the remedy",
                "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Error")}}},
            },
        },
    }
    text = {"type": "string", "minLength": 1}
    parameters: list[dict[str, Any]] = [
        {"name": part, "in": "path", "required": True, "schema": text} for part in _PARAMETER.findall(row.path)
    ]
    parameters += [{"name": part, "in": "query", "schema": {"type": "string"}} for part in row.query]
    if parameters:
        described["parameters"] = parameters
    if row.access is Access.OPEN:
        described["security"] = []
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described
