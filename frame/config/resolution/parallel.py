"""The part of `resolve` that checks the parallel plan against the model, the devices and their
memory, before a process starts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from frame.config.hardware import Accelerator, Hardware
from frame.config.resolution.machine import GIB, count_weights, indivisible
from frame.config.resolution.platform import get_capabilities
from frame.config.resolution.plugins import KEYS, Choices
from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError, by_rank, nearest_change, select
from frame.core.interfaces.collective import CollectiveRequirements
from frame.core.interfaces.model import ModelConfig
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.plugin import PluginRecord
from frame.interfaces.launcher import LauncherRequirements

_ADDRESS = re.compile(r"\S+:[0-9]{1,5}")


def make_plan(config: FrameConfig) -> ParallelPlan:
    """The plan that the user set."""
    parallel = config.parallel
    return ParallelPlan(
        tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, dp=parallel.dp, dp_attention=parallel.dp_attention, hosts=parallel.nnodes,
        redundant_experts=parallel.redundant_experts, balances_experts=parallel.eplb,
    )  # fmt: skip


def require_launcher(config: FrameConfig) -> LauncherRequirements:
    """What the plan requires of a launcher."""
    plan = make_plan(config)
    return LauncherRequirements(plan.num_ranks, plan.hosts, config.parallel.dist_init_addr is not None)


def choose_collective(
    chosen: Choices,
    records: Mapping[str, Sequence[PluginRecord]],
    config: FrameConfig,
    requirements: CollectiveRequirements,
    devices: Sequence[Accelerator],
) -> None:
    """Choose the collective of all ranks, on this host's `devices`; stages alone need no sums over
    links. Raises ResolveError if none fits."""
    kind, key, named = "collective", KEYS["collective"], config.parallel.collective
    tp, is_linked = config.parallel.tp, all(device.is_linked for device in devices)

    def linked_first(record: PluginRecord) -> tuple[bool, int, str]:
        return (not (is_linked and 1 < tp <= getattr(record.capabilities, "linked_ranks", 0)), *by_rank(record))

    selection = select(key, records.get(kind, ()), requirements, named, linked_first, chosen.impossible, kind)
    if selection is None:
        rejected = chosen.reject(key, kind, records, requirements)
        subject = f"No collective connects {requirements.size} rank(s) on {requirements.device}."
        raise ResolveError(subject, rejected, nearest_change(rejected))
    if named is None and not linked_first(selection.record)[0]:
        selection = replace(selection, reason="the one for devices that write to each other's memory over links")
    chosen.note(kind, key, selection, is_open=named is None)


def find_host_conflicts(config: FrameConfig) -> Iterator[ResolveError]:
    """What stands against the division among hosts."""
    parallel, plan = config.parallel, make_plan(config)
    if parallel.node_rank >= plan.hosts:
        remedy = "parallel.node_rank: 0" if plan.hosts == 1 else None
        yield ResolveError(f"parallel.node_rank is {parallel.node_rank}, but parallel.nnodes is {plan.hosts}.", change=remedy)
    if plan.hosts == 1 and parallel.dist_init_addr is not None:
        sentence = f"parallel.dist_init_addr is {parallel.dist_init_addr!r}, but parallel.nnodes is 1; set it to the number of hosts."
        yield ResolveError(sentence, change="parallel.dist_init_addr: null")
    if plan.hosts > 1 and parallel.dist_init_addr is not None and not _ADDRESS.fullmatch(parallel.dist_init_addr):
        yield ResolveError(f"parallel.dist_init_addr is {parallel.dist_init_addr!r}; write the first host's address as HOST:PORT.")
    if plan.hosts > 1 and plan.dp > 1:
        sentence = f"parallel.dp is {plan.dp}, and replicas and attention groups are on one host; start a server on each host."
        yield ResolveError(sentence, change="parallel.dp: 1")
    if plan.num_ranks % plan.hosts:
        sentence = f"parallel.nnodes is {plan.hosts}, which does not divide {plan.num_ranks} rank(s)."
        yield ResolveError(sentence, change="parallel.nnodes: 1")


def check_transfers(config: FrameConfig) -> None:
    """Raise ResolveError for a trainer's updates of replicas, of which each would change alone."""
    plan = make_plan(config)
    if config.execution.weight_transfer and plan.num_replicas > 1:
        sentence = f"execution.weight_transfer is set, but parallel.dp is {plan.dp}: a trainer's tensors go to servers of one replica."
        raise ResolveError(sentence, change="parallel.dp: 1")


