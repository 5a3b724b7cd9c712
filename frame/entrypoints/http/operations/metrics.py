"""`ServerMetrics`: the counters and gauges of one server, for the stat loggers (`Metric`), and the
throughput of the last seconds. Must not know a format."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from frame.config.resolved import Resolved
from frame.entrypoints.engine_client.adapter_registry import AdapterRegistry
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.entrypoints.http.operations.pressure import Pressure
from frame.entrypoints.logs import configured_writer
from frame.entrypoints.media.media_service import MediaService
from frame.entrypoints.processes.resource_monitor import ResourceMonitor
from frame.entrypoints.version import package_version
from frame.interfaces.stats import Metric

RATE_WINDOW = 1.0  # seconds; the shortest time over which the throughput is measured

# name, field of `Heartbeat`, meaning
GAUGES = (
    ("requests_running", "running", "Requests on the device."),
    ("requests_waiting", "waiting", "Requests that wait for a place on the device."),
    ("kv_pages_used", "used_pages", "Pages of the KV cache that running requests hold."),
    ("kv_pages_evictable", "evictable_pages", "Pages of cached prefixes that no running request uses."),
    ("kv_pages", "total_pages", "Pages of the KV cache."),
)
# name, field of `ClientStats`, meaning
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that were taken."),
    ("generation_tokens", "generated_tokens", "Tokens that were sent."),
    ("cached_tokens", "cached_tokens", "Prompt tokens that came from the prefix cache."),
    ("requests_rejected", "rejected", "Requests that were refused because too many waited."),
    ("requests_recovered", "recovered", "Times that a request went on in a restarted engine."),
)
# name, field of `Usage`, meaning
HELD = (
    ("process_memory_bytes", "memory", "Memory that a process holds, without mapped files."),
    ("process_threads", "threads", "Threads of a process."),
    ("process_open_files", "files", "Files and sockets that a process has open."),
    ("process_device_memory_bytes", "device_memory", "Device memory that a process holds."),
)
GROUP_GAUGES = {
    "used_pages": "Pages or states of a cache group that running requests hold.",
    "evictable_pages": "Pages or states of a cache group that the prefix cache could give up.",
    "total_pages": "Pages or states of a cache group.",
}
TIER_COUNTERS = {
    "loaded_tokens": "Prompt tokens whose keys and values were read from a KV cache tier.",
    "stored_tokens": "Tokens whose keys and values were stored in a KV cache tier.",
}
# Of prefill and decode servers: (metric, what a tier calls it, text, whether it is a counter).
TRANSFERS = (
    ("kv_transfers", "transfers", "Prompts kept for decode servers; of a decode server, reads of kept blocks.", True),
    ("kv_transfer_bytes", "transfer_bytes", "Bytes that this decode server has read from prefill servers.", True),
    ("kv_transfer_failures", "transfer_failures", "Reads that yielded too few blocks; the requests computed.", True),
    ("kv_leases", "leases", "Prompts that this prefill server keeps for decode servers.", False),
    ("kv_leased_blocks", "leased_blocks", "Their blocks.", False),
    ("kv_oldest_lease_seconds", "oldest_lease_seconds", "Age of the oldest of these prompts.", False),
    ("kv_expired_leases", "expired_leases", "Kept prompts that no decode server has read.", True),
    ("kv_refused_leases", "refused_leases", "Prompts that were kept no longer, so that others found a place.", True),
)
PHASES = ("store", "acquire", "read", "check", "insert")  # of a transfer; the first one on the prefill server
REASONS = ("stop", "length", "abort", "error")


class MetricSources(Protocol):
    """What metrics are read from, which `Services` has."""

    resolved: Resolved
    client: EngineClient | ReplicaClient
    info: dict[str, Any]
    watch: ResourceMonitor | None
    adapters: AdapterRegistry | None
    media: MediaService | None


class ServerMetrics:
    """What one server counts. `read` is called when a stat logger renders its metrics."""

    def __init__(self, services: MetricSources) -> None:
        self._services = services
        self._rate = 0.0  # tokens per second between the last two measurements
        self._measured = (time.monotonic(), 0)  # the last one: when, and the tokens until then
        self.pressure = Pressure(services.client, services.resolved.page_size)
        self._responses: dict[tuple[str, int], int] = {}  # bounded by routes times statuses

    def update_rate(self) -> None:
        """Measure the throughput, unless it was measured less than `RATE_WINDOW` seconds ago."""
        now, count = time.monotonic(), self._services.client.stats.generated_tokens
        since, before = self._measured
        if now - since >= RATE_WINDOW:
            self._rate, self._measured = (count - before) / (now - since), (now, count)
            self.pressure.measure()

    def count_response(self, route: str, status: int) -> None:
        """A response went out; `route` is a path of the table of routes."""
        key = (route, status)
        self._responses[key] = self._responses.get(key, 0) + 1

    def count_failures(self) -> int:
        """Responses with a status of 500 or more so far."""
        return sum(count for (_, status), count in self._responses.items() if status >= 500)

    def read(self) -> Iterator[Metric]:
        """All counters and gauges. A counter keeps its value when it is read."""
        self.update_rate()
        client = self._services.client
        stats = client.stats
        for name, source, text in COUNTERS:
            yield _counter(name, text, getattr(stats, source))
        finished = dict.fromkeys(REASONS, 0) | stats.finished
        yield _labelled("requests_finished", "Requests that ended, by reason.", "reason", finished, is_counter=True)
        restarts = {"engine": 0} | stats.restarts
        yield _labelled("engine_restarts", "Restarts of processes.", "process", restarts, is_counter=True)
        yield from self._read_usage()
        yield _counter(
            "requests_aborted", "Requests that ended because their client left or somebody stopped them.", stats.finished.get("abort", 0)
        )
        yield _gauge("requests_outstanding", "Requests that this server has taken and not finished.", client.num_outstanding)
        if isinstance(client, ReplicaClient):
            counts = {str(number): each.num_sequences for number, each in enumerate(client.clients)}
            yield _labelled("replica_requests_outstanding", "Requests of a replica that are not finished.", "replica", counts)
        yield _gauge("generation_tokens_per_second", "Tokens sent per second, lately.", self._rate)
        yield _gauge("queued_work_seconds", "Seconds of queued prompts at the highest token rate.", self.pressure.count_queued_seconds())
        yield _gauge("token_rate_ceiling", "Highest measured tokens per second, computed and generated ones.", self.pressure.ceiling)
        yield _gauge("token_rate_ratio", "Tokens per second, lately, over the ceiling.", self.pressure.rate_ratio)
        yield _gauge("kv_pressure_ratio", "Pages that running and waiting requests need, over all.", self.pressure.find_kv_pressure())
        writer = configured_writer()
        yield _counter(
            "log_lines_dropped", "Log lines that were dropped because standard error was not read or not writable.",
            0 if writer is None else writer.num_dropped,
        )  # fmt: skip
        responses = [((route, str(status)), count) for (route, status), count in self._responses.items()]
        yield Metric("http_responses", "Responses, by route and status.", responses, ("route", "status"), is_counter=True)
        yield Metric("weights_info", "1; the version of the weights.", [((client.commands.weight_version,), 1)], ("weight_version",))
        yield from self._read_start()
        yield from self._read_adapters()
        yield from self._read_media()
        yield from self._read_tiers()
        yield from self._read_load()

    def _read_usage(self) -> Iterator[Metric]:
        """What each process holds, as of the last look at it."""
        watch = self._services.watch
        if watch is None:
            return
        for name, source, text in HELD:
            held = {process: getattr(usage, source) for process, usage in watch.usage.items()}
            yield _labelled(name, text, "process", {process: amount for process, amount in held.items() if amount})  # one has device memory

    def _read_start(self) -> Iterator[Metric]:
        resolved = self._services.resolved
        values = (package_version(), resolved.model.architecture, resolved.device, resolved.dtype)
        yield Metric("server_info", "1; what runs here.", [(values, 1)], ("version", "architecture", "device", "dtype"))
        phases = self._services.info.get("phases") or {}
        yield _labelled("start_seconds", "Seconds of the engine's start, by phase.", "phase", phases)
        kernels = self._services.info.get("kernels")
        if kernels:
            by_source = {"compiled": kernels["compiled"], "cache": kernels["loaded"]}
            yield _labelled("start_kernels", "Kernels that the engine's start compiled, or found compiled.", "source", by_source)

    def _read_adapters(self) -> Iterator[Metric]:
        registry = self._services.adapters
        if registry is None:
            return
        yield _gauge("adapter_versions", "Versions of adapters that names or requests have.", len(registry.list_versions()))
        yield _gauge("adapters_loaded", "Versions of adapters in host memory.", registry.placement.num_loaded)
        yield _gauge("adapters_loaded_limit", "Most versions of adapters in host memory.", registry.placement.max_loaded)
        yield _gauge("adapter_requests_waiting", "Requests whose adapter is not in host memory yet.", registry.num_waiting)
        yield _counter("adapter_loads", "Loads of adapters into the host memory of engines.", registry.placement.num_loads)
        if (load := self._services.client.load) is not None:
            yield _gauge("adapters_on_device", "Adapters on the device.", load.adapters_on_device)
            yield _gauge("adapters_running", "Adapters on the device that running requests use.", load.adapters_running)
            yield _counter("adapter_copies", "Copies of adapters from host memory to the device.", load.adapter_copies)
        yield _labelled("adapter_requests", "Requests of an adapter that are not finished.", "adapter", registry.counts.running)
        running = ",".join(sorted(name for name, count in registry.counts.running.items() if count))
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        values = (str(self._services.resolved.user.adapters.max_active), running, "")
        yield Metric("lora_requests_info", "1; adapters with requests.", [(values, 1)], labels)
        tokens = registry.counts.tokens
        yield _labelled("adapter_generation_tokens", "Tokens of finished requests, by adapter.", "adapter", tokens, is_counter=True)

    def _read_media(self) -> Iterator[Metric]:
        if (media := self._services.media) is None:
            return
        counts = media.counters
        yield _labelled("media_items", "Files of requests that were decoded.", "modality", counts.items, is_counter=True)
        yield _labelled("media_refusals", "Parts with media that were refused.", "modality", counts.refusals, is_counter=True)
        yield _counter("media_shared_items", "Files that another request of the same key held already.", counts.shared)
        yield _counter("media_bytes", "Bytes of the files that were decoded.", counts.bytes)
        yield _counter("media_fetch_seconds", "Seconds in which files were fetched.", counts.fetch_seconds)
        yield _counter("media_decode_seconds", "Processor time of the media processes.", counts.decode_seconds)
        yield _counter("media_process_deaths", "Media processes that ended and were replaced.", media.pool.num_deaths)
        if (load := self._services.client.load) is not None:
            yield _gauge("media_rows", "Rows of the device's table of encoded media.", load.media_rows)
            yield _gauge("media_used_rows", "Those that hold an item, with or without requests.", load.media_used_rows)
            yield _counter("media_encoded", "Items that were encoded.", load.media_encoded)
            yield _counter("media_reused", "Items that were in the table when a request read them.", load.media_reused)
            yield _counter("media_divided", "Items that several steps encoded, some layers each.", load.media_divided)

    def _read_tiers(self) -> Iterator[Metric]:
        load = self._services.client.load
        if load is None or not load.tiers:
            return
        for source, text in TIER_COUNTERS.items():
            yield _labelled(f"kv_tier_{source}", text, "tier", {tier["tier"]: tier[source] for tier in load.tiers}, is_counter=True)
        yield _gauge("kv_tier_requests_waiting", "Requests that wait for blocks of a KV cache tier.", load.tier_waiting)
        failed = "Loads from KV cache tiers that yielded too few blocks (missing) or had not ended in time (late); the requests computed."
        reasons = {"missing": load.tier_failed_loads, "late": load.tier_late_loads}
        yield _labelled("kv_tier_failed_loads", failed, "reason", reasons, is_counter=True)
        for tier in (tier for tier in load.tiers if "leases" in tier):
            phases = {name: tier.get(f"{name}_seconds", 0.0) for name in PHASES}
            yield _labelled("kv_transfer_seconds", "Seconds of transfers, by phase.", "phase", phases, is_counter=True)
            for name, key, text, is_counter in TRANSFERS:
                yield _counter(name, text, tier[key]) if is_counter else _gauge(name, text, tier[key])
        yield _counter("kv_tier_dropped_blocks", "Blocks that no KV cache tier stored because there was no room.", load.tier_dropped_blocks)

    def _read_load(self) -> Iterator[Metric]:
        """What the engine's heartbeat tells."""
        load, page_size = self._services.client.load, self._services.resolved.page_size
        if load is None:
            return
        for name, source, text in GAUGES:
            yield _gauge(name, text, getattr(load, source))
        for source, text in GROUP_GAUGES.items():
            yield _labelled(f"kv_group_{source}", text, "group", {group["group"]: group[source] for group in load.groups})
        yield _gauge("kv_tokens_used", "Tokens whose pages of the KV cache running requests hold.", load.used_pages * page_size)
        yield _gauge("kv_tokens", "Tokens that the KV cache has room for.", load.total_pages * page_size)
        sizes = (str(page_size), str(load.total_pages))
        yield Metric("kv_cache_info", "1; the KV cache's pages and their size.", [(sizes, 1)], ("page_size", "pages"))
        yield _gauge("kv_sessions", "Sessions whose prefix is kept after their requests have ended.", load.pins)
        yield _gauge("kv_session_pages", "Pages of these prefixes; of several sessions each counts its own.", load.pinned_pages)
        used = load.used_pages / max(1, load.total_pages)
        yield _gauge("kv_usage_ratio", "Share of the KV cache that running requests hold.", used)
        hits = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
        yield _gauge("prefix_cache_hit_ratio", "Share of all prompt tokens that came from the prefix cache.", hits)
        yield _counter("preemptions", "Times that a request left the device for lack of memory.", load.preempted)
        yield _counter("jumped_tokens", "Output tokens that a grammar forced and no step had to draw.", load.jumped_tokens)
        yield _counter("spec_decode_num_drafts", "Drafts that the model verified.", load.num_drafts)
        yield _counter("spec_decode_num_draft_tokens", "Drafted tokens that the model verified.", load.drafted_tokens)
        yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", load.accepted_tokens)
        by_place = {str(place): count for place, count in enumerate(load.accepted_at)}
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Drafts whose token at this place was accepted."
        yield _labelled(name, text, "position", by_place, is_counter=True)
        yield _counter("spec_decode_drafter_seconds", "Seconds in the drafter.", load.drafter_seconds)
        yield _counter("engine_steps", "Steps of the engine.", load.step)


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, text, [((), value)])


def _counter(name: str, text: str, value: float) -> Metric:
    return Metric(name, text, [((), value)], is_counter=True)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float], *, is_counter: bool = False) -> Metric:
    return Metric(name, text, [((key,), value) for key, value in values.items()], (label,), is_counter)
