"""All hooks. pluggy calls them at start-up or once per step, never inside a forward pass.

`register_<plural>(registry)` adds records. `on_<event>(…)` observes; its result is ignored. A hook
may take a subset of the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry

PROJECT = "frame"  # also the entry-point group
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_models(registry: KindRegistry) -> None:
    """Add model architectures (`model/2`, frame.core.interfaces.model.Model)."""


@hookspec
def register_attention_backends(registry: KindRegistry) -> None:
    """Add attention backends (`attention/2`, frame.core.interfaces.attention.AttentionBackend)."""


@hookspec
def register_quantization_methods(registry: KindRegistry) -> None:
    """Add quantization methods (`quantization/2`,
    frame.core.interfaces.quantization.QuantizationMethod)."""


@hookspec
def register_moe_runners(registry: KindRegistry) -> None:
    """Add expert GEMMs (`moe_runner/2`, frame.core.interfaces.moe.MoERunner)."""


@hookspec
def register_moe_dispatchers(registry: KindRegistry) -> None:
    """Add token exchanges (`moe_dispatcher/2`, frame.core.interfaces.moe.MoEDispatcher)."""


@hookspec
def register_scheduling_policies(registry: KindRegistry) -> None:
    """Add scheduling policies (`scheduling_policy/2`,
    frame.core.interfaces.scheduling.SchedulingPolicy)."""


@hookspec
def register_eviction_policies(registry: KindRegistry) -> None:
    """Add eviction policies of the prefix cache (`eviction_policy/1`,
    frame.core.interfaces.cache.EvictionPolicy)."""


@hookspec
def register_logits_processors(registry: KindRegistry) -> None:
    """Add logits processors (`logits_processor/2`,
    frame.core.interfaces.sampling.LogitsProcessor)."""


@hookspec
def register_grammars(registry: KindRegistry) -> None:
    """Add grammar backends (`grammar/2`, frame.core.interfaces.sampling.GrammarBackend)."""


@hookspec
def register_reasoning_parsers(registry: KindRegistry) -> None:
    """Add reasoning parsers (`reasoning_parser/2`,
    frame.core.interfaces.parsing.ReasoningParser)."""


@hookspec
def register_tool_call_parsers(registry: KindRegistry) -> None:
    """Add tool-call parsers (`tool_call_parser/2`,
    frame.core.interfaces.parsing.ToolCallParser)."""


@hookspec
def on_start(resolved: Any) -> None:
    """A process has loaded its plugins and is about to serve."""


@hookspec
def on_step(step: int, num_running: int, num_waiting: int, num_tokens: int, seconds: float) -> None:
    """The engine finished a step."""


@hookspec
def on_request_finished(rid: str, reason: str, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
    """A request left the engine."""


@hookspec
def on_stop() -> None:
    """The process stops."""
