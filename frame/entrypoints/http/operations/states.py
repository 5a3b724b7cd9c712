"""Routes for operators that stop the engine and start it again, and that tell whether it has
stopped: pauses, and releases of its memory, as SGLang's and vLLM's clients send them. Must not know
a device."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query

from frame.core.interfaces.runner import MEMORY_TAGS
from frame.entrypoints.engine_client.replicas import list_clients
from frame.entrypoints.http.operations.admin import ControlResult, send_control
from frame.entrypoints.http.protocol.api_route import SMALL_BODY, Access, ApiRouter, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.response_types import array, declare

router = ApiRouter(access=Access.ADMIN)

PauseResult = declare("PauseResult", "", "`num_preempted`: requests that are computed anew.", ControlResult, num_preempted=int)
SleepResult = declare("SleepResult", "", "`released`: tags of all released memory.", PauseResult, released=list[str])
WakeResult = declare(
    "WakeResult",
    doc="`released`: tags of the memory that is still released. `needs_weights`: requests wait for an update of the weights.",
    base=ControlResult,
    released=list[str],
    needs_weights=bool,
)
PauseStatus = declare("PauseStatus", status=str)
RankLoad = declare(
    "RankLoad",
    doc="Requests of a replica, and the tokens of its KV cache that are in use.",
    dp_rank=int,
    num_reqs=int,
    num_running_reqs=int,
    num_waiting_reqs=int,
    num_tokens=int,
)
IsPaused = declare("IsPaused", is_paused=bool)
IsSleeping = declare("IsSleeping", is_sleeping=bool)


class PauseBody(RequestBody):
    """`mode`: "abort" ends all requests; "wait" lets running ones end; "in_place" and "keep" let
    them go on later with their KV, "retract" computed anew."""

    mode: Literal["abort", "wait", "in_place", "keep", "retract"] = "abort"


class VllmPauseBody(RequestBody):
    """The same as the query parameters, which count where both are sent."""

    mode: Literal["abort", "wait", "keep"] | None = None
    wait_for_inflight_requests: bool | None = None
    clear_cache: bool | None = None


class ContinueBody(RequestBody):
    """No fields."""


class MemoryBody(RequestBody):
    """`tags`: null: all. `level`: of a release; 1 keeps weights in host memory, 2 drops them."""

    tags: list[str] | None = None
    level: int = 1


# SGLang -------------------------------------------------------------------------------------------


@router.post("/pause_generation", dependencies=[SMALL_BODY], responses=responds_with(PauseResult))
async def pause_generation(services: ServicesDep, request: PauseBody | None = None) -> Any:
    """Launch no more steps. The response comes when no step of any rank and replica runs."""
    mode = "abort" if request is None else request.mode
    return await send_control(services, "pause", mode="keep" if mode == "in_place" else mode)


@router.post("/continue_generation", dependencies=[SMALL_BODY], responses=responds_with(ControlResult))
async def continue_generation(services: ServicesDep, request: ContinueBody | None = None) -> Any:
    """Continue after a pause."""
    return await send_control(services, "resume")


@router.post("/release_memory_occupation", dependencies=[SMALL_BODY], responses=responds_with(SleepResult))
async def release_memory_occupation(services: ServicesDep, request: MemoryBody | None = None) -> Any:
    """Release the engine's memory. Running requests are computed anew after the wake."""
    body = request or MemoryBody()
    return await send_control(services, "sleep", tags=_list_tags(body.tags), level=body.level, mode="retract")


@router.post("/resume_memory_occupation", dependencies=[SMALL_BODY], responses=responds_with(WakeResult))
async def resume_memory_occupation(services: ServicesDep, request: MemoryBody | None = None) -> Any:
    """Map the engine's memory again."""
    return await send_control(services, "wake", tags=_list_tags(None if request is None else request.tags))


@router.get("/get_load", responses=responds_with(array(RankLoad)))
async def get_load(services: ServicesDep) -> Any:
    """The load of each replica, by which a trainer waits until a pause holds: then none of its
    requests runs."""
    is_paused, loads = services.client.commands.is_paused, [client.load for client in list_clients(services.client)]
    return [
        {
            "dp_rank": rank,
            "num_reqs": load.running + load.waiting,
            "num_running_reqs": 0 if is_paused else load.running,
            "num_waiting_reqs": load.waiting + load.running * is_paused,
            "num_tokens": load.used_pages * services.resolved.page_size,
        }
        for rank, load in enumerate(loads)
        if load is not None
    ]


# vLLM ---------------------------------------------------------------------------------------------


@router.post("/pause", dependencies=[SMALL_BODY], responses=responds_with(PauseStatus))
async def pause(
    services: ServicesDep,
    request: VllmPauseBody | None = None,
    mode: Annotated[Literal["abort", "wait", "keep"] | None, Query()] = None,
    wait_for_inflight_requests: Annotated[bool | None, Query()] = None,
    clear_cache: Annotated[bool | None, Query()] = None,
) -> Any:
    """Launch no more steps. `wait_for_inflight_requests`: the same as the mode "wait".
    `clear_cache`: also remove cached prefixes, but with the mode "keep"."""
    body = request or VllmPauseBody()
    waits = body.wait_for_inflight_requests if wait_for_inflight_requests is None else wait_for_inflight_requests
    clears = body.clear_cache if clear_cache is None else clear_cache
    chosen = mode or body.mode or ("wait" if waits else "abort")
    await send_control(services, "pause", mode=chosen, clear_cache=clears is not False)
    return {"status": "paused"}


@router.post("/resume", responses=responds_with(PauseStatus))
async def resume(services: ServicesDep) -> Any:
    """Continue after a pause."""
    await send_control(services, "resume")
    return {"status": "resumed"}


@router.get("/is_paused", responses=responds_with(IsPaused))
async def is_paused(services: ServicesDep) -> Any:
    """Whether the engine is paused."""
    return {"is_paused": services.client.commands.is_paused}


@router.post("/sleep", responses=responds_with(SleepResult))
async def sleep(
    services: ServicesDep,
    level: int = 1,
    mode: Annotated[Literal["abort", "wait", "keep"], Query()] = "abort",
    tags: Annotated[list[str] | None, Query()] = None,
) -> Any:
    """Release the engine's memory. Level 1 keeps weights in host memory, level 2 drops them: after
    the wake they have to be updated."""
    return await send_control(services, "sleep", tags=_list_tags(tags), level=level, mode=mode)


@router.post("/wake_up", responses=responds_with(WakeResult))
async def wake_up(services: ServicesDep, tags: Annotated[list[str] | None, Query()] = None) -> Any:
    """Map the engine's memory again."""
    return await send_control(services, "wake", tags=_list_tags(tags))


@router.get("/is_sleeping", responses=responds_with(IsSleeping))
async def is_sleeping(services: ServicesDep) -> Any:
    """Whether memory of the engine is released."""
    return {"is_sleeping": bool(services.client.commands.released)}


def _list_tags(tags: list[str] | None) -> list[str]:
    return tags or list(MEMORY_TAGS)