def find_conflicts(
    plan: ParallelPlan, model_config: ModelConfig, platform: PluginRecord, hardware: Hardware, chosen_format: str | None
) -> Iterator[ResolveError]:
    """What stands against the plan: each sentence has the numbers. `chosen_format`: the weight
    format that the user named."""
    devices = hardware.of(platform.name)
    is_host, available = get_capabilities(platform).is_host, len(devices) * plan.hosts
    if not is_host and plan.num_devices > available:
        size, change = f"parallel.tp is {plan.tp}", f"parallel.tp: {available}"
        if plan.num_replicas > 1:
            size = f"parallel.tp {plan.tp} x parallel.pp {plan.pp} x parallel.dp {plan.dp} = {plan.num_devices} ranks"
            change = f"parallel.dp: {max(1, available // plan.num_ranks)}"
        elif plan.pp > 1:
            size, change = f"parallel.tp {plan.tp} x parallel.pp {plan.pp} = {plan.num_ranks} ranks", f"parallel.pp: {available // plan.tp}"
        have = "this machine has" if plan.hosts == 1 else f"{plan.hosts} machines like this have"
        yield ResolveError(f"{size}, but {have} {available} {platform.name} device(s).", change=change)
    problems = indivisible(model_config, plan)
    if problems:
        fitting = max((size for size in range(1, plan.tp) if not indivisible(model_config, ParallelPlan(tp=size))), default=1)
        yield ResolveError(f"parallel.tp is {plan.tp}, which does not divide {', '.join(problems)}.", change=f"parallel.tp: {fitting}")
    if plan.pp > model_config.num_layers:
        yield ResolveError(
            f"parallel.pp is {plan.pp}, more stages than the model has layers ({model_config.num_layers}).",
            change=f"parallel.pp: {model_config.num_layers}",
        )
    if plan.dp_attention:
        yield from _find_group_conflicts(plan, model_config)
    if plan.ep > 1:
        yield from _find_expert_conflicts(plan, model_config)
    else:
        problem = "but parallel.ep is 1: no rank holds whole experts of its own"
        if plan.balances_experts:
            yield ResolveError(f"parallel.eplb is true, {problem}.", change="parallel.eplb: false")
        if plan.redundant_experts:
            sentence = f"parallel.redundant_experts is {plan.redundant_experts}, {problem}."
            yield ResolveError(sentence, change="parallel.redundant_experts: 0")
    if not is_host and devices:
        memory, weights = min(device.memory_bytes for device in devices), count_weights(model_config, chosen_format)
        each = weights // plan.num_ranks
        if each > memory:
            sizes = range(plan.tp + 1, available // (plan.pp * plan.num_replicas) + 1)
            holding = (size for size in sizes if weights // (size * plan.pp) <= memory)
            tp = next((size for size in holding if not indivisible(model_config, replace(plan, tp=size))), None)
            yield ResolveError(
                f"the weights do not fit: at least {weights / GIB:.0f} GiB / {plan.num_ranks} rank(s) = {each / GIB:.0f} GiB a rank,"
                f" and a {platform.name} device has {memory / GIB:.0f} GiB.",
                change=f"parallel.tp: {tp}" if tp is not None else None,
            )


def _find_expert_conflicts(plan: ParallelPlan, model_config: ModelConfig) -> Iterator[ResolveError]:
    experts, redundant = model_config.num_experts, plan.redundant_experts
    total = experts + redundant
    if not experts:
        yield ResolveError(f"parallel.ep is {plan.ep}, but {model_config.architecture} has no experts.", change="parallel.ep: 1")
    elif plan.ep != plan.tp:
        yield ResolveError(
            f"parallel.ep is {plan.ep}, and parallel.tp is {plan.tp}: experts are divided among all tensor-parallel ranks or none.",
            change=f"parallel.ep: {plan.tp if total % plan.tp == 0 else 1}",
        )
    elif redundant > experts:
        sentence = f"parallel.redundant_experts is {redundant}, more than the model's {experts} experts."
        yield ResolveError(sentence, change="parallel.redundant_experts: 0")
    elif total % plan.ep:
        places = f"{experts} experts" if not redundant else f"{experts} experts and {redundant} redundant ones"
        yield ResolveError(
            f"parallel.ep is {plan.ep}, which does not divide {places}: {total} = {plan.ep} x {total // plan.ep} + {total % plan.ep}.",
            change=f"parallel.redundant_experts: {-experts % plan.ep}" if redundant else "parallel.ep: 1",
        )


def _find_group_conflicts(plan: ParallelPlan, model_config: ModelConfig) -> Iterator[ResolveError]:
    """What stands against attention groups."""
    asked = "parallel.dp_attention is true, but"
    if plan.dp < 2 or plan.tp % plan.dp:
        fitting = next(size for size in range(max(2, plan.dp), 65) if size >= plan.tp or plan.tp % size == 0)
        sentence = f"{asked} parallel.dp is {plan.dp}, which does not divide parallel.tp ({plan.tp}) into two groups or more."
        yield ResolveError(sentence, change=f"parallel.dp: {fitting}" if plan.tp > 1 else "parallel.dp_attention: false")
    if not model_config.num_experts:
        sentence = f"{asked} {model_config.architecture} has no experts that the groups could share; parallel.dp alone makes replicas."
        yield ResolveError(sentence, change="parallel.dp_attention: false")
    elif plan.ep != plan.tp:
        sentence = f"{asked} parallel.ep is {plan.ep}: the groups share whole experts, divided among all {plan.tp} ranks."
        yield ResolveError(sentence, change=f"parallel.ep: {plan.tp}")
    if plan.pp > 1:
        yield ResolveError(f"{asked} parallel.pp is {plan.pp}: the groups of a pipeline would not stay in step.", change="parallel.pp: 1")
