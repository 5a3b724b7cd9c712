"""The weight source of GGUF files: bytes of blocks for weights that stay quantized, float32 for
others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf.quants import dequantize

from frame.core.errors import CheckpointError
from frame.interfaces.weights import WeightSource, WeightSourceContext
from frame_gguf.names import Place, read_places

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.model import LazyTensor


class GgufSource(WeightSource):
    """The tensors of the one GGUF file in a folder."""

    def __init__(self, context: WeightSourceContext, options: BaseModel | None = None) -> None:
        self._places = read_places(context.folder)
        self._context = context

    def list_names(self) -> Sequence[str]:
        return list(self._places)

    def open_tensor(self, name: str) -> LazyTensor:
        tensor = GgufTensor(name, self._places[name])
        if self._places[name].is_kept and self._context.expected_shapes().get(name) == tensor.unpacked_shape:
            raise CheckpointError(f"{name} is stored in blocks of {self._places[name].type}: set model.quantization: gguf.")
        return tensor


class GgufTensor:
    """A tensor of the file, [outputs, bytes of a row] if it stays quantized."""

    def __init__(self, name: str, place: Place) -> None:
        self._name, self._place = name, place
        self._data = place.tensor.data if place.expert is None else place.tensor.data[place.expert]
        shape = tuple(int(size) for size in reversed(place.tensor.shape))
        self.unpacked_shape = shape if place.expert is None else shape[1:]
        self.shape = self._data.shape if place.is_kept else self.unpacked_shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        rows = slice(None) if rows is Ellipsis else rows
        data = self._data[self._order()[rows]] if self._place.heads else self._data[rows]
        if self._place.is_kept:
            return torch.from_numpy(np.array(data[:, *rest] if rest else data))
        try:
            numbers = dequantize(data, self._place.tensor.tensor_type)
        except NotImplementedError:
            raise CheckpointError(f"{self._name} is stored as {self._place.type}, which gguf does not dequantize.") from None
        return torch.from_numpy(np.array(numbers[:, *rest] if rest else numbers, np.float32))

    def _order(self) -> np.ndarray:
        """The rows in their order before llama.cpp's permutation, which pairs the halves of a
        head."""
        rows: np.ndarray = np.arange(len(self._data)).reshape(self._place.heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return rows
