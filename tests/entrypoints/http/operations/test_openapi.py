"""The OpenAPI description is whole: every route, its body, a summary, and no reference that leads nowhere."""

from __future__ import annotations

import re

import jsonschema
import msgspec

from frame.entrypoints.http.app import ROUTES
from frame.entrypoints.http.operations.openapi import describe


def test_every_route_is_described() -> None:
    description = describe(ROUTES)
    described = {(path, method.upper()) for path, methods in description["paths"].items() for method in methods}
    assert described == {(re.sub(r":\w+}", "}", row.path), method) for row in ROUTES for method in row.methods}
    assert [row.path for row in ROUTES if not row.handler.__doc__] == [], "the handler's docstring is the summary"
    names = [operation["operationId"] for methods in description["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_references_lead_somewhere_and_schemas_are_schemas() -> None:
    description = describe(ROUTES)
    schemas = description["components"]["schemas"]
    text = msgspec.json.encode(description).decode()
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert schemas["ChatRequest"]["required"] == ["messages"]
