"""Routes for operators: cache, weights, abort, self-check, profile, configuration; health
and `/metrics`, which have no such guard. `AdminGuard` checks who may use the others.

They are served on their own listener (`server.admin_port`, `server.admin_socket`). Beside the API
they need `server.admin_key`; where the server has no keys, every client may use them. A user's key
opens only `/abort_request`, which ends that user's requests.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NotRequired

from frame.checkpoint.model_config import find_model
from frame.core.interfaces.runner import ProfileRequest
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, Headers, without_folders
from frame.entrypoints.http.operations.live_types import EngineLoad
from frame.entrypoints.http.protocol.api_route import SMALL_BODY, Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_context import JSON, RequestContext
from frame.entrypoints.http.response_types import declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.media.media_service import MediaService

router = ApiRouter(access=Access.ADMIN)
own_router = ApiRouter(access=Access.OWN)
health_router = ApiRouter(access=Access.OPEN)
metrics_router = ApiRouter(access=Access.USER)
version_router = ApiRouter(access=Access.USER)

STATUSES: dict[str | None, int] = {"conflict": 409, "invalid": 400}  # by code of a reply
ASLEEP: Headers = ((b"x-frame-state", b"asleep"),)  # of /health; a router keeps the requests of such a server
DRAINING: Headers = ((b"x-frame-state", b"draining"),)  # likewise, until they end or move
MAX_NAME_LENGTH = 200  # characters of names that an error quotes
MAX_VERSION_LENGTH = 200  # characters

ControlResult = declare("ControlResult", success=bool)
FlushResult = declare("FlushResult", "pages", "`pages`: number of pages that became free.", ControlResult)
AbortResult = declare("AbortResult", "aborted", "`aborted`: number of sequences that were ended.", ControlResult)
ProfileResult = declare("ProfileResult", "path", "`path`: the folder of the traces.", ControlResult)
ServerInfo = declare(
    "ServerInfo",
    "paused problem? weight_version? outstanding config phases? replicas? adapters?",
    "`released`: tags of the memory that a sleep has released. `problem`: what keeps the engine from serving until a command comes.\n"
    "`config`: the resolved configuration without keys. `phases`: seconds of the start.\n"
    "`adapters`: the names, the versions that they mean, and who uses them.\n"
    "`media`: the modalities of chats, and counts of their files since the start.\n"
    "`replicas`: the same of each replica; with `parallel.dp` above 1, counts are their sums.",
    EngineLoad,
    pause_mode=NotRequired[str | None],
    released=NotRequired[list[str]],
    media=NotRequired[dict[str, Any]],
)
Health = declare("Health", doc="An empty object; the status is the answer.")


UpdateResult = declare(
    "UpdateResult",
    "message weight_version num_paused_requests",
    "`num_paused_requests`: requests that are computed anew with the new weights.",
    ControlResult,
)
WeightVersion = declare("WeightVersion", "weight_version")


class AbortRequest(RequestBody):
    """`rid` is the id of a response, or the `rid` that the request was sent with."""

    rid: str | list[str] = ""
    abort_all: bool = False


class ProfileBody(RequestBody):
    num_steps: int = ProfileRequest().num_steps


class UpdateFromDiskRequest(RequestBody):
    """`weight_version`: null: the folder's name. `abort_all_requests`: end all requests instead of
    computing the running ones anew. `flush_cache` is always true."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


@router.post("/flush_cache", responses=responds_with(FlushResult))
@router.post("/reset_prefix_cache", responses=responds_with(FlushResult))
async def flush_cache(services: ServicesDep) -> Any:
    """Remove cached prefixes that no running request uses."""
    return await send_control(services, "flush_cache")


@router.get("/server_info", responses=responds_with(ServerInfo))
@router.get("/get_server_info", responses=responds_with(ServerInfo))
async def server_info(services: ServicesDep) -> Any:
    """The resolved configuration (without keys), and the engine's counters."""
    reply = await ask_engine(services, "server_info")
    hidden: Any = {"user": {"server": {"api_key", "api_keys", "admin_key"}}, "model": {"config"}}
    config = without_folders(services.resolved.model_dump(mode="json", exclude=hidden))
    adapters = {} if services.adapters is None else {"adapters": services.adapters.describe()}
    media = {} if services.media is None else {"media": _describe_media(services.media)}
    return {**reply, "config": config, "outstanding": services.client.num_outstanding, **adapters, **media}


