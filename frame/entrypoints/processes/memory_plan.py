"""`MemoryPlan`: the memory of one rank, predicted from the model on the meta device before a weight
is read.

Used by `frame plan`, and by each start, which compares it with what is used. Must not know a device
or a plugin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from frame.core.interfaces.build import Limits
from frame.core.interfaces.cache_groups import RESERVED_PAGES, PagePool
from frame.core.interfaces.kv_tier import DEVICE_SHARE, DEVICE_SIZE
from frame.core.kv_cache.geometry import kv_geometry
from frame.forward.declared_caches import model_geometry
from frame.loading.capacity import GIB, WORKSPACES, CapacityError, Memory, activation_bytes, plan_pages, plan_pools
from frame.loading.loader import plan_bytes

if TYPE_CHECKING:
    import torch

    from frame.config.resolved import PluginChoice, Resolved
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.device_drafter import DraftModel
    from frame.core.interfaces.model import Model
    from frame.core.interfaces.platform import DeviceMemory
    from frame.core.kv_cache.geometry import KVGeometry

TOLERANCE = 0.03  # a start logs what is further from the prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Sizes of one rank in bytes. `others`: what was taken before the start, such as the driver's
    context. `graphs`: tensors of the largest captured step, a part of `activations`."""

    total: int
    others: int
    weights: int
    activations: int
    graphs: int
    workspaces: int
    cache: int
    bytes_per_token: int
    tokens: int  # that the KV cache holds
    is_shared: bool  # the host's memory
    window_bytes: int = 0  # of one token in all layers with a window
    state_bytes: int = 0  # of a sequence's recurrent states
    drafter: int = 0  # a part of `weights`
    reserved: int = 0  # by PyTorch's allocator of this process before the start, a part of `others`

    @property
    def used(self) -> int:
        """Bytes that are taken once the rank serves."""
        return self.others + self.weights + self.activations + self.workspaces + self.cache

    def find_deviations(self, weights: int, tokens: int, memory: DeviceMemory) -> list[str]:
        """A sentence for each prediction that is more than `TOLERANCE` from the measured value.

        Activations and workspaces are upper bounds, which need not be taken. All memory of this
        process lies between that of PyTorch's allocator, without libraries, and that of the device,
        with other processes.
        """
        pairs = [("weights", self.weights / GIB, weights / GIB, "GiB"), ("the KV cache", self.tokens, tokens, "tokens")]
        if not self.is_shared:
            minimum, maximum = self.others - self.reserved + memory.reserved, memory.total - memory.free
            fixed = self.used - self.activations - self.workspaces
            if minimum > self.used:
                pairs.append(("all memory", self.used / GIB, minimum / GIB, "GiB"))
            elif maximum < fixed:
                pairs.append(("memory besides activations and workspaces", fixed / GIB, maximum / GIB, "GiB"))
        return [
            f"the memory plan predicts {planned:,.6g} {unit} for {name}; it is {real:,.6g}"
            for name, planned, real, unit in pairs
            if abs(planned - real) > TOLERANCE * max(real, 1e-9)
        ]


def plan_memory(
    resolved: Resolved, limits: Limits, dtype: torch.dtype, geometry: KVGeometry, weights: int, before: DeviceMemory, further: int = 0
) -> MemoryPlan:
    """The memory of a rank with `weights` bytes of the model, on a device in the state `before`.
    `further`: bytes of a step besides `activation_bytes`, a part of the activations. Raises
    CapacityError if the KV cache does not fit."""
    config, ranks = resolved.model, resolved.plan.num_devices if before.is_shared else 1
    total, free = before.total // ranks, before.free // ranks
    others = 0 if before.is_shared else total - free
    activations = activation_bytes(config, limits, dtype) + further
    memory = Memory(total, free - weights, others + weights, activations, before.is_shared)
    pages = plan_pages(geometry, limits, memory, resolved.mem_fraction, resolved.max_total_tokens)
    tokens = (pages - RESERVED_PAGES) * resolved.page_size
    pools = (PagePool("tokens", pages, resolved.page_size), *plan_pools(geometry, limits, tokens))
    captured = max(resolved.cuda_graph_max_bs, resolved.prompt_graph_max_tokens)
    step = Limits(resolved.cuda_graph_max_bs, captured, limits.max_context, limits.page_size)
    return MemoryPlan(
        total=total,
        others=others,
        weights=weights,
        activations=activations,
        graphs=activation_bytes(config, step, dtype) if captured else 0,
        workspaces=0 if before.is_shared else WORKSPACES,
        cache=sum(_count_entries(pool) * geometry.count_bytes(index) for index, pool in enumerate(pools)),
        bytes_per_token=geometry.bytes_per_token,
        tokens=tokens,
        is_shared=before.is_shared,
        window_bytes=sum(geometry.count_bytes(index) for index, pool in enumerate(pools) if pool.kind == "window"),
        state_bytes=sum(geometry.count_bytes(index) for index, pool in enumerate(pools) if pool.kind == "snapshot"),
        reserved=0 if before.is_shared else before.reserved,
    )


