"""Checkpoint tensors that hold several layers' weights, divided into one tensor for each layer
without reading them.

Used by models in `Decoder.map_weights`. Must not know which checkpoint stores what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from frame.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from frame.core.interfaces.model import LazyTensor
    from frame.core.interfaces.weight_format import Axis, WeightFormat

_INPUTS = 1 << 14  # of a layer that is only asked how its outputs are stored


class TensorPart:
    """`size` entries of a lazy tensor from `start` along a dimension. Slicing reads only the
    slice."""

    def __init__(self, whole: LazyTensor, start: int, size: int, dim: int = 0) -> None:
        self.whole, self.start, self.dim = whole, start, dim
        self.shape = (*whole.shape[:dim], size, *whole.shape[dim + 1 :])

    def __getitem__(self, index: Any) -> torch.Tensor:
        spans = [] if index is Ellipsis else [*index] if isinstance(index, tuple) else [index]
        spans += [slice(None)] * (self.dim + 1 - len(spans))
        first, last, step = spans[self.dim].indices(self.shape[self.dim])
        if step != 1:
            raise IndexError("a part of a checkpoint tensor is read in order: use a step of 1")
        spans[self.dim] = slice(self.start + first, self.start + last)
        return self.whole[tuple(spans)]


class TensorView:
    """A lazy tensor of `shape` that `read` reads: it gets one slice for each dimension."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], torch.Tensor]) -> None:
        self.shape = shape
        self.read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        index_by_dim = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        selected = [index_by_dim[dim] if dim < len(index_by_dim) else slice(None) for dim in range(len(self.shape))]
        return self.read(tuple(slice(*each.indices(size)) for each, size in zip(selected, self.shape, strict=True)))


def split_experts(prefix: str, tensor: LazyTensor, names: Sequence[str], *, interleaved: bool) -> Iterator[tuple[str, LazyTensor]]:
    """The weights of single layers of a tensor [experts, inputs, outputs of all `names`], as
    `prefix`.N.name.weight [outputs, inputs]. `interleaved`: outputs of the layers alternate."""
    experts, inputs, total = tensor.shape
    size, step = total // len(names), len(names)
    for expert in range(experts):
        for place, name in enumerate(names):

            def read(index: tuple[slice, ...], expert: int = expert, place: int = place) -> torch.Tensor:
                outputs, columns = index
                if not interleaved:
                    span = slice(place * size + outputs.start, place * size + outputs.stop)
                    return tensor[expert : expert + 1, columns, span][0].T
                span = slice(outputs.start * step, outputs.stop * step)
                return tensor[expert : expert + 1, columns, span][0][:, place::step].T

            yield f"{prefix}.{expert}.{name}.weight", TensorView((size, inputs), read)


