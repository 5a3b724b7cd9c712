"""Routes for operators: cache, pause, abort, self-check, profile, what was resolved. `AdminGuard` says who may use them where.

They are served on a listener of their own (`server.admin_port`, `server.admin_socket`), or beside the API to whoever brings
`server.admin_key`, or, when nobody needs a key for anything, to everybody who reaches the API. A user's key never opens them, but for
`/abort_request`, which ends a user's own requests.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from frame.core.interfaces.runner import ProfileRequest
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, without_folders
from frame.entrypoints.http.request_context import Call
from frame.entrypoints.http.services import Access, Operation, Routes, Services

LONGEST_NAMES = 200  # characters of names that an error quotes


class AbortRequest(msgspec.Struct, kw_only=True):
    """`rid` is the id of a response, or the `rid` that the request was sent with."""

    rid: str | list[str] = ""
    abort_all: bool = False


_abort_decoder = msgspec.json.Decoder(AbortRequest, strict=False)
_profile_decoder = msgspec.json.Decoder(ProfileRequest, strict=False)


async def flush_cache(call: Call, services: Services) -> None:
    """Forget cached prefixes that nobody uses."""
    await _control(call, services, "flush_cache")


async def server_info(call: Call, services: Services) -> None:
    """The resolved configuration (without the keys), and the engine's own numbers."""
    reply = await _ask(services, "server_info")
    hidden: Any = {"user": {"server": {"api_key", "api_keys", "admin_key"}}, "model": {"config"}}
    config = without_folders(services.resolved.model_dump(mode="json", exclude=hidden))
    await call.respond_json({**reply, "config": config, "outstanding": services.client.num_outstanding})


async def check_integrity(call: Call, services: Services) -> None:
    """The self-check, now."""
    await _control(call, services, "check_integrity")


async def pause(call: Call, services: Services) -> None:
    """Stop launching steps."""
    await _control(call, services, "pause")


async def resume(call: Call, services: Services) -> None:
    """Go on after a pause."""
    await _control(call, services, "resume")


async def abort_request(call: Call, services: Services) -> None:
    """End requests by the id of their response or their rid, or all: an operator any, a user its own."""
    request = await call.json(_abort_decoder)
    names = [name for name in ([request.rid] if isinstance(request.rid, str) else request.rid) if name]
    if not names and not request.abort_all:
        raise ApiError(400, "name a rid, or set abort_all", "rid")
    count = services.client.abort([] if request.abort_all else names, call.tenant or None)
    if not count and not request.abort_all:
        raise ApiError(404, f"no request named {', '.join(names)[:LONGEST_NAMES]} is running; it may be over", "rid", "request_not_found")
    await call.respond_json({"success": True, "aborted": count})


async def start_profile(call: Call, services: Services) -> None:
    """Record the next steps of every rank with torch's profiler, into the folder `execution.profile_dir`."""
    request = await call.json(_profile_decoder, empty=ProfileRequest())
    if (problem := request.problem()) is not None:
        raise ApiError(400, problem, "num_steps")
    name = time.strftime("frame-%Y%m%d-%H%M%S", time.gmtime())
    await _control(call, services, "start_profile", name=name, num_steps=request.num_steps)


async def stop_profile(call: Call, services: Services) -> None:
    """End the recording now, and write the traces."""
    await _control(call, services, "stop_profile")


async def _control(call: Call, services: Services, action: str, **arguments: Any) -> None:
    await call.respond_json({"success": True, **await _ask(services, action, **arguments)})


async def _ask(services: Services, action: str, **arguments: Any) -> dict[str, Any]:
    try:
        reply = await services.client.control(action, **arguments)
    except (EngineDeadError, TimeoutError) as error:
        raise ApiError(503, str(error) or "the engine did not answer in time", retry_after=RETRY_AFTER) from None
    if not reply.ok:
        raise ApiError(409 if reply.code == "conflict" else 500, reply.error or f"{action} failed")
    return reply.data


ROUTES: Routes = (
    Operation("/flush_cache", ("POST",), Access.ADMIN, flush_cache),
    Operation("/reset_prefix_cache", ("POST",), Access.ADMIN, flush_cache),
    Operation("/server_info", ("GET",), Access.ADMIN, server_info),
    Operation("/get_server_info", ("GET",), Access.ADMIN, server_info),
    Operation("/check_integrity", ("POST",), Access.ADMIN, check_integrity),
    Operation("/pause_generation", ("POST",), Access.ADMIN, pause),
    Operation("/continue_generation", ("POST",), Access.ADMIN, resume),
    Operation("/abort_request", ("POST",), Access.OWN, abort_request, AbortRequest, body="small"),
    Operation("/start_profile", ("POST",), Access.ADMIN, start_profile, ProfileRequest, body="small"),
    Operation("/stop_profile", ("POST",), Access.ADMIN, stop_profile),
)
