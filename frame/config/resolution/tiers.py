"""The part of `resolve` that chooses KV cache tiers. Pure; it must not import or name a plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from frame.config.hardware import Hardware
from frame.config.resolution.plugins import KEYS, Choices, choose_list, plugin_options
from frame.config.schema import HOST, MIN_LOAD_TOKENS, PORT, WRITE_POLICY, FrameConfig
from frame.config.selection import PlainRequirements, ResolveError, join_conflicts
from frame.core.errors import PluginError
from frame.core.interfaces.cache import PrefixCacheCapabilities
from frame.core.interfaces.kv_tier import KVTierCapabilities
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.plugin import PluginRecord

KIND = "kv_tier"
KEY = KEYS[KIND]
GIB = 1 << 30
_NO_TIERS, _NO_MODE = "cache.tiers: []", "disaggregation.mode: null"


def choose_tiers(
    chosen: Choices,
    records: Mapping[str, Sequence[PluginRecord]],
    config: FrameConfig,
    requirements: PlainRequirements,
    plan: ParallelPlan,
    hardware: Hardware,
) -> None:
    """Choose the tiers that the user names. Raises ResolveError if one is unknown, or where tiers
    cannot be used."""
    tiers = list_tiers(config, records)
    conflicts = [*_find_unused(config, tiers), *find_disaggregation_conflicts(config, records, plan)]
    if tiers:
        choose_list(chosen, records, KIND, tiers, requirements)
        conflicts += _find_obstacles(chosen, config, plan)
        conflicts += _find_excess(chosen, config, plan, hardware)
    if conflicts:
        raise join_conflicts(conflicts)


def _find_unused(config: FrameConfig, tiers: Sequence[str]) -> Iterator[ResolveError]:
    """Settings of tiers that are not used."""
    cache = config.cache
    for name in config.plugins.options:
        kind, _, tier = name.partition("/")
        if kind == KIND and tier not in tiers:
            named = ", ".join((*cache.tiers, tier))
            yield ResolveError(f"plugins.options has {name}, but {KEY} does not name {tier}.", change=f"cache.tiers: [{named}]")
    if not tiers:
        for key, value, default in (
            ("cache.write_policy", cache.write_policy, WRITE_POLICY),
            ("cache.min_load_tokens", cache.min_load_tokens, MIN_LOAD_TOKENS),
        ):
            if value != default:
                yield ResolveError(f"{key} is {value}, but {KEY} names no tier.", change=f"{key}: {default}")


def _find_obstacles(chosen: Choices, config: FrameConfig, plan: ParallelPlan) -> Iterator[ResolveError]:
    """What stands against tiers."""
    tiers = config.cache.tiers
    if (twice := next((name for name in tiers if tiers.count(name) > 1), None)) is not None:
        yield ResolveError(f"{KEY} has {twice} twice.", change=f"cache.tiers: [{', '.join(dict.fromkeys(tiers))}]")
    if plan.hosts > 1:
        sentence = f"{KEY} is set, but the engine's ranks are on {plan.hosts} hosts; tiers serve the ranks of one host."
        yield ResolveError(sentence, change=_NO_TIERS)
    for selection in chosen.selected.get("prefix_cache", ()):
        capabilities = selection.record.capabilities
        if isinstance(capabilities, PrefixCacheCapabilities) and not capabilities.reuses:
            name, key = selection.record.name, KEYS["prefix_cache"]
            yield ResolveError(f"{KEY} is set, but {key} is {name}, which keeps no prefixes.", change=_NO_TIERS)


def _find_excess(chosen: Choices, config: FrameConfig, plan: ParallelPlan, hardware: Hardware) -> Iterator[ResolveError]:
    """Tiers that take more memory than the host has. Each replica has its own, divided among its
    ranks."""
    replicas = plan.num_replicas
    sizes: dict[str, float] = {}  # GiB
    for selection in chosen.selected[KIND]:
        record, capabilities = selection.record, selection.record.capabilities
        try:
            options = plugin_options(record, config.plugins.options.get(f"{KIND}/{record.name}", {}))
        except PluginError:  # which is reported where the choice is recorded
            continue
        for option in capabilities.memory if isinstance(capabilities, KVTierCapabilities) else ():
            sizes[f"plugins.options.{KIND}/{record.name}.{option}"] = replicas * float(getattr(options, option, None) or 0)
    total, available = sum(sizes.values()), hardware.memory_bytes / GIB
    if total > available:
        key = max(sizes, key=lambda each: sizes[each])
        remaining = (available - total + sizes[key]) / replicas
        of = f", for {plan.num_replicas} replicas" if plan.num_replicas > 1 else ""
        sentence = f"{KEY} takes {total:,.1f} GiB of host memory{of}, and this machine has {available:,.1f} GiB."
        yield ResolveError(sentence, change=f"{key}: {remaining / 2:.1f}" if remaining > 0.2 else _NO_TIERS)


# prefill and decode servers -----------------------------------------------------------------------


def list_tiers(config: FrameConfig, records: Mapping[str, Sequence[PluginRecord]]) -> tuple[str, ...]:
    """The tiers that are used, nearest first: those that the user names, and of a prefill or decode
    server the one that has its transfers."""
    named = config.cache.tiers
    transferring = _find_transferring(records)
    if config.disaggregation.mode is None or any(name in transferring for name in named):
        return named
    return (*named, *transferring[:1])


def find_disaggregation_conflicts(
    config: FrameConfig, records: Mapping[str, Sequence[PluginRecord]], plan: ParallelPlan
) -> Iterator[ResolveError]:
    """What stands against the settings of a prefill or decode server."""
    section, mode = config.disaggregation, config.disaggregation.mode
    if mode is None:
        for key, value, default in (("disaggregation.host", section.host, HOST), ("disaggregation.port", section.port, PORT)):
            if value != default:
                yield ResolveError(f"{key} is {value}, but disaggregation.mode is not set.", change=f"{key}: {default}")
        for name in config.cache.tiers:
            if name in _find_transferring(records):
                tiers = ", ".join(each for each in config.cache.tiers if each != name)
                yield ResolveError(
                    f"cache.tiers names {name}, which serves prefill and decode servers, but disaggregation.mode is not set.",
                    change=f"cache.tiers: [{tiers}]",
                )
        return
    here = f"disaggregation.mode is {mode}, but"
    if config.parallel.dp > 1:
        yield ResolveError(
            f"{here} parallel.dp is {config.parallel.dp}; each of these servers has one engine, so start several.", change="parallel.dp: 1"
        )
    elif plan.num_ranks > 1:
        yield ResolveError(f"{here} the engine has {plan.num_ranks} ranks ({plan}); such servers have one rank.", change=_NO_MODE)
    if mode == "prefill" and config.cache.write_policy != "write_through":
        yield ResolveError(
            f"{here} cache.write_policy is {config.cache.write_policy}, which stores no block at its first use.",
            change="cache.write_policy: write_through",
        )


def _find_transferring(records: Mapping[str, Sequence[PluginRecord]]) -> list[str]:
    capable = ((record.name, record.capabilities) for record in records.get(KIND, ()))
    return [name for name, can in capable if isinstance(can, KVTierCapabilities) and can.transfers]
