"""Computes how many pages of KV cache fit in the device's memory, or the error that prints the
arithmetic.

Used when an engine is built. Pure, except for `measure`. It must not know pools or
schedulers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from frame.core.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.build import Limits
    from frame.core.interfaces.model import ModelConfig
    from frame.core.interfaces.platform import Platform
    from frame.core.kv_cache.geometry import KVGeometry

GIB = 1024**3
RESERVED_PAGES = 1
CPU_SHARE = 0.25  # most of the machine's memory for the cache, unless the user sets cache.max_total_tokens
CPU_LEAST_TOKENS = 65_536
LEAST_TOKENS = 256  # a start with a smaller cache is refused
GREATEST_FRACTION = 0.95  # most of cache.mem_fraction that an error proposes
_WORKSPACES = 768 * 1024**2  # bytes; libraries' workspaces and fragmentation of PyTorch's allocator


class CapacityError(ConfigurationError):
    """The KV cache does not fit. The message shows the arithmetic and proposes one setting."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory, in bytes."""

    total: int
    free: int  # what this process may still allocate
    weights: int  # the loaded weights
    activations: int  # what a step needs
    is_shared: bool = False  # the host's memory, which others take from as well

    def count_available(self, fraction: float) -> int:
        """Bytes for the cache if weights, activations and cache together take `fraction` of the
        total."""
        return min(int(self.total * fraction) - self.weights - self.activations, self.free - self.activations)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The KV cache of a runner."""

    num_pages: int  # the reserved page 0 included
    page_size: int  # tokens
    bytes_per_token: int  # over all layers
    phases: dict[str, float] = field(default_factory=dict)  # seconds of the phases of the start

    @property
    def max_total_tokens(self) -> int:
        """Tokens that the cache holds."""
        return (self.num_pages - RESERVED_PAGES) * self.page_size


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
    """Pages of the pool, the reserved one included. Raises CapacityError when too few fit."""
    each = geometry.bytes_per_token
    if not each:  # an encoder stores no keys: pages only bound the number of requests
        return limits.max_running_requests * -(-limits.max_context // geometry.page_size) + RESERVED_PAGES
    reserve = memory.activations + (0 if memory.is_shared else _WORKSPACES)
    memory = replace(memory, activations=reserve)
    if max_total_tokens is not None:
        fitting = memory.count_available(1.0) // each
        if max_total_tokens > fitting:
            raise CapacityError(_sentence(memory, 1.0, each, max_total_tokens, f"cache.max_total_tokens: {max(16, fitting)}"))
        return max(1, max_total_tokens // geometry.page_size) + RESERVED_PAGES
    tokens = memory.count_available(fraction) // each
    if memory.is_shared:
        wanted = max(limits.max_running_requests * limits.max_context, CPU_LEAST_TOKENS)
        tokens = min(tokens, wanted, int(memory.total * CPU_SHARE) // each)
    least = min(limits.max_context, LEAST_TOKENS)
    if tokens < max(least, geometry.page_size):
        raise CapacityError(_sentence(memory, fraction, each, least, _remedy(memory, least * each)))
    return int(tokens) // geometry.page_size + RESERVED_PAGES


def _sentence(memory: Memory, fraction: float, each: int, wanted: int, change: str) -> str:
    left = memory.count_available(fraction)
    return (
        f"the KV cache does not fit: {fraction:g} of {memory.total / GIB:.2f} GiB - {memory.weights / GIB:.2f} GiB weights"
        f" - {memory.activations / GIB:.2f} GiB activations = {left / GIB:.2f} GiB for the cache"
        f" ({max(0, left) // each} tokens of {each} bytes), and at least {wanted} tokens are needed; try {change}"
    )


def _remedy(memory: Memory, needed: int) -> str:
    fraction = (memory.weights + memory.activations + needed) / memory.total
    if fraction <= GREATEST_FRACTION:
        return f"cache.mem_fraction: {math.ceil(fraction * 100) / 100:.2f}"
    return "parallel.tp: 2 (or twice what it is)"
