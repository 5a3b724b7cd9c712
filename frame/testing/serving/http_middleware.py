"""Checks of the middleware of HTTP extensions, with an application of the suite's own. Used by the
suite of the kind. Must not know an extension by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

MakeApp = Callable[[Any], Any]  # of the application inside
CHUNKS = (b"data: one\n\n", b"", b"data: \xff\xfe\n\n", b"data: [DONE]\n\n")


async def check_app(make: MakeApp) -> None:
    """All checks of one piece of middleware."""
    await _check_stream(make)
    await _check_stream(make, (b"x" * 300_000, b"y", b""))
    await _check_stream(make, (*[b"z" * 1_000_000] * 12, b""))
    await _check_lifespan(make)
    await _check_two_responses(make)
    await _check_failure(make)


async def _check_two_responses(make: MakeApp) -> None:
    """Two responses at once through one object, each with its own status and headers."""
    sent: dict[int, list[Any]] = {1: [], 2: []}
    both_began = asyncio.Event()
    began: list[int] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        number = int(scope["path"][-1])
        await send({"type": "http.response.start", "status": 200 + number, "headers": [(b"x-number", b"%d" % number)]})
        began.append(number)
        if len(began) == 2:
            both_began.set()
        await asyncio.wait_for(both_began.wait(), 10)
        await send({"type": "http.response.body", "body": b"%d" % number, "more_body": False})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def serve(app: Any, number: int) -> None:
        async def send(message: Any) -> None:
            sent[number].append(message)

        await asyncio.wait_for(app(_scope(f"/v1/{number}"), receive, send), 10)

    app = make(inner)
    await asyncio.gather(serve(app, 1), serve(app, 2))
    for number, messages in sent.items():
        start = next((message for message in messages if message["type"] == "http.response.start"), None)
        body = b"".join(message.get("body", b"") for message in messages)
        assert start is not None and start["status"] == 200 + number, f"of two responses at once, one has the start {start}"
        assert (b"x-number", b"%d" % number) in {tuple(pair) for pair in start["headers"]}, "a response has the headers of one beside it"
        assert body == b"%d" % number, f"of two responses at once, one has the body {body!r}"


async def _check_stream(make: MakeApp, chunks: Sequence[bytes] = CHUNKS) -> None:
    sent: list[Any] = []
    seen: list[Any] = []
    scope = _scope("/v1/completions") | {"headers": [(b"authorization", b"Bearer key"), (b"x-one", b"1"), (b"x-name", b"\xff\xfc")]}
    pieces = [{"type": "http.request", "body": b"bo", "more_body": True}, {"type": "http.request", "body": b"d", "more_body": False}]
    messages = [*pieces, {"type": "http.disconnect"}]
    inbox = messages[::-1]

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["type"], scope["method"], scope["path"], dict(scope["headers"]).get(b"authorization")))
        seen.append([await receive() for _ in range(3)])
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/event-stream"), (b"x-a", b"b")]})
        for place, chunk in enumerate(chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": place < len(chunks) - 1})
            bodies = b"".join(message.get("body", b"") for message in sent)
            assert bodies == b"".join(chunks[: place + 1]), "middleware holds back or changes a part of a stream"

    async def receive() -> Any:
        return inbox.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    try:
        await asyncio.wait_for(make(inner)(scope, receive, send), 10)
    except TimeoutError:
        raise AssertionError("middleware does not return") from None
    assert seen, "middleware does not call the application"
    assert seen[0] == ("http", "POST", "/v1/completions", b"Bearer key"), f"middleware changes the request: {seen[0]}"
    assert seen[1] == messages, "middleware changes the body, or hides that the client left"
    assert sent[0]["status"] == 201, f"middleware changes the status to {sent[0]['status']}"
    headers = {tuple(pair) for pair in sent[0]["headers"]}
    assert {(b"content-type", b"text/event-stream"), (b"x-a", b"b")} <= headers, "middleware drops headers"
    assert not sent[-1].get("more_body", False), "middleware does not end the response"


async def _check_lifespan(make: MakeApp) -> None:
    """Middleware hands on the start and the end of the server, which have neither headers nor a
    path."""
    inbox, sent, seen = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}], list[Any](), list[Any]()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            seen.append((await receive())["type"])
            await send({"type": f"{seen[-1]}.complete"})

    async def receive() -> Any:
        return inbox.pop()

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
    try:
        await asyncio.wait_for(make(inner)(scope, receive, send), 10)
    except Exception as error:
        raise AssertionError(f"middleware raises {type(error).__name__} ({error}) when the server starts or stops") from error
    assert seen == ["lifespan.startup", "lifespan.shutdown"], f"of the server's start and end, middleware hands on {seen}"
    assert sent == [f"{each}.complete" for each in seen], f"of what the application says to start and end, middleware hands on {sent}"


async def _check_failure(make: MakeApp) -> None:
    """An application that fails, or whose request is cancelled."""
    for failure in (asyncio.CancelledError, ZeroDivisionError):
        sent: list[Any] = []

        async def inner(scope: Any, receive: Any, send: Any, failure: type[BaseException] = failure) -> None:
            raise failure

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message["type"])

        try:
            await make(inner)(_scope("/v1/completions"), receive, send)
        except failure:
            continue
        assert failure is not asyncio.CancelledError, "middleware hides that a request was cancelled"
        assert "http.response.start" in sent, "middleware hides an error of the application and sends no response: its client waits"


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": [], "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2), "state": {},
    }  # fmt: skip
