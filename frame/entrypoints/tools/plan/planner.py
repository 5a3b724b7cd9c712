"""Plans the ranks of a configuration: memory, lower bounds of each phase, and the fewest devices
that meet a target.

The model is built on the meta device as a start builds it, so weights and cache are counted, not
estimated. Used by `frame plan`. Opens no device and reads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.checkpoint.model_config import find_model
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.core.interfaces.kv_tier import BLOCK_ALIGNMENT, KVTierCapabilities
from frame.core.interfaces.platform import DeviceMemory, HostPlatform, PlatformContext
from frame.entrypoints.configuration.prepare import Prepared, prepare
from frame.entrypoints.processes.memory_plan import MemoryPlan, count_tier_bytes
from frame.entrypoints.processes.planned_rank import PlannedRank
from frame.entrypoints.tools.bench.floors import ModelCost
from frame.entrypoints.tools.plan.machines import Card, Machine, recognise
from frame.kv_tiers.build import divide_options
from frame.loading.capacity import GIB

if TYPE_CHECKING:
    from frame.config.resolved import Resolved

PUBLISHED = Path(__file__).with_name("published")  # folders with the config.json of known checkpoints
CONTEXT_BYTES = 640 << 20  # of a process on a CUDA device, before its first tensor
SUM_SECONDS = 5e-6  # of the smallest all-reduce
DECODE_ROWS = (1, 8, 64, 256)
DECODE_CONTEXT = 1024  # tokens of a sequence in the table of phases
SUMS_A_LAYER = 2


@dataclass(frozen=True, slots=True)
class Phase:
    """A lower bound. `seconds`: of one step. `rate`: tokens/s of all requests. `bound`: what takes
    the most time."""

    name: str
    seconds: float
    rate: float
    bound: str


@dataclass(frozen=True, slots=True)
class Target:
    """`requests` at once, of `context` tokens each, with `rate` output tokens/s each. `share`: of
    the lower bound's speed that is counted on."""

    requests: int = 1
    context: int = DECODE_CONTEXT
    rate: float = 0.0
    share: float = 0.6


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A KV cache tier of each replica or attention group. `block_bytes`: of a block, on all ranks.
    `blocks`: that fit; None: its options do not say. `host_bytes`, `device_bytes`: of host memory
    and of the devices' memory, of all replicas."""

    name: str
    block_bytes: int
    blocks: int | None
    host_bytes: int
    device_bytes: int = 0


