"""Computes how many pages of KV cache fit in the device's memory, or the error that prints the
arithmetic.

Used when an engine is built. Pure, except for `measure`. It must not know pools or
schedulers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from frame.core.errors import ConfigurationError
from frame.core.interfaces.cache_groups import CHECKPOINT_TOKENS, RESERVED_PAGES, PagePool

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.build import Limits
    from frame.core.interfaces.model import ModelConfig
    from frame.core.interfaces.platform import Platform
    from frame.core.kv_cache.geometry import KVGeometry

GIB = 1024**3
CPU_SHARE = 0.25  # most of the machine's memory for the cache, unless the user sets cache.max_total_tokens
CPU_MIN_TOKENS = 65_536
MIN_TOKENS = 256  # a start with a smaller cache is refused, unless cache.max_total_tokens asks for it
WINDOW_DIVISOR = 4  # a window group has room for one of so many tokens
MIN_STATES = 4
TOKENS_PER_STATE = 4096  # of a model that stores no tokens
GREATEST_FRACTION = 0.95  # most of cache.mem_fraction that an error proposes
WORKSPACES = 768 * 1024**2  # bytes; libraries' workspaces and fragmentation of PyTorch's allocator


class CapacityError(ConfigurationError):
    """The KV cache does not fit. The message shows the arithmetic and proposes one setting."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory, in bytes."""

    total: int
    free: int  # what this process may still allocate
    weights: int  # the loaded weights; of a device with its own memory, all that is in use
    activations: int  # what a step needs
    is_shared: bool = False  # the host's memory, which others take from as well

    def count_available(self, fraction: float) -> int:
        """Bytes for the cache if weights, activations and cache together take `fraction` of the
        total."""
        return min(int(self.total * fraction) - self.weights - self.activations, self.free - self.activations)


