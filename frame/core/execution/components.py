"""`Parts`: the plugin classes that were chosen, loaded and handed over by the composition root; and what is built from them.

Knows no plugin by name and no registry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from frame.core.execution.hybrid_attention import HybridAttention
from frame.core.interfaces.build import BuildContext, Collective, Limits
from frame.core.kv_cache.kv_pool import DTYPES
from frame.core.loading.remote_code import load_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

    from frame.core.config.resolved import Resolved
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.model import Model, ModelConfig
    from frame.core.interfaces.moe import MoEDispatcher, MoERunner
    from frame.core.interfaces.quantization import QuantizationMethod
    from frame.core.interfaces.sampling import LogitsProcessor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A plugin's class and its own validated options."""

    target: type[T]
    options: BaseModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The chosen classes of one rank. A family that the model has no use for is None."""

    model: Callable[[ModelConfig, BuildContext], Model]
    attention: Loaded[AttentionBackend]
    decode_attention: Loaded[AttentionBackend] | None = None  # where decodes have a backend of their own, `attention` is for prompts
    quantization: Loaded[QuantizationMethod] | None = None
    moe_runner: Loaded[MoERunner] | None = None
    moe_dispatcher: Loaded[MoEDispatcher] | None = None
    processors: tuple[Loaded[LogitsProcessor], ...] = ()


def limits_of(resolved: Resolved) -> Limits:
    """The greatest sizes of a step: a full prefill chunk beside every running request's decode."""
    return Limits(
        max_running_requests=resolved.max_running_requests,
        max_tokens_per_step=resolved.chunked_prefill_size + resolved.max_running_requests,
        max_context=resolved.max_context,
        page_size=resolved.page_size,
    )


def build_context(resolved: Resolved, parts: Parts, tp: Collective, device: torch.device) -> BuildContext:
    """The context of one rank, with its backend, quantization method, MoE runner and dispatcher built."""
    base = BuildContext(
        device=device,
        dtype=DTYPES[resolved.dtype],
        tp=tp,
        limits=limits_of(resolved),
        task=resolved.task,
        load_code=partial(load_class, Path(resolved.model_path)) if resolved.user.model.trust_remote_code else None,
        kv_dtype=DTYPES[resolved.kv_dtype],
    )
    built: dict[str, Any] = {"attention": _build_attention(parts, base)}
    if parts.quantization is not None:
        checkpoint_config = resolved.model.config.get("quantization_config")
        built["quantization"] = parts.quantization.target(checkpoint_config, parts.quantization.options)
    for name, part in (("moe_runner", parts.moe_runner), ("moe_dispatcher", parts.moe_dispatcher)):
        if part is not None:
            built[name] = part.target(base, part.options)
    return replace(base, **built)


def _build_attention(parts: Parts, base: BuildContext) -> AttentionBackend:
    built = parts.attention.target(base, parts.attention.options)
    if parts.decode_attention is None:
        return built
    return HybridAttention(built, parts.decode_attention.target(base, parts.decode_attention.options))


def build_processors(parts: Parts, model_config: ModelConfig, num_slots: int, device: torch.device) -> list[LogitsProcessor]:
    """The logits processors, in the order of `parts`."""
    built = [part.target(model_config.vocab_size, num_slots, device, part.options) for part in parts.processors]
    for processor in built:
        processor.eos_token_ids = model_config.eos_token_ids
    return built
