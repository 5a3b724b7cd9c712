"""Manifest of the in-tree models: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.model import API, ModelCapabilities
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry

_MODELS = (
    ("llama", "llama:LlamaForCausalLM", ("LlamaForCausalLM", "MistralForCausalLM"), "Llama 2 and 3, Mistral"),
    ("qwen2", "qwen2:Qwen2ForCausalLM", ("Qwen2ForCausalLM",), "Qwen2 and Qwen2.5"),
    ("qwen3", "qwen3:Qwen3ForCausalLM", ("Qwen3ForCausalLM",), "Qwen3"),
)


@hookimpl
def register_models(registry: KindRegistry) -> None:
    """Add the in-tree models."""
    for name, target, architectures, summary in _MODELS:
        capabilities = ModelCapabilities(architectures)
        registry.add(name, f"frame.models.{target}", capabilities=capabilities, summary=summary, rank=10, api=API)
