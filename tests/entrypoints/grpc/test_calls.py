"""What a gRPC call says of its caller: headers, time, and the status that an HTTP one becomes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import grpc
import pytest

from frame.entrypoints.grpc.calls import NO_DEADLINE, GrpcCaller, abort, headers_of, status_of
from frame.entrypoints.http.errors import ApiError
from frame.interfaces.keys import KeyHolder


def caller(seconds: float | None, *more: tuple[str, str]) -> GrpcCaller:
    metadata = (("x-request-id", "mine"), ("data-bin", b"\xff"), *more)
    return GrpcCaller(SimpleNamespace(invocation_metadata=lambda: metadata, time_remaining=lambda: seconds), KeyHolder("tenant"))


@pytest.mark.parametrize(("given", "left"), [(None, None), (2 * NO_DEADLINE, None), (5.0, 5.0), (-1.0, 0.001)])
def test_a_calls_deadline(given: float | None, left: float | None) -> None:
    assert caller(given).time_left() == left


@pytest.mark.parametrize(
    ("deadline", "header", "left"),
    [(None, "2", 2.0), (2 * NO_DEADLINE, "2", 2.0), (100.0, "2", 2.0), (1.0, "2", 1.0), (-1.0, "2", 0.001)],
)
def test_the_shorter_of_deadline_and_header_holds(deadline: float | None, header: str, left: float) -> None:
    assert caller(deadline, ("x-request-timeout", header)).time_left() == left


@pytest.mark.parametrize("deadline", [None, 100.0])
@pytest.mark.parametrize("header", ["abc", "-1", "0", "nan", "1_0", ""])
def test_a_bad_time_limit_is_refused_with_a_deadline_too(deadline: float | None, header: str) -> None:
    with pytest.raises(ApiError, match="x-request-timeout is .*; it must be a (finite )?number of seconds") as caught:
        caller(deadline, ("x-request-timeout", header)).time_left()
    assert caught.value.status == 400


def test_metadata_are_headers() -> None:
    made = caller(None)
    assert (made.request_id, made.tenant, made.header(b"x-request-id"), made.header(b"none")) == ("mine", "tenant", "mine", None)
    assert headers_of((("a", "ü"), ("b-bin", b"\xff"))) == [(b"a", "ü".encode("latin-1")), (b"b-bin", b"\xff")]
    assert headers_of(None) == []


def test_statuses() -> None:
    assert status_of(ApiError(429, "x")) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status_of(ApiError(500, "x")) == status_of(ApiError(418, "x")) == grpc.StatusCode.INTERNAL


async def test_a_call_that_has_ended_meanwhile_is_cancelled() -> None:
    """grpc ends a call whose message is over the limit by itself; `abort` fails then."""
    context = SimpleNamespace(abort=AsyncMock(side_effect=grpc.aio.InternalError("Failed grpc_call_start_batch: 11")))
    with pytest.raises(asyncio.CancelledError):
        await abort(context, ApiError(400, "the call has no message"))
    context = SimpleNamespace(abort=AsyncMock(side_effect=grpc.aio.AbortError()))
    with pytest.raises(grpc.aio.AbortError):
        await abort(context, ApiError(429, "x", retry_after=1))
    context.abort.assert_awaited_once_with(grpc.StatusCode.RESOURCE_EXHAUSTED, "x", (("retry-after", "1"),))
