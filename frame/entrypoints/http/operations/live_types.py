"""The bodies of the page's live data and of the engine's load, for `/openapi.json`.

Used by the routes of operators and of the page. Must not depend on a route.
"""

from __future__ import annotations

from typing import NotRequired

from frame.entrypoints.http.response_types import array, declare

GroupLoad = declare(
    "GroupLoad",
    "group used_pages total_pages evictable_pages",
    'The pages of a further cache group: "window_" and its tokens, or "snapshot".',
)
EngineLoad = declare(
    "EngineLoad",
    "step running waiting used_pages total_pages evictable_pages preempted cached_tokens prompt_tokens generated_tokens jumped_tokens"
    " num_drafts drafted_tokens accepted_tokens accepted_at drafter_seconds",
    "Gauges, and counters since the start of the engine. `pins`: of sessions.",
    groups=array(GroupLoad),
    pins=NotRequired[int],
    pinned_pages=NotRequired[int],
)
LiveLoad = declare("LiveLoad", "device_memory", base=EngineLoad)
RequestOutline = declare(
    "RequestOutline",
    "rid tenant phase",
    "A request in the engine. `prompt`, `computed` and `cached` in tokens. `rid` and `tenant` are\nempty for the holder of a key.",
    **dict.fromkeys(("pages", "replica", "prompt", "computed", "cached", "output", "preemptions"), int),
    age=float,
)
TenantOutline = declare("TenantOutline", "tenant", "Requests and pages of a tenant.", running=int, waiting=int, pages=int)
ReplicaStatus = declare(
    "ReplicaStatus", doc="`state`: why it takes no requests; null while it does.", state=str | None, load=LiveLoad | None
)
ProcessStatus = declare("ProcessStatus", doc="A process; `memory` in bytes.", process=str, memory=int, device_memory=int, restarts=int)
AlertText = declare("AlertText", "rule level text")
LatencySummary = declare(
    "LatencySummary",
    doc="50th, 90th and 99th percentile of the last minute in seconds, null without values, and their\nnumber.",
    ttft=array(float | None), itl=array(float | None),
)  # fmt: skip
LiveStatus = declare(
    "LiveStatus",
    "time problem",
    "`time` in seconds since the epoch. `finished`: number of sequences by finish reason. `row`:\n"
    "the last one of `/page/history.json`, `sample` its number. `phases`: requests by phase.\n"
    "`expert_imbalance`: by layer, tokens of the busiest rank over the mean. All but the first two\n"
    "are null for the holder of one of several keys.",
    load=LiveLoad | None,
    **dict.fromkeys(("outstanding", "prompt_tokens", "cached_tokens", "generated_tokens", "rejected", "sample"), int | None),
    **dict.fromkeys(("finished", "phases"), dict[str, int] | None),
    row=array(float | None) | None,
    latency=LatencySummary | None,
    requests=array(RequestOutline) | None,
    tenants=array(TenantOutline) | None,
    replicas=array(ReplicaStatus) | None,
    processes=array(ProcessStatus) | None,
    alerts=array(AlertText) | None,
    expert_imbalance=list[float] | None,
    drafter=str | None,
)
History = declare(
    "History",
    doc="`rows`: one list of values for each sample, oldest first, by `columns`; null: not known. `time` is\n"
    "in seconds since the epoch, `sample` the number of the last row.",
    interval=float, columns=list[str], rows=array(array(float | None)), sample=int,
)  # fmt: skip
