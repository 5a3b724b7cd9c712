"""Response bodies of the routes for operators and of the status page. Must not depend on a
route."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict


class ControlResult(TypedDict):
    success: bool


class FlushResult(ControlResult):
    """`pages`: number of pages that became free."""

    pages: int


class AbortResult(ControlResult):
    """`aborted`: number of sequences that were ended."""

    aborted: int


class ProfileResult(ControlResult):
    """`path`: the folder of the traces."""

    path: str


class GroupLoad(TypedDict):
    """The pages of a further cache group: "window_" and its tokens, or "snapshot"."""

    group: str
    used_pages: int
    total_pages: int
    evictable_pages: int


class EngineLoad(TypedDict):
    """Gauges, and counters since the start of the engine."""

    step: int
    running: int
    waiting: int
    used_pages: int
    total_pages: int
    evictable_pages: int
    groups: list[GroupLoad]
    preempted: int
    cached_tokens: int
    prompt_tokens: int
    generated_tokens: int
    jumped_tokens: int
    num_drafts: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_at: list[int]
    drafter_seconds: float


class ServerInfo(EngineLoad):
    """`config`: the resolved configuration without keys. `phases`: seconds of the start.
    `replicas`: the same of each replica; with `parallel.dp` above 1, counts are their sums."""

    paused: bool
    outstanding: int
    config: dict[str, Any]
    phases: NotRequired[dict[str, float]]
    replicas: NotRequired[list[dict[str, Any]]]


class LiveLoad(EngineLoad):
    device_memory: int


class LiveStatus(TypedDict):
    """`time` in seconds since the epoch. `finished`: number of sequences by finish reason.
    All but the first two are null for the holder of one of several keys."""

    time: float
    problem: str | None
    outstanding: int | None
    load: LiveLoad | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int | None
    rejected: int | None
    finished: dict[str, int] | None


class CachedRunInfo(TypedDict):
    """A run of the prefix cache. `parent`: its place in the list, -1 for none; `age` in uses of the
    cache; `groups`: its pages of further cache groups."""

    parent: int
    start: int
    tokens: int
    locks: int
    hits: int
    age: int
    hidden: int
    namespace: int
    text: str
    groups: dict[str, int]


class CacheOutline(TypedDict):
    page_size: int
    runs: list[CachedRunInfo]


class ServerDescription(TypedDict, total=False):
    """What the server runs: start information, plugins, plugins that failed to load, settings."""

    info: dict[str, Any]
    plugins: list[dict[str, Any]]
    broken: list[dict[str, Any]]
    settings: list[dict[str, Any]]
