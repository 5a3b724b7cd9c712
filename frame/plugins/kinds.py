"""The plugin kinds: for each its hook, the interface version that this core supports, and the class
to derive from.

Plain strings, so that the table imports no interface module; a test compares them with the modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Kind:
    """One plugin family. `interface`: "package.module:Class"; `hook`: the hook that registers its
    records."""

    name: str
    plural: str
    api: str
    interface: str

    @property
    def hook(self) -> str:
        return f"register_{self.plural}"


_INTERFACES = "frame.core.interfaces"

_ALL = (
    Kind("model", "models", "model/2", f"{_INTERFACES}.model:Model"),
    Kind("attention_backend", "attention_backends", "attention/2", f"{_INTERFACES}.attention:AttentionBackend"),
    Kind("quantization_method", "quantization_methods", "quantization/2", f"{_INTERFACES}.quantization:QuantizationMethod"),
    Kind("moe_runner", "moe_runners", "moe_runner/2", f"{_INTERFACES}.moe:MoERunner"),
    Kind("moe_dispatcher", "moe_dispatchers", "moe_dispatcher/2", f"{_INTERFACES}.moe:MoEDispatcher"),
    Kind("scheduling_policy", "scheduling_policies", "scheduling_policy/2", f"{_INTERFACES}.scheduling:SchedulingPolicy"),
    Kind("eviction_policy", "eviction_policies", "eviction_policy/1", f"{_INTERFACES}.cache:EvictionPolicy"),
    Kind("logits_processor", "logits_processors", "logits_processor/2", f"{_INTERFACES}.sampling:LogitsProcessor"),
    Kind("grammar", "grammars", "grammar/2", f"{_INTERFACES}.sampling:GrammarBackend"),
    Kind("reasoning_parser", "reasoning_parsers", "reasoning_parser/2", f"{_INTERFACES}.parsing:ReasoningParser"),
    Kind("tool_call_parser", "tool_call_parsers", "tool_call_parser/2", f"{_INTERFACES}.parsing:ToolCallParser"),
)

KINDS = MappingProxyType({kind.name: kind for kind in _ALL})