def measure(platform: Platform, weights: int, activations: int, ranks: int = 1) -> Memory:
    """The device's memory after loading; `weights` and `activations` in bytes. `ranks` processes
    share the host's memory."""
    memory = platform.measure_memory()
    if memory.is_shared:
        return Memory(memory.total // ranks, memory.free // ranks, weights, activations, is_shared=True)
    return Memory(memory.total, memory.free, memory.total - memory.free, activations)


def activation_bytes(model_config: ModelConfig, limits: Limits, dtype: torch.dtype) -> int:
    """Bytes that one step needs besides weights and cache: a conservative estimate."""
    config = model_config.config
    wide = max(int(config.get("intermediate_size") or 0), model_config.hidden_size, model_config.num_heads * model_config.head_dim)
    pairs = int(config.get("num_experts_per_tok") or 0) if model_config.num_experts else 0  # one row for each of a token's experts
    routed = pairs * (model_config.hidden_size + int(config.get("moe_intermediate_size") or wide))
    tokens = limits.max_tokens_per_step * (8 * model_config.hidden_size + 4 * wide + routed) * dtype.itemsize
    logits = limits.max_running_requests * model_config.vocab_size * 4 * 4
    return tokens + logits


def plan_pages(geometry: KVGeometry, limits: Limits, memory: Memory, fraction: float, max_total_tokens: int | None) -> int:
    """Pages of the `tokens` group, the reserved one included; the other groups get as many as
    `plan_pools` says. Raises CapacityError when too few fit."""
    if geometry.num_pools > 1:
        return _plan_groups(geometry, limits, memory, fraction, max_total_tokens)
    each = geometry.bytes_per_token
    if not each:  # an encoder stores no keys: pages only bound the number of requests
        return limits.max_running_requests * -(-limits.max_context // geometry.page_size) + RESERVED_PAGES
    reserve = memory.activations + (0 if memory.is_shared else WORKSPACES)
    memory = replace(memory, activations=reserve)
    if max_total_tokens is not None:
        fitting = memory.count_available(1.0) // each
        if max_total_tokens > fitting:
            raise CapacityError(_sentence(memory, 1.0, each, max_total_tokens, f"cache.max_total_tokens: {max(16, fitting)}"))
        return max(1, max_total_tokens // geometry.page_size) + RESERVED_PAGES
    tokens = memory.count_available(fraction) // each
    if memory.is_shared:
        max_tokens = max(limits.max_running_requests * limits.max_context, CPU_MIN_TOKENS)
        tokens = min(tokens, max_tokens, int(memory.total * CPU_SHARE) // each)
    minimum = min(limits.max_context, MIN_TOKENS)
    if tokens < max(minimum, geometry.page_size):
        raise CapacityError(_sentence(memory, fraction, each, minimum, _remedy(memory, minimum * each)))
    return int(tokens) // geometry.page_size + RESERVED_PAGES


def plan_pools(geometry: KVGeometry, limits: Limits, num_tokens: int) -> tuple[PagePool, ...]:
    """The pools of the groups besides `tokens`, beside a cache of `num_tokens` tokens.

    A window group gets what the running requests can hold, but not more than a quarter of the
    tokens or one request's need, whichever is more. States get a third of the memory, at most two
    for each running request: one is overwritten, the other one is a checkpoint. A `write_once`
    group has a block for each running request, if the tokens suffice for half a context of each.
    """
    pools = []
    has_states = any(group.kind == "snapshot" for group in geometry.groups)
    spare = 4 * geometry.page_size + (CHECKPOINT_TOKENS + geometry.page_size if has_states else 0)
    for index, group in enumerate(geometry.groups[1 : geometry.num_pools], 1):
        if group.window is not None:
            # a request reads the window of a cached prefix, then fills its own
            one = min(limits.max_context, 2 * group.window + limits.max_tokens_per_step) + spare
            all_running = limits.max_running_requests * (group.window + spare) + limits.max_tokens_per_step
            tokens = min(num_tokens + spare, max(one, min(all_running, num_tokens // WINDOW_DIVISOR)))
            pages = -(-tokens // group.page_size)
        elif group.kind == "write_once":
            pages = min(limits.max_running_requests, -(-2 * num_tokens // limits.max_context))
        else:
            half = geometry.bytes_per_token // 2
            each = geometry.count_bytes(index)  # 0 in a pipeline stage without recurrent layers
            states = num_tokens * half // each if half and each else num_tokens // TOKENS_PER_STATE
            pages = min(2 * limits.max_running_requests, max(MIN_STATES, states))
        pools.append(PagePool(group.kind, pages + RESERVED_PAGES, group.page_size, group.window))
    return tuple(pools)


def _plan_groups(geometry: KVGeometry, limits: Limits, memory: Memory, fraction: float, max_total_tokens: int | None) -> int:
    """`plan_pages` of a model with several cache groups: the most tokens whose pools fit."""
    memory = replace(memory, activations=memory.activations + (0 if memory.is_shared else WORKSPACES))
    page_size = geometry.page_size

    def count_bytes(num_tokens: int) -> int:
        pools = plan_pools(geometry, limits, num_tokens)
        pages = [pool.num_pages * max(1, pool.page_size) * geometry.count_bytes(index) for index, pool in enumerate(pools, 1)]
        return num_tokens * geometry.bytes_per_token + sum(pages)

    available = memory.count_available(1.0 if max_total_tokens is not None else fraction)
    asked_for = None if max_total_tokens is None else max(page_size, max_total_tokens)
    requested = asked_for or max(limits.max_running_requests * limits.max_context, CPU_MIN_TOKENS)
    if max_total_tokens is None and not memory.is_shared and geometry.bytes_per_token:
        requested = available // geometry.bytes_per_token
    elif max_total_tokens is None and memory.is_shared:
        available = min(available, int(memory.total * CPU_SHARE))
    low, high = 0, max(0, requested) // page_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count_bytes(middle * page_size) <= available else (low, middle - 1)
    minimum = (asked_for or max(page_size, min(limits.max_context, MIN_TOKENS))) // page_size
    if low < minimum:
        each = -(-count_bytes(minimum * page_size) // (minimum * page_size))
        asked, share = (max_total_tokens, 1.0) if max_total_tokens is not None else (minimum * page_size, fraction)
        change = f"cache.max_total_tokens: {max(page_size, low * page_size)}" if max_total_tokens else _remedy(memory, each * asked)
        raise CapacityError(_sentence(memory, share, each, asked, change))
    return max(1, low) + RESERVED_PAGES


def _sentence(memory: Memory, fraction: float, each: int, min_tokens: int, change: str) -> str:
    left, used = memory.count_available(fraction), "weights" if memory.is_shared else "in use (weights, other processes)"
    return (
        f"the KV cache does not fit: {fraction:g} of {memory.total / GIB:.2f} GiB - {memory.weights / GIB:.2f} GiB {used}"
        f" - {memory.activations / GIB:.2f} GiB activations = {left / GIB:.2f} GiB for the cache"
        f" ({max(0, left) // each} tokens of {each} bytes), and at least {min_tokens} tokens are needed; try {change}"
    )


def _remedy(memory: Memory, needed: int) -> str:
    fraction = (memory.weights + memory.activations + needed) / memory.total
    if fraction <= GREATEST_FRACTION:
        return f"cache.mem_fraction: {math.ceil(fraction * 100) / 100:.2f}"
    return "parallel.tp: 2 (or twice what it is)"
