"""The adapter format of PEFT's DoRA (arXiv 2402.09353): LoRA, and the norm of each output's row."""

from __future__ import annotations

from dataclasses import replace

from frame.interfaces.adapter import AdapterError, LowRankDelta
from frame.plugins.adapters.lora import Factors, LoraFormat, read_factor
from frame.plugins.adapters.peft_config import LayerScales, PeftConfig

_MAGNITUDE = "magnitude_vector"


class DoraFormat(LoraFormat):
    """DoRA on linear layers. PEFT's norms of an embedding are those of its columns."""

    uses_dora = True

    def read_layer(self, module: str, factors: Factors, scales: LayerScales, options: PeftConfig) -> LowRankDelta:
        if any(kind.startswith("embedding") for kind in factors):
            why = "the norms are those of columns of the stored weight, which is not implemented"
            raise AdapterError(f"{module!r:.200} is adapted by DoRA, but {why}: leave the layer out, or merge the adapter with PEFT")
        if _MAGNITUDE not in factors:
            raise AdapterError(f"{module!r:.200} has no lora_{_MAGNITUDE}: save the adapter again with PEFT")
        name, tensor = factors[_MAGNITUDE]
        delta = super().read_layer(module, {kind: factor for kind, factor in factors.items() if kind != _MAGNITUDE}, scales, options)
        if tuple(tensor.shape) != (len(delta.b),):
            raise AdapterError(f"{name!r:.200} has the shape {list(tensor.shape)}, not [{len(delta.b)}]: save the adapter again with PEFT")
        return replace(delta, output_norm=read_factor(factors, _MAGNITUDE))
