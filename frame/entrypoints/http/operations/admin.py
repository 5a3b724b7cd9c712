"""Routes for operators: cache, pause, abort, self-check, profile, resolved configuration; health
and `/metrics`, which have no such guard. `AdminGuard` checks who may use the others.

They are served on their own listener (`server.admin_port`, `server.admin_socket`). Beside the API
they need `server.admin_key`; where the server has no keys, every client may use them. A user's key
opens only `/abort_request`, which ends that user's requests.
"""

from __future__ import annotations

import time
from typing import Any

from frame.core.interfaces.runner import ProfileRequest
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, without_folders
from frame.entrypoints.http.protocol.api_route import SMALL_BODY, Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services

router = ApiRouter(access=Access.ADMIN)
own_router = ApiRouter(access=Access.OWN)
health_router = ApiRouter(access=Access.OPEN)
metrics_router = ApiRouter(access=Access.USER)

MAX_NAME_LENGTH = 200  # characters of names that an error quotes

ControlResult = declare("ControlResult", success=bool)
FlushResult = declare("FlushResult", "pages", "`pages`: number of pages that became free.", ControlResult)
AbortResult = declare("AbortResult", "aborted", "`aborted`: number of sequences that were ended.", ControlResult)
ProfileResult = declare("ProfileResult", "path", "`path`: the folder of the traces.", ControlResult)
GroupLoad = declare(
    "GroupLoad",
    "group used_pages total_pages evictable_pages",
    'The pages of a further cache group: "window_" and its tokens, or "snapshot".',
)
EngineLoad = declare(
    "EngineLoad",
    "step running waiting used_pages total_pages evictable_pages preempted cached_tokens prompt_tokens generated_tokens jumped_tokens"
    " num_drafts drafted_tokens accepted_tokens accepted_at drafter_seconds",
    "Gauges, and counters since the start of the engine.",
    groups=array(GroupLoad),
)
ServerInfo = declare(
    "ServerInfo",
    "paused outstanding config phases? replicas? adapters?",
    "`config`: the resolved configuration without keys. `phases`: seconds of the start.\n"
    "`adapters`: the names, the versions that they mean, and who uses them.\n"
    "`replicas`: the same of each replica; with `parallel.dp` above 1, counts are their sums.",
    EngineLoad,
)
Health = declare("Health", doc="An empty object; the status is the answer.")


class AbortRequest(RequestBody):
    """`rid` is the id of a response, or the `rid` that the request was sent with."""

    rid: str | list[str] = ""
    abort_all: bool = False


class ProfileBody(RequestBody):
    num_steps: int = ProfileRequest().num_steps


@router.post("/flush_cache", responses=responds_with(FlushResult))
@router.post("/reset_prefix_cache", responses=responds_with(FlushResult))
async def flush_cache(services: ServicesDep) -> Any:
    """Remove cached prefixes that no running request uses."""
    return await _control(services, "flush_cache")


@router.get("/server_info", responses=responds_with(ServerInfo))
@router.get("/get_server_info", responses=responds_with(ServerInfo))
async def server_info(services: ServicesDep) -> Any:
    """The resolved configuration (without keys), and the engine's counters."""
    reply = await _ask(services, "server_info")
    hidden: Any = {"user": {"server": {"api_key", "api_keys", "admin_key"}}, "model": {"config"}}
    config = without_folders(services.resolved.model_dump(mode="json", exclude=hidden))
    adapters = {} if services.adapters is None else {"adapters": services.adapters.describe()}
    return {**reply, "config": config, "outstanding": services.client.num_outstanding, **adapters}


@router.post("/check_integrity", responses=responds_with(ControlResult))
async def check_integrity(services: ServicesDep) -> Any:
    """Check that the engine's pages and requests are consistent."""
    return await _control(services, "check_integrity")


@router.post("/pause_generation", responses=responds_with(ControlResult))
async def pause(services: ServicesDep) -> Any:
    """Stop launching steps."""
    return await _control(services, "pause")


