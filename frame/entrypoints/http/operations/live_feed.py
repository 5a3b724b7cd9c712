"""`LiveFeed`: the page's live data as JSON, made at most every two seconds however many pages ask.

Used by the routes of the page. The engine is asked for its requests only while a page asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from frame.config.resolved import Resolved
from frame.core.scheduling.request_outline import join_outlines
from frame.entrypoints.engine_client.adapter_registry import AdapterRegistry
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.engine_client.replicas import ReplicaClient, list_clients
from frame.entrypoints.http.operations.alerts import MINUTE, find_alerts
from frame.entrypoints.http.operations.cache_feed import CacheFeed
from frame.entrypoints.http.operations.live_history import COLUMNS, INTERVAL, LiveHistory
from frame.entrypoints.http.operations.live_types import LiveLoad, LiveStatus
from frame.entrypoints.processes.resource_monitor import ResourceMonitor
from frame.text.tokenizer import Tokenizer

SHARED_SECONDS = 2.0  # for which all pages get the same data
OUTLINE_SECONDS = 2.0  # that the engine gets to describe its requests; a step may take as long
MAX_REQUESTS = 100  # that are described one by one


class LiveSources(Protocol):
    """What the data is read from, which `Services` has."""

    resolved: Resolved
    client: EngineClient | ReplicaClient
    tokenizer: Tokenizer | None
    watch: ResourceMonitor | None
    adapters: AdapterRegistry | None


class LiveFeed:
    """One for each server. All methods run in the event loop."""

    def __init__(self, sources: LiveSources, history: LiveHistory) -> None:
        self.history = history
        self.cache = CacheFeed(sources)
        self.empty_history = _encode_history(np.empty((0, len(COLUMNS))), 0)
        self._sources = sources
        self._lock = asyncio.Lock()
        self._made_at = float("-inf")  # `time.monotonic`
        self._live = (b"", b"")  # with names of requests and tenants, and without
        self._history = (-1, b"")  # number of samples, and their JSON

    async def read_live(self, *, has_names: bool) -> bytes:
        """`LiveStatus` as JSON."""
        if time.monotonic() - self._made_at >= SHARED_SECONDS:
            async with self._lock:  # pages that come meanwhile wait for this one's data
                if time.monotonic() - self._made_at >= SHARED_SECONDS:
                    self._live = await self._make_live()
                    self._made_at = time.monotonic()
        return self._live[0 if has_names else 1]

    def hide_live(self) -> bytes:
        """`LiveStatus` for the holder of one of several keys."""
        return _encode({**dict.fromkeys(LiveStatus.__annotations__), "time": time.time(), "problem": self._sources.client.dead_reason})

    def read_history(self) -> bytes:
        """`History` as JSON."""
        count = self.history.num_samples
        if self._history[0] != count:
            self._history = count, _encode_history(self.history.list_rows(), count)
        return self._history[1]

    async def _make_live(self) -> tuple[bytes, bytes]:
        client, stats = self._sources.client, self._sources.client.stats
        outline = await self._outline()
        drafters = self._sources.resolved.plugins.get("drafter", ())
        names = ("prompt_tokens", "cached_tokens", "generated_tokens", "rejected", "finished")
        data = {
            "time": time.time(),
            "problem": client.dead_reason,
            "outstanding": client.num_outstanding,
            "load": _describe_load(client),
            **{name: getattr(stats, name) for name in names},
            "sample": self.history.num_samples,
            "row": next(iter(_round_rows(self.history.list_rows(1))), None),
            "latency": self.history.summarize_latencies(),
            **outline,
            "replicas": [{"state": each.dead_reason or each.unavailable_reason, "load": _describe_load(each)} for each in self._clients],
            "processes": self._list_processes(),
            "alerts": [alert._asdict() for alert in find_alerts(self.history.list_rows(10 * MINUTE))],
            "expert_imbalance": max((each.load.expert_imbalance for each in self._clients if each.load), key=sum, default=[]),
            "drafter": ", ".join(choice.name for choice in drafters),
        }
        with_names = _encode(data)
        for each in (*outline["requests"], *outline["tenants"]):
            each.update({name: "" for name in ("rid", "tenant") if name in each})
        return with_names, _encode(data)

    @property
    def _clients(self) -> Sequence[EngineClient]:
        return list_clients(self._sources.client)

    async def _outline(self) -> dict[str, Any]:
        """What the requests of all replicas do; those of a replica that does not respond in time
        are left out."""

        async def ask(number: int, client: EngineClient) -> dict[str, Any] | None:
            try:
                async with asyncio.timeout(OUTLINE_SECONDS):
                    reply = await client.send_command("outline_requests", limit=MAX_REQUESTS)
            except (EngineDeadError, TimeoutError):
                return None
            for request in reply.data["requests"]:
                request["replica"] = number
            return reply.data

        outlines = await asyncio.gather(*(ask(number, client) for number, client in enumerate(self._clients)))
        joined = join_outlines([outline for outline in outlines if outline is not None], MAX_REQUESTS)
        adapters = self._sources.adapters
        waiting = {} if adapters is None else {"adapter": adapters.num_waiting}
        return {**joined, "phases": {**waiting, **joined["phases"]}}

    def _list_processes(self) -> list[dict[str, Any]]:
        usage = {} if self._sources.watch is None else self._sources.watch.usage
        restarts = self._sources.client.stats.restarts
        return [
            {
                "process": name,
                "memory": usage[name].memory if name in usage else 0,
                "device_memory": usage[name].device_memory if name in usage else 0,
                "restarts": restarts.get(name, 0),
            }
            for name in dict.fromkeys((*usage, *restarts))
        ]


def _describe_load(client: EngineClient | ReplicaClient) -> dict[str, Any] | None:
    load = client.load
    return None if load is None else {name: getattr(load, name) for name in LiveLoad.__annotations__}


def _encode(data: Any) -> bytes:
    return msgspec.json.encode(data)  # a value that is not finite becomes null


def _encode_history(rows: np.ndarray, count: int) -> bytes:
    """`count`: samples since the start."""
    return _encode({"interval": INTERVAL, "columns": COLUMNS, "rows": _round_rows(rows), "sample": count})


def _round_rows(rows: np.ndarray) -> list[list[float]]:
    """Rows with the time since the epoch and four digits of each value."""
    times = rows[:, :1] + (time.time() - time.monotonic())
    pairs = zip(times.tolist(), rows[:, 1:].tolist(), strict=True)
    return [[round(when, 1), *(float(f"{value:.4g}") for value in values)] for (when,), values in pairs]
