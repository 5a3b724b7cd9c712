"""The route `/v1/realtime` of the OpenAI API: the handshake, and a session on its connection.

The handshake is a request as any other: keys, origins, hooks, metrics and the access log apply.
Must not know an event.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Literal

from frame.entrypoints.http.errors import ApiError, DisconnectedError
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.protocol.fields import ignored_header
from frame.entrypoints.http.realtime.open_sessions import OpenSessions
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.response_types import declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.logs import HEADER
from frame.host.installation import install_command, is_installed

router = ApiRouter(access=Access.USER)

REQUIREMENT = "websockets>=15,<18"
PROTOCOL = "realtime"  # the subprotocol that OpenAI's clients offer in a browser, beside that with the key


RealtimeEvent = declare("RealtimeEvent", "type event_id", "An event over the WebSocket. `type` says which further fields it has.")


@router.get("/v1/realtime", responses=responds_with(RealtimeEvent))
async def realtime(context: ContextDep, services: ServicesDep, model: str = "", intent: Literal["", "transcription"] = "") -> None:
    """Open a session over WebSocket."""
    key, subprotocol = _check_handshake(context)
    if not is_installed("websockets"):
        sentence = f"/v1/realtime needs the package websockets on the server; run: {install_command(REQUIREMENT)}"
        raise ApiError(400, sentence, code="not_installed")
    _check_origin(context)
    services.need_task("generate", takes_audio=True)
    is_speech = bool(services.resolved.model.encoder_length)
    if intent and not is_speech:
        raise ApiError(400, f"the model {services.resolved.served_name!r} transcribes no audio; leave intent out", "intent")
    services.check_model(model, context.tenant)
    if services.draining:
        raise ApiError(503, "the server is shutting down; connect to another one", retry_after=1)
    if services.realtime is None:
        services.realtime = OpenSessions(services.resolved.user.server.max_connections // 2, lambda: services.draining)
    services.realtime.check_place(context.owner)
    await _serve(context, services, services.realtime, (key, subprotocol, model))


async def _serve(context: RequestContext, services: Services, sessions: OpenSessions, asked: tuple[str, str | None, str]) -> None:
    """Answer the handshake, and run the session until its connection ends."""
    from frame.entrypoints.http.realtime.connection import WebSocketConnection
    from frame.entrypoints.http.realtime.session import RealtimeSession

    key, subprotocol, model = asked

    def hold(size: int) -> None:
        context.hold(size) if size > 0 else context.release(-size)

    connection = WebSocketConnection(context.max_body, services.resolved.user.server.client_timeout, hold)
    session = RealtimeSession(context, services, connection, model)
    transport: asyncio.Transport = context.scope["hand_over"](connection)
    if context.lease is not None:
        context.lease.close()  # each response has its own; the number of sessions has its own limit
    headers = [*context.scope.get("response_headers", ()), (HEADER, context.request_id.encode())]
    if context.ignored:
        headers.append(ignored_header(context.ignored))
    if subprotocol is not None:
        headers.append((b"sec-websocket-protocol", subprotocol.encode()))
    context.started, context.status = True, 101
    connection.start(transport, key, headers)
    sessions.add(session, context.owner)
    try:
        await session.run()
    except DisconnectedError:
        pass
    finally:
        connection.close(1011)
        sessions.remove(session, context.owner)


def _check_handshake(context: RequestContext) -> tuple[str, str | None]:
    """The key of the handshake, and the subprotocol that is chosen. Raises ApiError 400 for another
    request."""
    if "hand_over" not in context.scope:
        sentence = "/v1/realtime is a WebSocket; connect with a client for it, such as client.realtime.connect of openai"
        raise ApiError(400, sentence, code="websocket_required")
    if (version := context.header(b"sec-websocket-version")) != "13":
        raise ApiError(400, f"the WebSocket version is {str(version)[:20]}; it must be 13", headers=((b"sec-websocket-version", b"13"),))
    key = context.header(b"sec-websocket-key") or ""
    try:
        is_key = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        is_key = False
    if not is_key:
        raise ApiError(400, "sec-websocket-key must be 16 bytes in base64, as WebSocket clients send it")
    offered = [each.strip() for name, value in context.scope["headers"] if name == b"sec-websocket-protocol" for each in value.split(b",")]
    return key, PROTOCOL if PROTOCOL.encode() in offered else None


def _check_origin(context: RequestContext) -> None:
    """Raise ApiError 403 for a page of another origin that the server does not allow. Browsers ask
    for no permission before a WebSocket, so that the key alone would decide."""
    origin = context.header(b"origin")
    if origin is None or origin.lower().partition("://")[2] == (context.header(b"host") or "").lower():
        return
    if not any(name == b"access-control-allow-origin" for name, _ in context.scope.get("response_headers", ())):
        raise ApiError(403, f"a page of {origin[:200]} may not use this server; allow it with --cors-origins")


RealtimeRoutes = make_extension(__name__, router)