def split_expert_biases(prefix: str, tensor: LazyTensor, names: Sequence[str]) -> Iterator[tuple[str, LazyTensor]]:
    """The biases of single layers of a tensor [experts, outputs of all `names`, which alternate],
    as `prefix`.N.name.bias [outputs]."""
    experts, total = tensor.shape
    step = len(names)
    for expert in range(experts):
        for place, name in enumerate(names):

            def read(index: tuple[slice, ...], expert: int = expert, place: int = place) -> torch.Tensor:
                return tensor[expert : expert + 1, index[0].start * step : index[0].stop * step][0, place::step]

            yield f"{prefix}.{expert}.{name}.bias", TensorView((total // step,), read)


def split_packed_experts(prefix: str, tensor: LazyTensor, names: Sequence[str], part: str) -> Iterator[tuple[str, LazyTensor]]:
    """The packed weights or scales of single layers of a tensor [experts, outputs of all `names`,
    groups of inputs, values of a group, if there are several], as `prefix`.N.name.part [outputs,
    groups * values]. The outputs of the layers alternate."""
    experts, total, groups, *rest = tensor.shape
    step, width = len(names), rest[0] if rest else 1
    for expert in range(experts):
        for place, name in enumerate(names):

            def read(index: tuple[slice, ...], expert: int = expert, place: int = place) -> torch.Tensor:
                rows, columns = index
                first, last = columns.start // width, -(-columns.stop // width)
                row_values = tensor[expert : expert + 1, rows.start * step : rows.stop * step, first:last][0, place::step]
                return row_values.flatten(1)[:, columns.start - first * width : columns.stop - first * width]

            yield f"{prefix}.{expert}.{name}.{part}", TensorView((total // step, groups * width), read)


def split_stacked_experts(
    weights: Iterable[tuple[str, LazyTensor]], layers: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors, with `experts.gate_up_proj` [experts, 2 * inner, hidden] and `experts.down_proj`
    [experts, hidden, inner] divided by expert and layer. `layers`: names of gate, up and down."""
    for name, tensor in weights:
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts") or last not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        names = layers[:2] if last == "gate_up_proj" else layers[2:]
        experts, outputs, inputs = tensor.shape
        size = outputs // len(names)
        for expert in range(experts):
            for place, layer in enumerate(names):

                def read(
                    index: tuple[slice, ...], tensor: LazyTensor = tensor, expert: int = expert, first: int = place * size
                ) -> torch.Tensor:
                    rows, columns = index
                    return tensor[expert : expert + 1, first + rows.start : first + rows.stop, columns][0]

                yield f"{prefix}.{expert}.{layer}.weight", TensorView((size, inputs), read)


def split_layers(
    weights: Iterable[tuple[str, LazyTensor]], fused: Mapping[str, Mapping[str, int]], weight_format: WeightFormat | None = None
) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors, with those of a fused layer divided. `fused`: its name -> the layers' names and
    their numbers of outputs, in order. `weight_format`: of the checkpoint, if it is quantized."""
    for name, tensor in weights:
        prefix, _, rest = name.rpartition(".")
        parent, _, layer = prefix.rpartition(".")
        if layer not in fused:
            yield name, tensor
            continue
        parts, sizes = list(fused[layer]), list(fused[layer].values())
        outputs = _find_outputs(weight_format, f"{parent}.{parts[0]}", rest, sizes)
        is_number = all(size == 1 for size in tensor.shape)
        pieces = [tensor] * len(parts) if outputs is None or is_number else _split_outputs(name, tensor, sizes, *outputs)
        for part, piece in zip(parts, pieces, strict=True):
            yield f"{parent}.{part}.{rest}", piece


def _find_outputs(weight_format: WeightFormat | None, layer: str, tensor: str, sizes: Sequence[int]) -> tuple[int, Axis | None] | None:
    """The dimension of a layer's tensor along which its outputs lie, and its axis if the format
    describes the tensor; None: the tensor has no outputs, and all layers share it."""
    stored = {} if weight_format is None else weight_format.describe_layer(layer, "linear").list_tensors(_INPUTS, sizes)
    if tensor not in stored:
        return (0, None) if tensor in ("weight", "bias") else None
    axes = enumerate(stored[tensor].axes)
    return next(((dim, axis) for dim, axis in axes if not isinstance(axis, int) and axis.of == "output"), None)


def _split_outputs(name: str, tensor: LazyTensor, sizes: Sequence[int], dim: int, axis: Axis | None) -> list[LazyTensor]:
    """The entries of a dimension in parts of as many outputs. An axis that splits may be coarser
    than it says. Raises CheckpointError for another shape."""
    length, total = tensor.shape[dim], sum(sizes)
    entries, block = (1, -(-total // length)) if axis is None else (axis.entries, axis.block)
    if length != -(-total * entries // block) and axis is not None and axis.splits:
        entries, block = 1, -(-total // length)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    if any(start % block for start in starts) or length != -(-total * entries // block):
        raise CheckpointError(
            f"{name} has the shape {list(tensor.shape)}, which cannot be divided into parts of {list(sizes)} outputs: "
            "a quantization block may not cross two parts; check that config.json belongs to this checkpoint."
        )
    return [
        TensorPart(tensor, start // block * entries, -(-size * entries // block), dim) for start, size in zip(starts, sizes, strict=True)
    ]
