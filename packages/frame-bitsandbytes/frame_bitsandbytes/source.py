"""Reads bitsandbytes checkpoints: matrices in place of the library's flat bytes, and scales in
place of quantized scales.

bitsandbytes stores an NF4 weight W as `W` uint8 [n / 2, 1], `W.absmax`, `W.quant_map`, a JSON text
in `W.quant_state.bitsandbytes__nf4`, and, with double quantization, `W.nested_absmax` and
`W.nested_quant_map`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import NF4
from frame.interfaces.weights import FileRange, WeightSource, WeightSourceContext
from frame.plugins.weight_sources.safetensors import SafetensorsSource
from frame_bitsandbytes.format import NF4_BLOCK

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.model import LazyTensor

_STATE = ".quant_state.bitsandbytes__"
_LARGEST_STATE = 1 << 16  # bytes; usual ones have 200
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


class MadeTensor:
    """A tensor of known shape that is computed when it is read."""

    def __init__(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> None:
        self.shape, self._make = shape, make

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._make()[index]


class BitsAndBytesSource(WeightSource):
    """The safetensors files of a folder. Of each NF4 layer `weight` and `absmax` are listed."""

    def __init__(self, context: WeightSourceContext, options: BaseModel | None = None) -> None:
        self._stored = SafetensorsSource(context)
        self._names = frozenset(self._stored.list_names())
        states = [name.partition(_STATE) for name in self._stored.list_names() if _STATE in name]
        self._states = {weight: self._read_state(weight, kind) for weight, _, kind in states}

    def list_names(self) -> Sequence[str]:
        listed = [name for name in self._stored.list_names() if _STATE not in name and not name.endswith(_PARTS)]
        return [*listed, *(name.removesuffix("weight") + "absmax" for name in self._states)]

    def open_tensor(self, name: str) -> LazyTensor:
        weight = name.removesuffix("absmax") + "weight" if name.endswith(".absmax") else name
        if weight not in self._states:
            return self._stored.open_tensor(name)
        outputs, inputs = self._states[weight]["shape"]
        if weight == name:
            return MadeTensor((outputs, inputs // 2), lambda: self._read(name).view(outputs, inputs // 2))
        return MadeTensor((outputs, inputs // NF4_BLOCK), lambda: self._read_scales(weight).view(outputs, inputs // NF4_BLOCK))

    def find_range(self, name: str) -> FileRange | None:
        made = name.endswith(".absmax") or name in self._states
        return None if made else self._stored.find_range(name)

    def close(self) -> None:
        self._stored.close()

    def _read(self, name: str) -> torch.Tensor:
        return self._stored.open_tensor(name)[...]

    def _read_state(self, weight: str, kind: str) -> dict[str, Any]:
        """The JSON text of a layer, checked. Raises CheckpointError that names what is wrong."""
        name = f"{weight}{_STATE}{kind}"
        try:
            if math.prod(self._stored.open_tensor(name).shape) > _LARGEST_STATE:
                raise ValueError(f"it is longer than {_LARGEST_STATE} bytes")
            state: dict[str, Any] = json.loads(bytes(self._read(name).tolist()))
            outputs, inputs = state["shape"]
            block, nested = state["blocksize"], f"{weight}.nested_absmax" in self._names
            sizes = (outputs, inputs, block, *([state["nested_blocksize"]] if nested else ()))
            if nested:
                float(state["nested_offset"])
            if not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ValueError(f"sizes {sizes}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{name} is no description of a layer ({error!r}): download the checkpoint again.") from error
        if kind != "nf4" or block % NF4_BLOCK or inputs % NF4_BLOCK:
            raise CheckpointError(
                f"{name}: {kind} of {outputs} x {inputs} in blocks of {block} is not read; nf4 is, in blocks and with inputs that are "
                f"multiples of {NF4_BLOCK}."
            )
        blocks = -(-outputs * inputs // block)
        wanted = {weight: outputs * inputs // 2, f"{weight}.absmax": blocks, f"{weight}.quant_map": len(NF4)}
        if nested:
            wanted |= {f"{weight}.nested_absmax": -(-blocks // state["nested_blocksize"]), f"{weight}.nested_quant_map": 256}
        for part, size in wanted.items():
            if part not in self._names:
                raise CheckpointError(f"the checkpoint lacks {part}: download it again.")
            shape, found = list(self._stored.open_tensor(part).shape), self._stored.find_range(part)
            dtype = None if found is None else found.dtype
            bytes_expected = part == weight or (nested and part == f"{weight}.absmax")
            expected = torch.uint8 if bytes_expected else torch.float32
            if dtype != expected:
                raise CheckpointError(f"{part} is stored as {dtype}, which is not read: {expected} is expected.")
            if shape not in ([size], [size, 1]):
                raise CheckpointError(f"{part} has the shape {shape}, but {size} entries are expected: download the checkpoint again.")
        if not torch.equal(self._read(f"{weight}.quant_map"), torch.tensor(NF4)):
            raise CheckpointError(f"{weight}.quant_map holds other values than NF4: the checkpoint is not read.")
        return state

    def _read_scales(self, weight: str) -> torch.Tensor:
        """float32, one for each 64 weights: larger blocks run over the ends of rows, and are
        repeated. Of double quantization the values times a scale per block,
        plus an offset."""
        scales, state = self._read(f"{weight}.absmax"), self._states[weight]
        if f"{weight}.nested_absmax" in self._names:
            outer = self._read(f"{weight}.nested_absmax")[torch.arange(len(scales)) // state["nested_blocksize"]]
            scales = self._read(f"{weight}.nested_quant_map")[scales.long()] * outer + state["nested_offset"]
        outputs, inputs = state["shape"]
        return scales.repeat_interleave(state["blocksize"] // NF4_BLOCK)[: outputs * inputs // NF4_BLOCK]