@router.post("/continue_generation", responses=responds_with(ControlResult))
async def resume(services: ServicesDep) -> Any:
    """Resume after a pause."""
    return await _control(services, "resume")


@own_router.post("/abort_request", dependencies=[SMALL_BODY], responses=responds_with(AbortResult))
async def abort_request(request: AbortRequest, context: ContextDep, services: ServicesDep) -> Any:
    """End requests by id or rid, or all: an operator any, a user its own."""
    names = [name for name in ([request.rid] if isinstance(request.rid, str) else request.rid) if name]
    if not names and not request.abort_all:
        raise ApiError(400, "name a rid, or set abort_all", "rid")
    count = services.client.abort_requests([] if request.abort_all else names, context.tenant or None)
    if not count and not request.abort_all:
        raise ApiError(404, f"no request named {', '.join(names)[:MAX_NAME_LENGTH]} is running; it may be over", "rid", "request_not_found")
    return {"success": True, "aborted": count}


@router.post("/start_profile", dependencies=[SMALL_BODY], responses=responds_with(ProfileResult))
async def start_profile(services: ServicesDep, request: ProfileBody | None = None) -> Any:
    """Record the next steps of every rank with torch's profiler, into the folder
    `execution.profile_dir`."""
    profile = ProfileRequest() if request is None else ProfileRequest(**request.model_dump())
    if (problem := profile.problem()) is not None:
        raise ApiError(400, problem, "num_steps")
    name = time.strftime("frame-%Y%m%d-%H%M%S", time.gmtime())
    return await _control(services, "start_profile", name=name, num_steps=profile.num_steps)


@router.post("/stop_profile", responses=responds_with(ProfileResult))
async def stop_profile(services: ServicesDep) -> Any:
    """End the recording, and write the traces."""
    return await _control(services, "stop_profile")


async def _control(services: Services, action: str, **arguments: Any) -> dict[str, Any]:
    return {"success": True, **await _ask(services, action, **arguments)}


async def _ask(services: Services, action: str, **arguments: Any) -> dict[str, Any]:
    try:
        reply = await services.client.send_command(action, **arguments)
    except (EngineDeadError, TimeoutError) as error:
        raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None
    if not reply.ok:
        raise ApiError(409 if reply.code == "conflict" else 500, reply.error or f"{action} failed")
    return reply.data


# health and metrics -------------------------------------------------------------------------------


@health_router.get("/health/live", responses=responds_with(Health))
@health_router.get("/livez", responses=responds_with(Health))
async def live(context: ContextDep, services: ServicesDep) -> Any:
    """Liveness: 200 while the server can recover, also while it drains or restarts a process."""
    await _health(context, services.client.dead_reason)


@health_router.get("/health", responses=responds_with(Health))
@health_router.get("/health/ready", responses=responds_with(Health))
@health_router.get("/readyz", responses=responds_with(Health))
async def ready(context: ContextDep, services: ServicesDep) -> Any:
    """Readiness: 200 when the server accepts requests."""
    await _health(context, services.ready_problem())


async def _health(context: RequestContext, problem: str | None) -> None:
    if problem is not None:
        raise ApiError(503, problem, retry_after=RETRY_AFTER)
    await context.respond(b"{}")


@metrics_router.get("/metrics", responses=responds_with(str, media_type="text/plain"))
async def metrics(context: ContextDep, services: ServicesDep) -> Any:
    """The metrics of the first stat logger that has any: Prometheus' text format."""
    context.scope["app"].gate.check_totals()
    loggers = services.client.stats.loggers
    if (rendered := loggers.render_metrics() if loggers is not None else None) is None:
        raise ApiError(404, "no stat logger of this server has metrics; start it with prometheus in log.stat_loggers")
    await context.respond(rendered.body, headers=((b"content-type", rendered.content_type.encode()),))
