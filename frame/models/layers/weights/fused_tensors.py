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


class TensorRows:
    """`size` rows of a lazy tensor from `start`. Slicing reads only the slice."""

    def __init__(self, whole: LazyTensor, start: int, size: int) -> None:
        self.whole = whole
        self.start = start
        self.shape = (size, *whole.shape[1:])

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        if rows is Ellipsis:
            return self.whole[self.start : self.start + self.shape[0]]
        first, last, step = rows.indices(self.shape[0])
        if step != 1:
            raise IndexError("rows of a checkpoint tensor are read one after another: use a step of 1")
        return self.whole[(slice(self.start + first, self.start + last), *rest)]


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


def split_stacked_experts(weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors, with `experts.gate_up_proj` [experts, 2 * inner, hidden] and `experts.down_proj`
    [experts, hidden, inner] divided by expert and layer."""
    for name, tensor in weights:
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts") or last not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
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


def split_rows(name: str, tensor: LazyTensor, sizes: Sequence[int]) -> list[LazyTensor]:
    """The tensor's rows in parts of `sizes`, or of as many blocks of rows; one number goes to all
    parts. Raises CheckpointError for another shape."""
    if tuple(tensor.shape) in {(), (1,)}:
        return [tensor] * len(sizes)
    rows, total = tensor.shape[0], sum(sizes)
    block = -(-total // rows)
    if any(size % block for size in sizes) or rows * block != total:
        raise CheckpointError(
            f"{name} has the shape {list(tensor.shape)}, whose rows cannot be divided into parts of {list(sizes)}: "
            "check that config.json belongs to this checkpoint."
        )
    pieces: list[LazyTensor] = []
    start = 0
    for size in sizes:
        pieces.append(TensorRows(tensor, start // block, size // block))
        start += size
    return pieces


def split_layers(weights: Iterable[tuple[str, LazyTensor]], fused: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors, with those of a fused layer divided. `fused`: its name -> the layers' names and
    their numbers of outputs, in order."""
    for name, tensor in weights:
        prefix, _, rest = name.rpartition(".")
        parent, _, layer = prefix.rpartition(".")
        if layer not in fused:
            yield name, tensor
            continue
        for part, rows in zip(fused[layer], split_rows(name, tensor, list(fused[layer].values())), strict=True):
            yield f"{parent}.{part}.{rest}", rows
