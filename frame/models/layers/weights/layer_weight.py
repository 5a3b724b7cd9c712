"""`LayerWeight`: the weight of one linear layer, from its stored tensors to its GEMM.

Asks the weight format how the layer is stored; `frame.models.layers.weights.gemms` selects its
kernel. Used by `Linear` and `Head`. Depends on no format and no kernel by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import LayerFormat, LayerKind, QuantType
from frame.models.layers.weights.gemms import build_gemm, count_bytes
from frame.models.layers.weights.stored_weight import StoredWeight, WeightSizes

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.gemm_kernel import Gemm, GemmChoice
    from frame.models.layers.parameter import Range


def describe_layer(context: BuildContext, name: str, kind: LayerKind) -> LayerFormat:
    """How the checkpoint stores the layer `name`. Raises TypeError for a context without a
    format."""
    if context.weight_format is None:
        raise TypeError("the build context of a model needs a weight format (`none` for unquantized weights)")
    return context.weight_format.describe_layer(name, kind)


class LayerWeight:
    """Merged checkpoint layers `names`, whose outputs follow one another on `module`. Layers that
    are stored differently have parameters of their own."""

    def __init__(
        self, module: nn.Module, context: BuildContext, names: Sequence[str], inputs: Range, outputs: Sequence[int], kind: LayerKind
    ) -> None:
        self.module, self.names, self.choices = module, names, context.gemm_kernels
        self.stored: list[tuple[int, StoredWeight]] = []  # (the first merged part, the parts that are stored alike)
        layouts = [describe_layer(context, name, kind) for name in names]
        first = 0
        for last in range(1, len(names) + 1):
            if last < len(names) and layouts[last] == layouts[first]:
                continue
            name = "" if not first else f"part_{first}"
            sizes = WeightSizes(inputs.size, inputs.full, tuple(outputs[first:last]))
            stored = StoredWeight(module, layouts[first], sizes, context.dtype, name)
            self.stored.append((first, stored))
            first = last
        self.version = -1
        self.gemm: Gemm | None = None

    def bind(self, piece: int, output: Range, input: Range) -> None:  # noqa: A002
        """Bind the checkpoint layer of merged part `piece`; `output.local` counts from the first
        part of all."""
        first, stored = next(pair for pair in reversed(self.stored) if pair[0] <= piece)
        before = sum(sum(each.outputs) for start, each in self.stored if start < first)
        placed = type(output)(output.full, output.start, output.size, output.local - before)
        stored.bind(piece - first, self.names[piece], placed, input)

    @property
    def num_bytes(self) -> int:
        """Of the parameters."""
        return sum(stored.num_bytes for _, stored in self.stored)

    def count_growth(self) -> int:
        """The bytes by which `prepare_gemm` makes a layer on the meta device larger than its
        parameters. 0 for formats that look at the values of a weight to make its canonical form."""
        return count_growth(self.choices, [stored for _, stored in self.stored], self.names[0])

    def prepare_gemm(self) -> Gemm | None:
        """The GEMM with the weights loaded last, at the addresses of the GEMM before. None:
        it was freed, and nothing was loaded since."""
        version = sum(stored.version for _, stored in self.stored)
        if version == self.version:
            return self.gemm
        self.version = version
        weights = [weight for _, stored in self.stored for weight in stored.to_canonical()]
        built = build_gemm(self.choices, weights, self.names[0])
        if self.gemm is None or not replace_values(self.gemm.tensors, built.tensors, self.names[0]):
            self.gemm = built
        register_tensors(self.module, "packed", self.gemm.tensors)
        for _, stored in self.stored:
            stored.release(self.gemm.tensors)
        return self.gemm


def count_growth(choices: Sequence[GemmChoice], stored: Sequence[StoredWeight], name: str, kept: QuantType = "plain") -> int:
    """The bytes that the GEMMs of all `stored` weights keep, minus those of their parameters, on
    the meta device; 0 for weights of the type `kept`, which stay as stored, and where a format
    looks at values."""
    try:
        weights = [weight for each in stored for weight in each.to_canonical()]
    except RuntimeError:  # the meta device has no values
        return 0
    if any(weight.scheme.quant_type == kept for weight in weights):
        return 0
    return count_bytes(choices, weights, name) - sum(each.num_bytes for each in stored)


def replace_values(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], name: str) -> bool:
    """Copy `new` into `old`, which a captured graph may read. False: they are opaque tensors of
    oneDNN, which no graph reads. Raises CheckpointError if they differ in form. `name`: the layer
    that an error names."""
    if any(tensor.is_mkldnn for tensor in (*old, *new)):
        return False
    if [(each.shape, each.dtype) for each in old] != [(each.shape, each.dtype) for each in new]:
        raise CheckpointError(
            f"{name}: the weights loaded again have another form than those before, which captured graphs read: start the engine anew."
        )
    for before, after in zip(old, new, strict=True):
        if before.data_ptr() != after.data_ptr():
            before.copy_(after)
    return True


def set_buffer(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set a derived buffer, at the address that a captured graph may read if it has been set
    before."""
    before = module._buffers.get(name)  # noqa: SLF001 - an attribute may have this name before it is a buffer
    if before is None or before.is_meta or not replace_values([before], [value], name):
        module.register_buffer(name, value, persistent=False)


def register_tensors(module: nn.Module, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Make the tensors of a GEMM buffers of the module, which count as its memory, except those
    that share the memory of its parameters."""
    places = {parameter.untyped_storage().data_ptr() for parameter in module.parameters(recurse=False) if parameter.numel()}
    for index, tensor in enumerate(tensors):
        if tensor.is_mkldnn or tensor.untyped_storage().data_ptr() not in places:
            module.register_buffer(f"{name}_{index}", tensor, persistent=False)
