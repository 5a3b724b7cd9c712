"""`outline_requests`: what each request does at this moment, and the pages of each tenant, as plain
data for display.

Called for a command (`outline_requests`), never in a step. It must not change a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from frame.core.scheduling.request import Request, RequestStatus

if TYPE_CHECKING:  # the HTTP server joins outlines, and loads no scheduler
    from frame.core.scheduling.planner import StepPlanner
    from frame.core.scheduling.running import RunningSet

# In the order of a request's way. `grammar`: its grammar is compiled, or a slow call of it runs;
# `tier`: a part of its prefix is read from a KV cache tier; `media`: the table of rows is full
PHASES = ("grammar", "queued", "tier", "media", "prefill", "decode", "preempted")


def outline_requests(
    requests: Mapping[str, Request], running: RunningSet, queue: Iterable[Request] | None, planner: StepPlanner, now: float, limit: int
) -> dict[str, Any]:
    """Count all requests by phase and by tenant, and describe the oldest `limit` of them. A
    tenant's `pages` are those of its running requests; a page that several requests share counts
    for each. `queue`: the waiting requests that no grammar holds; None: all that wait. `now`:
    seconds of the scheduler's clock."""
    queued = requests.keys() if queue is None else {request.rid for request in queue}
    phases = dict.fromkeys(PHASES, 0)
    tenants: dict[str, dict[str, Any]] = {}
    shown: list[dict[str, Any]] = []
    for request in requests.values():
        is_running = request.state == RequestStatus.RUNNING
        phase = _find_phase(request, running, planner, is_queued=request.rid in queued)
        pages = int(running.table.arrays.num_pages[request.slot]) if is_running else 0
        phases[phase] += 1
        tenant = tenants.setdefault(request.tenant, {"tenant": request.tenant, "running": 0, "waiting": 0, "pages": 0})
        tenant["running" if is_running else "waiting"] += 1
        tenant["pages"] += pages
        if len(shown) < limit:
            shown.append({"phase": phase, "pages": pages, "age": now - request.arrival, **_describe(request, running)})
    return {"phases": phases, "tenants": _list_largest(tenants, limit), "requests": shown}


def join_outlines(outlines: Sequence[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    """The outlines of several schedulers as one's."""
    phases = {phase: sum(outline["phases"][phase] for outline in outlines) for phase in PHASES}
    tenants: dict[str, dict[str, Any]] = {}
    for outline in outlines:
        for each in outline["tenants"]:
            total = tenants.setdefault(each["tenant"], {"tenant": each["tenant"], "running": 0, "waiting": 0, "pages": 0})
            for name in ("running", "waiting", "pages"):
                total[name] += each[name]
    oldest = sorted((each for outline in outlines for each in outline["requests"]), key=lambda each: -each["age"])
    return {"phases": phases, "tenants": _list_largest(tenants, limit), "requests": oldest[:limit]}


def _list_largest(tenants: Mapping[str, dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    return sorted(tenants.values(), key=lambda tenant: (-tenant["pages"], tenant["tenant"]))[:limit]


def _find_phase(request: Request, running: RunningSet, planner: StepPlanner, *, is_queued: bool) -> str:
    if request.state == RequestStatus.RUNNING:
        return "prefill" if request.slot in running.extending else "decode"
    if not is_queued:
        return "grammar"
    if planner.tiers.is_loading(request):
        return "tier"
    if request.num_preemptions:
        return "preempted"
    return "media" if request.media and not planner.media.may_start(request) else "queued"


def _describe(request: Request, running: RunningSet) -> dict[str, Any]:
    """Sizes in tokens. `computed`: of the prompt, with those from the prefix cache."""
    arrays, length, is_running = running.table.arrays, request.prompt_len, request.state == RequestStatus.RUNNING
    tokens = int(arrays.num_committed_tokens[request.slot]) if is_running else request.num_tokens
    return {
        "rid": request.rid,
        "tenant": request.tenant,
        "prompt": length,
        "computed": min(length, int(arrays.num_computed_tokens[request.slot])) if is_running else 0,
        "cached": max(0, request.num_cached_tokens),
        "output": tokens - length,
        "preemptions": request.num_preemptions,
    }
