"""Which requests keep their prefix after their end, and until when, by the fields of all protocols.

Used by `start_request`. Must not depend on a dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from frame.core.messages import SessionPin
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.request_body import RequestOptions
from frame.entrypoints.http.services import Services

SESSION_HEADER = "x-session-id"
MAX_SESSION_CHARS = 256
DEFAULT_SECONDS = 300.0
RETENTIONS = {"in_memory": DEFAULT_SECONDS, "in-memory": DEFAULT_SECONDS, "24h": 86400.0}  # of OpenAI's prompt_cache_retention
LIFETIMES = {"5m": DEFAULT_SECONDS, "1h": 3600.0}  # of Anthropic's cache_control.ttl


class Caller(Protocol):
    """The sender of a request, over any protocol."""

    @property
    def tenant(self) -> str: ...

    def header(self, name: bytes) -> str | None: ...


def choose_pin(services: Services, call: Caller, options: RequestOptions, rid: str) -> SessionPin | None:
    """What keeps the prefix of a request; None: nothing. The names of sessions are those of the
    tenant. rid: names a session that the client does not name. Raises ApiError 400."""
    session = find_session(call, options)
    opened = services.sessions.find_seconds(call.tenant, session) if session else None
    seconds = [DEFAULT_SECONDS if opened is None else opened] if session else []
    if (retention := options.prompt_cache_retention) is not None:
        if retention not in RETENTIONS:
            sentence = f"prompt_cache_retention is {quoted(retention)}; it must be in_memory or 24h"
            raise ApiError(400, sentence, "prompt_cache_retention")
        seconds.append(RETENTIONS[retention])
    if options.cache_control is not None:
        seconds.append(read_lifetime(options.cache_control, "cache_control"))
    if not seconds or services.resolved.task != "generate":
        return None
    return SessionPin(call.tenant, session or f"\0{rid}", max(seconds), is_named=bool(session))  # no client can send that name


def find_session(call: Caller, options: RequestOptions) -> str | None:
    """What the client calls the session of a request. Raises ApiError 400."""
    header = call.header(SESSION_HEADER.encode())
    for name, value in (
        ("session_id", options.session_id),
        ("prompt_cache_key", options.prompt_cache_key),
        (SESSION_HEADER, header),
    ):
        if value:
            return check_session(name, value)
    return None


def check_session(name: str, value: str) -> str:
    """A session's name. Raises ApiError 400 that names the field."""
    if len(value) > MAX_SESSION_CHARS:
        raise ApiError(400, f"{name} has {len(value)} characters; it may have {MAX_SESSION_CHARS}", name)
    if not value.isprintable():
        raise ApiError(400, f"{name} holds a character that is not printable; leave it out", name)
    return value


def read_lifetime(control: Any, place: str) -> float:
    """The seconds of a `cache_control`. Raises ApiError 400."""
    if not isinstance(control, Mapping):
        raise ApiError(400, f"{place}: expected an object", place)
    if (kind := control.get("type", "ephemeral")) != "ephemeral":
        raise ApiError(400, f"{place}.type is {quoted(kind)}; it must be ephemeral", f"{place}.type")
    lifetime = control.get("ttl") or "5m"
    if not isinstance(lifetime, str) or lifetime not in LIFETIMES:
        raise ApiError(400, f"{place}.ttl is {quoted(lifetime)}; it must be 5m or 1h", f"{place}.ttl")
    return LIFETIMES[lifetime]


def join_controls(parts: Sequence[tuple[str, Any]], whole: Any) -> dict[str, Any] | None:
    """The `cache_control` with the longest lifetime of those in parts of a request (path, part) and
    that of the request. A prompt is kept as a whole. Raises ApiError 400."""
    controls = [(f"{place}.cache_control", part["cache_control"]) for place, part in parts if part.get("cache_control") is not None]
    if whole is not None:
        controls.append(("cache_control", whole))
    if not controls:
        return None
    seconds = max(read_lifetime(control, place) for place, control in controls)
    return {"type": "ephemeral", "ttl": next(name for name, value in LIFETIMES.items() if value == seconds)}
