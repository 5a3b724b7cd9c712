"""Query parameters, as forms encode them."""

from __future__ import annotations

from typing import Any

import pytest

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.request_context import Call
from tests.entrypoints.inprocess import serving


def call(query: bytes) -> Call:
    async def nothing(*_: Any) -> Any:
        raise AssertionError

    return Call({"headers": [], "query_string": query}, nothing, nothing, 0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (b"after=x", "x"),
        (b"a=1&after=x+y%20z&after=later", "x y z"),
        (b"%61fter=%C3%A9%26%3D%2B", "é&=+"),
        (b"after=a=b", "a=b"),
        (b"after=", ""),
        (b"after", ""),
        (b"&&after=x&", "x"),
        (b"before=after", None),
        (b"", None),
    ],
)
def test_values_are_decoded(query: bytes, expected: str | None) -> None:
    assert call(query).query("after") == expected


@pytest.mark.parametrize("query", [b"after=%", b"after=%4", b"after=%zz", b"after=%ff", b"x=%zz&after=1", b"after=\xff", b"%c3=1"])
def test_what_cannot_be_decoded_is_refused(query: bytes) -> None:
    with pytest.raises(ApiError, match="query") as error:
        call(query).query("after")
    assert error.value.status == 400


async def test_a_route_takes_an_encoded_value(tmp_path: Any) -> None:
    async with serving({"batches": {"folder": str(tmp_path / "batches")}}) as server:
        assert (await server.request("GET", "/v1/files?limit=%31%30")).status == 200
        assert (await server.request("GET", "/v1/files?limit=%zz")).status == 400
