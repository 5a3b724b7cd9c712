"""Checkpoint tensors that hold several layers' weights, divided into one tensor for each layer
without reading them.

Used by models in `Decoder.map_weights`. Must not know which checkpoint stores what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    parts: list[LazyTensor] = []
    start = 0
    for size in sizes:
        parts.append(TensorRows(tensor, start // block, size // block))
        start += size
    return parts


def split_layers(
    weights: Iterable[tuple[str, LazyTensor]], fused: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[str, LazyTensor]]:
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