@dataclass(frozen=True)
class DeploymentPlan:
    """A resolved configuration on a machine."""

    resolved: Resolved
    stages: tuple[MemoryPlan, ...]  # of one rank of each stage
    card: Card | None
    source: str  # the folder that config.json was read from
    tiers: tuple[PlannedTier, ...] = ()

    @property
    def memory(self) -> MemoryPlan:
        """The rank with the fewest tokens, which all ranks use."""
        return min(self.stages, key=lambda stage: stage.tokens)

    @property
    def largest_context(self) -> int:
        """Tokens of the longest request."""
        return min(self.resolved.max_context, self.memory.tokens)

    def count_requests(self, context: int) -> int:
        """Requests of `context` tokens that run at once."""
        return min(self.resolved.max_running_requests, self.memory.tokens // context)

    @cached_property
    def cost(self) -> ModelCost | None:
        """The target's sizes, with the real bytes of a weight; None where they are unknown."""
        cost, plan = ModelCost.of(self.resolved.model), self.resolved.plan
        if cost is None:
            return None
        copies = {layer: layer.experts + plan.redundant_experts if layer.experts else 0 for layer in cost.layers}
        values = sum(layer.count * (layer.dense + copies[layer] * layer.expert) for layer in cost.layers) + 2 * cost.head
        return replace(cost, weight_bytes=sum(stage.weights - stage.drafter for stage in self.stages) * plan.tp / values)

    def bound_decode(self, rows: int, context: int) -> Phase | None:
        """The lower bound of a decode step without drafts; None without rates."""
        if (cost := self.cost) is None:
            return None
        in_stage = max(1, rows // self.resolved.plan.pp)  # one micro-batch; a token passes all stages
        in_window = min(context, cost.window.tokens) if cost.window is not None else 0
        cached = sum(
            context * stage.bytes_per_token + in_window * stage.window_bytes + 2 * stage.state_bytes  # read and written
            for stage in self.stages
        )
        return self._bound(f"decode, batch {rows}", in_stage, rows, in_stage * cached, in_stage)

    def bound_prefill(self) -> Phase | None:
        """The lower bound of a prefill step of a whole chunk; None without rates."""
        if (cost := self.cost) is None:
            return None
        rows = self.resolved.chunked_prefill_size
        mixing = cost.pair * rows * rows / 2  # causal
        if cost.window is not None:
            mixing += cost.window.pair * cost.window.pairs(rows)
        return self._bound(f"prefill, chunk {rows}", rows, rows * self.resolved.plan.pp, head_rows=1, mixing=mixing)

    def _bound(self, name: str, rows: int, finished: int, cache_bytes: float = 0, head_rows: int = 0, mixing: float = 0) -> Phase | None:
        """`mixing`: operations of attention."""
        cost, card, tp = self.cost, self.card, self.resolved.plan.tp
        if cost is None or card is None:
            return None
        met = sum(layer.met for layer in cost.layers)
        weights = cost.weight_bytes * (sum(layer.read(rows) for layer in cost.layers) + cost.head) / tp
        operations = (2 * (rows * met + head_rows * cost.head) + rows * cost.recurrence + mixing) / tp
        rate = card.ceilings.operations * (2 if card.has_fp8 and cost.weight_bytes < 1.5 else 1)
        num_sums = SUMS_A_LAYER * self.resolved.model.num_layers if tp > 1 else 0
        sent = rows * self.resolved.model.hidden_size * 2 * 2 * (tp - 1) / tp  # bytes of one sum, by rank
        seconds_of = {
            "reading weights": weights / card.ceilings.read,
            "reading the KV cache": cache_bytes / card.ceilings.read,
            "matrix products": operations / rate,
            "sums over ranks": num_sums * max(SUM_SECONDS, sent / card.links),
        }
        reading = seconds_of["reading weights"] + seconds_of["reading the KV cache"]
        seconds = max(reading, seconds_of["matrix products"]) + seconds_of["sums over ranks"]
        return Phase(name, seconds, finished / seconds, max(seconds_of, key=lambda cause: seconds_of[cause]))

    def find_shortage(self, target: Target) -> str:
        """Why the plan misses `target`; empty if it meets it."""
        if self.resolved.max_context < target.context:
            return f"model.max_context is {self.resolved.max_context} tokens"
        fitting = self.memory.tokens // target.context
        if fitting < target.requests:
            return f"the KV cache holds {fitting} request(s) of {target.context} tokens"
        phase = self.bound_decode(target.requests, target.context)
        if target.rate and phase is None:
            return "the rate cannot be bounded for this model or machine"
        if phase is not None and (each := target.share * phase.rate / target.requests) < target.rate:
            return f"{each:.1f} tokens/s each"
        return ""

    def describe(self) -> dict[str, Any]:
        """The plan as JSON values."""
        phases = [self.bound_prefill(), *(self.bound_decode(rows, DECODE_CONTEXT) for rows in DECODE_ROWS)]
        return {
            "model": self.resolved.served_name,
            "config": self.source,
            "parallel": str(self.resolved.plan),
            "ranks": [asdict(stage) | {"used": stage.used} for stage in self.stages for _ in range(self.resolved.plan.tp)],
            "max_total_tokens": self.memory.tokens,
            "largest_context": self.largest_context,
            "largest_batch": self.count_requests(DECODE_CONTEXT),
            "tiers": [asdict(tier) for tier in self.tiers],
            "phases": [asdict(phase) for phase in phases if phase is not None],
        }


def find_published(config: FrameConfig) -> FrameConfig:
    """`config` with the model's folder, or the published config.json of that name."""
    folder = find_model(config.model.path)
    known = {path.name.lower(): path for path in PUBLISHED.iterdir()}
    update: dict[str, Any] = {}
    if not folder.is_dir() and (published := known.get(folder.name.lower())) is not None:
        update = {"path": str(published), "tokenizer": None, "skip_tokenizer_init": True}
    return config.model_copy(update={"model": config.model.model_copy(update=update)})


def plan_deployment(config: FrameConfig, machine: Machine | None) -> DeploymentPlan:
    """Resolve `config` for a machine, None for this one, and count its memory. Raises
    ConfigurationError where the plan does not fit."""
    config = find_published(config)
    hardware, assumed = (machine.hardware, machine.distributions) if machine is not None else (None, frozenset[str]())
    prepared = prepare(config, hardware, assumed=assumed)
    resolved = prepared.resolved
    devices = prepared.hardware.of(resolved.device)
    machine = machine or recognise(prepared.hardware)
    if devices:
        total = machine.card.memory if machine is not None else min(device.memory_bytes for device in devices)
        memory = DeviceMemory(total, total - CONTEXT_BYTES)
    else:
        memory = HostPlatform(PlatformContext()).measure_memory()
    stages = tuple(_plan_stage(prepared, stage, memory) for stage in range(resolved.plan.pp))
    card, source = machine.card if machine is not None and devices else None, str(find_model(config.model.path))
    return DeploymentPlan(resolved, stages, card, source, tuple(_plan_tiers(prepared, stages, memory)))


def try_plans(config: FrameConfig, machine: Machine, target: Target) -> Iterator[tuple[str, str]]:
    """(plan, why it misses the target; "" for the last) with ever more devices."""
    sizes = [1 << power for power in range(machine.count.bit_length()) if 1 << power <= machine.count]
    for ranks in sizes:
        for tp in reversed([size for size in sizes if size <= ranks]):
            parallel = config.parallel.model_copy(update={"tp": tp, "pp": ranks // tp, "ep": tp if config.parallel.ep > 1 else 1})
            name = f"--tp {tp} --pp {ranks // tp}"
            try:
                plan = plan_deployment(config.model_copy(update={"parallel": parallel}), machine)
            except ConfigurationError as error:
                yield name, str(error).splitlines()[0]
                continue
            shortage = plan.find_shortage(target)
            yield name, shortage
            if not shortage:
                return


def _plan_stage(prepared: Prepared, stage: int, memory: DeviceMemory) -> MemoryPlan:
    """The memory of a rank of one stage."""
    memory_plan = PlannedRank(prepared.resolved, prepared.registry, stage).plan_memory(memory)
    if memory_plan is None:
        name = prepared.resolved.choice("model").name
        raise ConfigurationError(f"model.implementation {name} builds its layers while it loads, so its size cannot be planned")
    return memory_plan


def _plan_tiers(prepared: Prepared, stages: Sequence[MemoryPlan], memory: DeviceMemory) -> Iterator[PlannedTier]:
    """The tiers, each with the blocks that it has room for. Ranks share a size equally."""
    resolved, plan = prepared.resolved, prepared.resolved.plan
    sizes = [-(-stage.bytes_per_token * resolved.page_size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT for stage in stages]
    for choice in resolved.plugins.get("kv_tier", ()):
        can = prepared.registry.get("kv_tier", choice.name).capabilities
        known = can if isinstance(can, KVTierCapabilities) else KVTierCapabilities()
        size, ratio = divide_options(known, choice.options, plan).get(known.size), choice.options.get(known.ratio)
        blocks = None if size is None else int(size * GIB) // max(sizes)
        host_bytes = int(sum(choice.options[option] for option in known.memory) * GIB)
        if ratio is not None:
            blocks = min(int(ratio * stage.cache) // size for stage, size in zip(stages, sizes, strict=True))
            host_bytes = blocks * sum(sizes) * plan.tp
        device_bytes = count_tier_bytes(choice, memory)
        if device_bytes:
            blocks, host_bytes = device_bytes // max(sizes), 0
        totals = host_bytes * plan.num_replicas, device_bytes * plan.num_devices
        yield PlannedTier(choice.name, sum(sizes) * plan.attention_tp, blocks, *totals)
