"""Query parameters, as forms encode them."""

from __future__ import annotations

from typing import Any

import pytest

from frame.entrypoints.http.app import App
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter
from frame.entrypoints.http.request_context import check_query
from tests.entrypoints.inprocess import serving

router = ApiRouter(access=Access.USER)


@router.get("/echo")
async def echo(after: str | None = None) -> Any:
    """What the query says."""
    return [after]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("after=x", "x"),
        ("a=1&after=x+y%20z", "x y z"),
        ("a=1&after=earlier&after=later", "later"),
        ("%61fter=%C3%A9%26%3D%2B", "é&=+"),
        ("after=a=b", "a=b"),
        ("after=", ""),
        ("after", ""),
        ("&&after=x&", "x"),
        ("before=after", None),
        ("", None),
    ],
)
async def test_values_are_decoded(query: str, expected: str | None) -> None:
    async with serving() as server:
        server.app = App(server.services, routes=router.api_routes)
        assert (await server.request("GET", f"/echo?{query}")).json() == [expected]


@pytest.mark.parametrize("query", [b"after=%", b"after=%4", b"after=%zz", b"after=%ff", b"x=%zz&after=1", b"after=\xff", b"%c3=1"])
def test_what_cannot_be_decoded_is_refused(query: bytes) -> None:
    with pytest.raises(ApiError, match="query") as error:
        check_query(query, frozenset({"after"}))
    assert error.value.status == 400


async def test_a_route_takes_an_encoded_value(tmp_path: Any) -> None:
    async with serving({"batches": {"folder": str(tmp_path / "batches")}}) as server:
        assert (await server.request("GET", "/v1/files?limit=%31%30")).status == 200
        assert (await server.request("GET", "/v1/files?limit=%zz")).status == 400