def count_further_bytes(resolved: Resolved, model: Model, context: BuildContext, before: DeviceMemory) -> int:
    """Bytes that a rank needs besides `activation_bytes`, on a device in the state `before`: the
    adapter pool, encoders of media, experts that move, buffers of cache tiers, and keys of prompts
    in another form than the cache's."""
    transit = sum(count_tier_bytes(choice, before) for choice in resolved.plugins.get("kv_tier", ()))
    if context.adapters is not None:
        from frame.adapters.builder import count_bytes

        transit = count_bytes(context)
    if context.media is not None:
        from frame.media.encoder import count_bytes as count_media_bytes

        transit += count_media_bytes(model, context, resolved.model.full_config)
    if resolved.plan.balances_experts:
        from frame.parallel.expert_moves import count_transit_bytes, list_movable

        if moving := list_movable(model):
            transit += count_transit_bytes(moving, resolved.user.parallel.eplb_stage_bytes)
    if context.attention is None:
        return transit
    is_quantized = resolved.kv_dtype != resolved.dtype
    return transit + context.attention.capabilities.bound_prompt_bytes(resolved.model.kind, before.total, is_quantized=is_quantized)


def count_tier_bytes(choice: PluginChoice, before: DeviceMemory) -> int:
    """Bytes of a device that a cache tier of each rank takes."""
    size = 0 if before.is_shared else choice.options.get(DEVICE_SIZE, 0)
    return int(before.total * DEVICE_SHARE if size is None else size * GIB)


def plan_rank(
    resolved: Resolved, context: BuildContext, model: Model, draft: DraftModel | None = None, *, before: DeviceMemory
) -> MemoryPlan | None:
    """The memory of a rank with these models, which are on the meta device; None for one that
    builds its layers while it loads. Raises CapacityError if the KV cache does not fit."""
    if not (weights := plan_bytes(model)):  # type: ignore[arg-type]
        return None
    draft_bytes = 0 if draft is None else plan_bytes(draft)  # type: ignore[arg-type]
    uniform = kv_geometry(resolved.model, context.tp.size, resolved.page_size, resolved.kv_dtype)
    geometry = model_geometry(model, uniform, draft)
    further = count_further_bytes(resolved, model, context, before)
    planned = plan_memory(resolved, context.limits, context.dtype, geometry, weights + draft_bytes, before, further)
    return replace(planned, drafter=draft_bytes)


def predict_memory(
    resolved: Resolved, context: BuildContext, geometry: KVGeometry, weights: int, before: DeviceMemory, further: int
) -> MemoryPlan | None:
    """The prediction that the start is compared with; None where it says that too little memory is
    free."""
    if not weights:  # a model that builds its layers while it loads
        return None
    try:
        return plan_memory(resolved, context.limits, context.dtype, geometry, weights, before, further)
    except CapacityError:
        return None


def _count_entries(pool: PagePool) -> int:
    """Tokens, states or blocks that a pool has memory for, with the reserved ones; see `KVPool`."""
    return pool.num_pages * pool.page_size if pool.page_size else pool.num_pages + (pool.kind == "snapshot")
