"""The OpenAPI description is whole: every route, its body, a description, and no reference that
leads nowhere."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.entrypoints.inprocess import serving
from tests.entrypoints.published import ROUTES


@pytest.fixture(scope="module")
def found() -> Any:
    """The description."""

    async def ask() -> Any:
        async with serving() as server:
            return (await server.request("GET", "/openapi.json")).json()

    return asyncio.run(ask())


def test_every_route_is_described(found: Any) -> None:
    described = {(path, method.upper()) for path, methods in found["paths"].items() for method in methods}
    assert described == {(re.sub(r":\w+}", "}", route.path), method) for route in ROUTES for method in route.methods}
    assert [route.path for route in ROUTES if not route.endpoint.__doc__] == [], "the handler's docstring is the description"
    operations = [operation for methods in found["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    assert all(operation["description"] for operation in operations)


@pytest.mark.slow
def test_references_lead_somewhere_and_schemas_are_schemas(found: Any) -> None:
    schemas = found["components"]["schemas"]
    text = msgspec.json.encode(found).decode()
    assert set(re.findall(r'"#/components/schemas/([\w.-]+)"', text)) <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert schemas["ChatRequest"]["required"] == ["messages"]


def test_bodies_and_parameters_have_schemas(found: Any) -> None:
    for route in ROUTES:
        path = re.sub(r":\w+}", "}", route.path)
        for method in route.methods:
            operation = found["paths"][path][method.lower()]
            assert ("requestBody" in operation) == (route.body_model is not None), path
            named = set(re.findall(r"{(\w+)}", path)) | {field.alias for field in route.dependant.query_params}
            assert {one["name"] for one in operation.get("parameters", ())} == named, path


def test_routes_say_whether_they_need_a_key(found: Any) -> None:
    assert found["security"] == [{}, {"bearer": []}, {"key": []}]
    assert found["paths"]["/health"]["get"]["security"] == []
    assert "security" not in found["paths"]["/v1/completions"]["post"]


async def test_the_page_of_the_description_loads_nothing_from_elsewhere() -> None:
    async with serving({"server": {"api_key": "secret"}}) as server:
        page = await server.request("GET", "/docs")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for link in re.findall(r'(?:src|href)="([^"]+)"', page.body.decode()):
            assert link.startswith("/") and not link.startswith("//"), link
            assert link in ("/", "/openapi.json") or (await server.request("GET", link)).status == 200, link