def _describe_media(media: MediaService) -> dict[str, Any]:
    counts = {each.name: getattr(media.counters, each.name) for each in dataclasses.fields(media.counters)}
    return {"modalities": list(media.placeholders()), **counts}


@router.post("/check_integrity", responses=responds_with(ControlResult))
async def check_integrity(services: ServicesDep) -> Any:
    """Check that the engine's pages and requests are consistent."""
    return await send_control(services, "check_integrity")


@router.post("/update_weights_from_disk", dependencies=[SMALL_BODY], responses=responds_with(UpdateResult))
async def update_weights_from_disk(request: UpdateFromDiskRequest, services: ServicesDep) -> Any:
    """Replace the weights by those of a checkpoint of the same model, between two steps."""
    if not request.flush_cache:
        raise ApiError(400, "cached prefixes belong to the old weights; leave flush_cache out", "flush_cache")
    if not request.model_path or "\0" in request.model_path:
        raise ApiError(400, "model_path is empty or no path; name the folder of a checkpoint", "model_path")
    folder = find_model(request.model_path)
    version = folder.name if request.weight_version is None else request.weight_version
    if not 0 < len(version) <= MAX_VERSION_LENGTH or not version.isprintable():
        raise ApiError(400, f"weight_version has 1 to {MAX_VERSION_LENGTH} printable characters", "weight_version")
    data = await ask_engine(services, "update_weights", path=str(folder), version=version, abort=request.abort_all_requests)
    return {
        "success": True, "message": "the weights are updated", "weight_version": data["weight_version"],
        "num_paused_requests": data["num_preempted"],
    }  # fmt: skip


@version_router.get("/get_weight_version", responses=responds_with(WeightVersion))
@version_router.post("/get_weight_version", responses=responds_with(WeightVersion))
async def get_weight_version(services: ServicesDep) -> Any:
    """The version of the weights that the server serves."""
    return {"weight_version": services.client.commands.weight_version}


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
    return await send_control(services, "start_profile", name=name, num_steps=profile.num_steps)


@router.post("/stop_profile", responses=responds_with(ProfileResult))
async def stop_profile(services: ServicesDep) -> Any:
    """End the recording, and write the traces."""
    return await send_control(services, "stop_profile")


async def send_control(services: Services, action: str, **arguments: Any) -> dict[str, Any]:
    return {"success": True, **await ask_engine(services, action, **arguments)}


async def ask_engine(services: Services, action: str, **arguments: Any) -> dict[str, Any]:
    try:
        reply = await services.client.send_command(action, **arguments)
    except (EngineDeadError, TimeoutError) as error:
        raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None
    if not reply.ok:
        raise ApiError(STATUSES.get(reply.code, 500), reply.error or f"{action} failed")
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
    is_asleep = not services.draining and services.client.unavailable_reason is None and services.client.commands.sleep_problem is not None
    headers = DRAINING if services.draining else ASLEEP if is_asleep else ()
    if services.fleet is not None:
        pressure = () if services.metrics is None else services.metrics.pressure.describe()  # what its routers scale by
        headers = (*headers, *services.fleet.headers, *pressure)
    await _health(context, services.ready_problem(), headers)


async def _health(context: RequestContext, problem: str | None, headers: Headers = ()) -> None:
    if problem is not None:
        raise ApiError(503, problem, retry_after=RETRY_AFTER, headers=headers)
    await context.respond(b"{}", headers=(JSON, *headers))


@metrics_router.get("/metrics", responses=responds_with(str, media_type="text/plain"))
async def metrics(context: ContextDep, services: ServicesDep) -> Any:
    """The metrics of the first stat logger that has any: Prometheus' text format."""
    context.scope["app"].gate.check_totals()
    loggers = services.client.stats.loggers
    if (rendered := loggers.render_metrics() if loggers is not None else None) is None:
        raise ApiError(404, "no stat logger of this server has metrics; start it with prometheus in log.stat_loggers")
    await context.respond(rendered.body, headers=((b"content-type", rendered.content_type.encode()),))
