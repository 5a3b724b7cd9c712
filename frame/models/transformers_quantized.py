"""Quantized linear layers in place of those of transformers, in the canonical form that the native
layers use.

Used by the fallback. A layer is built with this rank's part of its sizes, by the model's plan, and
reads its stored tensors under its own name. Must not know a format or an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frame.core.errors import CheckpointError, ConfigurationError
from frame.models.layers.linear import Linear
from frame.models.layers.parameter import Range, find_sharded_parameters, load_parameters
from frame.models.layers.weights.layer_weight import describe_layer
from frame.models.transformers_parallel import COLUMNS, REPLICATED, ROWS, find_styles

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext


class QuantizedLinear(Linear):
    """A linear layer of transformers: x [..., inputs] -> [..., outputs]. `style`: of the plan."""

    def __init__(self, context: BuildContext, name: str, module: nn.Linear, style: str) -> None:
        sizes, tp = (module.in_features, module.out_features), context.tp
        is_row = style in ROWS
        cut = None if style in REPLICATED else sizes[0] if is_row else sizes[1]
        if cut is not None and cut % tp.size:
            raise ConfigurationError(f"the {cut} values of {name} cannot be split into {tp.size} parts: set parallel.tp to a divisor.")
        inputs, outputs = (Range.whole(size) for size in sizes)
        if cut is not None:
            share = Range.split(cut, tp.rank, tp.size)
            inputs, outputs = (share, outputs) if is_row else (inputs, share)
        super().__init__(context, (name,), inputs, (outputs,), module.bias is not None)
        self.whole = (sizes[1], sizes[0])  # of the layer on all ranks
        self.out_features = sizes[1]  # as of the layer that it replaces
        self.adds_bias = not is_row or tp.rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gemm(x.flatten(0, -2), self.bias if self.adds_bias else None)  # type: ignore[misc]
        return out.unflatten(0, x.shape[:-1])


def build_layers(context: BuildContext, model: Any, within: Any) -> dict[str, QuantizedLinear]:
    """The quantized layers of a model that is on the meta device, by name; none if the format
    stores plain weights. within: the part whose layers may be, such as its decoder. Raises
    ConfigurationError for a layer that is stored quantized, but is no plain linear layer."""
    styles = find_styles(model) if context.tp.size > 1 else {}
    head, wrappers, parts = model.get_output_embeddings(), {}, set(within.modules())
    for name, module in model.named_modules():
        if module not in parts or module is head or isinstance(module, nn.Embedding) or not _is_quantized(context, name, module):
            continue
        style = styles.get(name, REPLICATED[0])
        if not isinstance(module, nn.Linear) or style not in (*REPLICATED, *COLUMNS[:-1], *ROWS):
            what = f"a {type(module).__name__}" if not isinstance(module, nn.Linear) else f"split by {style}"
            raise ConfigurationError(
                f"{type(model).__name__} has {name}, which is {what}; the fallback quantizes plain linear layers only: "
                "choose an unquantized checkpoint without model.quantization."
            )
        with torch.device(context.device):
            wrappers[name] = QuantizedLinear(context, name, module, style)
    return wrappers


def load_layers(context: BuildContext, layers: Mapping[str, QuantizedLinear], state: dict[str, Any]) -> None:
    """Load the layers from the checkpoint's tensors `state`, and leave there a placeholder of each
    weight, which transformers expects. Raises CheckpointError for a layer without tensors of its
    own name."""
    dtype = context.dtype
    for name, layer in layers.items():
        sources = [source for _, parameter in find_sharded_parameters(layer) for source in parameter.sources if source in state]
        load_parameters(layer, [(source, state.pop(source)) for source in sources])
        missing = [each for _, parameter in find_sharded_parameters(layer) for each in parameter.pending]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {missing[0]}: the fallback quantizes layers that it stores one by one, under transformers' names."
            )
        state[f"{name}.weight"] = torch.zeros(1, 1, dtype=dtype).expand(*layer.whole)
        if layer.bias is not None:
            state[f"{name}.bias"] = torch.zeros(layer.whole[0], dtype=dtype)
    unused = context.weight_format.ignored_weights if context.weight_format is not None else ()
    for name in [name for name in state if any(re.match(pattern, name) for pattern in unused)]:
        del state[name]


def replace_layers(model: nn.Module, layers: Mapping[str, QuantizedLinear]) -> None:
    """Put the loaded layers in the places of transformers' own."""
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


def _is_quantized(context: BuildContext, name: str, module: nn.Module) -> bool:
    """Whether the format stores another form than the weights of a module with matrices."""
    matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
    if not matrices or context.weight_format is None:
        return False
    layout = describe_layer(context, name, "linear")
    outputs, inputs = matrices[0].shape[-2:]
    stored = layout.list_tensors(inputs, [outputs])
    return layout.quantizes or list(stored) != ["weight"] or stored["weight"].dtype != context.dtype
