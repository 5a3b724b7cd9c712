"""AWQ checkpoints (AutoAWQ's "gemm" version; arXiv 2306.00978): 4-bit integers, packed along the
outputs, with scales and zero points per group of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import CanonicalWeight, FormatContext, LayerFormat, LayerKind, StoredTensor
from frame.quantization.gptq import group_axis
from frame.quantization.integers import Integers, unpack_words, word_axis
from frame.quantization.listed import ListedFormat
from frame.quantization.plain import INPUTS, OUTPUTS

if TYPE_CHECKING:
    from pydantic import BaseModel

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of its eight outputs


class Awq(ListedFormat):
    """Reads `quantization_config`."""

    conformance_config: ClassVar[dict[str, Any]] = {"bits": 4, "group_size": 32}

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        config = self.config
        version, bits = str(config.get("version") or "gemm").lower(), config.get("bits", config.get("w_bit"))
        if version != "gemm":
            raise CheckpointError(f"quantization_config.version is {version!r}; of AWQ's versions gemm is read.")
        if bits != _BITS:
            raise CheckpointError(f"quantization_config.bits is {bits!r}; of AWQ's numbers of bits {_BITS} is read.")
        group = config.get("group_size", config.get("q_group_size", 128))
        if not isinstance(group, int) or group < -1 or group == 0:
            raise CheckpointError(f"quantization_config.group_size is {group!r}; a positive number or -1 (all inputs) is expected.")
        self._group = max(0, group)

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        return AwqLayer(self.context.dtype, self._group)


@dataclass(frozen=True, slots=True)
class AwqLayer(LayerFormat):
    """`qweight` [inputs, outputs / 8], `qzeros` [groups, outputs / 8], `scales` [groups, outputs].
    `group`: inputs of a group (0: all)."""

    dtype: torch.dtype
    group: int

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        by_group = group_axis(self.group, ordered=False)
        return {
            "qweight": StoredTensor(torch.int32, (INPUTS, word_axis("output", _BITS))),
            "qzeros": StoredTensor(torch.int32, (by_group, word_axis("output", _BITS))),
            "scales": StoredTensor(torch.float32, (by_group, OUTPUTS)),
        }

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        quantized, zeros = (_unpack(tensors[name]).transpose(-1, -2) for name in ("qweight", "qzeros"))
        return Integers(_BITS, quantized, tensors["scales"].transpose(-1, -2), zeros).to_canonical(self.dtype)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 8 n]."""
    places = torch.tensor(_PLACES, device=words.device)
    return unpack_words(words, _BITS).unflatten(-1, (-1, len(_PLACES))).index_select(-1, places).flatten(-2)
