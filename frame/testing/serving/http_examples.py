"""Checks of what an HTTP extension states about itself: requests that it accepts or refuses, and
what its routes answer. Used by the suite of the kind. Must not know a plugin by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
from fastapi import FastAPI

from frame.interfaces.http import HttpExtension, HttpRequest, HttpResponse
from frame.testing.conformance import SkipCheck

RESPONSE = HttpResponse(200, 0.25, prompt_tokens=3, output_tokens=4)

Decide = Callable[[HttpExtension, HttpRequest], Awaitable[tuple[str, int, str]]]


async def check_accepts_requests(
    make: Callable[[], HttpExtension], target: type[HttpExtension], requests: Sequence[HttpRequest], decide: Decide
) -> None:
    """The requests that the class says it accepts; without such a list, one of the suite's."""
    for request in target.conformance_requests:
        decision = await decide(make(), request)
        assert decision[0] == "accepted", f"of conformance_requests, {request.method} {request.path} is {decision}"
    if not target.conformance_requests and not [each for each in requests if (await decide(make(), each))[0] == "accepted"]:
        raise SkipCheck("the extension refuses all requests of the suite; list some that it accepts as conformance_requests")


async def check_refuses_requests(
    make: Callable[[], HttpExtension], target: type[HttpExtension], requests: Sequence[HttpRequest], decide: Decide
) -> None:
    """The requests that the class says it refuses, each with its status."""
    for request, expected in target.conformance_refusals:
        decision = await decide(make(), request)
        assert decision[:2] == ("refused", expected), f"of conformance_refusals, {request.method} {request.path} is {decision}"


async def check_states_what_it_recorded(
    make: Callable[[], HttpExtension], target: type[HttpExtension], requests: Sequence[HttpRequest], decide: Decide
) -> None:
    """What the class says its routes answer after the requests that it accepts."""
    if not target.conformance_bodies:
        return
    extension = make()
    for request in target.conformance_requests:
        await decide(extension, request)
        await extension.on_response(request, RESPONSE)
    app = FastAPI()
    for router in extension.make_routers():
        app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://conformance") as client:
        for path, expected in target.conformance_bodies.items():
            response: Any = await client.get(path)
            what = f"GET {path} answers {response.status_code} {response.text!r:.200}, and not {expected!r:.200}"
            assert response.status_code == 200 and response.json() == expected, what
