"""The interface of weight formats: how a checkpoint stores the weights of each layer
(`weight_format/2`), and the canonical form that every GEMM kernel multiplies.

A format describes tensors by their axes and makes the canonical form of them. It must not know
ranks, merged layers or kernels: the layers shard what the axes describe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from pydantic import BaseModel


LayerKind = Literal["linear", "experts", "head"]
QuantType = Literal["plain", "int4", "int8", "e2m1", "nf4", "e4m3"]

NIBBLES: tuple[QuantType, ...] = ("int4", "e2m1", "nf4")  # two values in each byte
BLOCK = 32  # inputs whose 4-bit values are packed together: the low nibbles hold the first half
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what the values 0 … 7 stand for; 8 … 15 are their negatives
NF4 = (  # the values of NormalFloat4 (QLoRA, arXiv 2305.14314): quantiles of a normal distribution
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_TENSORS = "quantized", "scales", "zeros", "outer", "order", "input_scale", "minima"
_OFFSET = 8  # of unsigned int4 values without zero points


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The numeric form of a weight: what a kernel must support to multiply it.

    `quant_type`: "plain" (the model's dtype, no scales), "int4" (unsigned), "int8" (signed), "e2m1"
    and "e4m3" (floats), "nf4" (indices of `NF4`). `group`: (outputs, inputs) that share one scale;
    0: all. `zeros`: each scale has a zero point. `ordered`: the inputs are permuted (act-order).
    `minima`: each scale has a minimum, a float, in place of a zero point.
    """

    quant_type: QuantType
    group: tuple[int, int] = (1, 0)
    zeros: bool = False
    ordered: bool = False
    minima: bool = False

    def __str__(self) -> str:
        words: list[str] = [self.quant_type]
        if self.quant_type != "plain":
            words.append(f"by {' x '.join(str(size or 'all') for size in self.group)}")
        names = ("with zero points", self.zeros), ("with minima", self.minima), ("in act-order", self.ordered)
        return " ".join([*words, *(name for name, is_set in names if is_set)])


@dataclass(slots=True)
class CanonicalWeight:
    """A weight [..., outputs, inputs] in canonical form; a leading dimension counts experts.

    `quantized`: [..., outputs, columns], of the dtype of the scheme (plain: the model's; int8:
    int8; e4m3: float8_e4m3fn; 4 bits: uint8, padded to blocks of 32 columns, in 16 bytes each,
    whose first half is in the low nibbles). `scales`: floats [..., outputs / rows, columns /
    width], rounded up, with (rows, width) the scheme's group. `zeros`: int8 of the same shape,
    subtracted from `quantized` (None: 0, and 8 for int4 without minima). `minima`: floats of the
    same shape, subtracted from quantized * scale (None: 0). `outer`: float32 [..., outputs], a
    second scale that multiplies the first, or, with `divides`, divides it (None: 1). `order`: int32
    [..., columns], the input that each column multiplies; a column whose weight is zero may repeat
    an input. Without it the columns are the inputs. `input_scale`: float32 [..., outputs], the
    scale by which inputs are quantized to the type of `quantized`, where the checkpoint was made so
    (None: one for each token); of merged layers each its own. `quantizes_inputs`: the checkpoint
    was made for inputs quantized to int8, one scale per token, so a kernel may quantize them.
    """

    scheme: WeightScheme
    inputs: int
    quantized: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    outer: torch.Tensor | None = None
    order: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    divides: bool = False
    quantizes_inputs: bool = False
    minima: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        return int(self.quantized.shape[-2])

    @property
    def columns(self) -> int:
        """Columns of `quantized`, without the padding of 4-bit values."""
        return self.inputs if self.order is None else int(self.order.shape[-1])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are present, by name."""
        named = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def expert(self, index: int) -> CanonicalWeight:
        """The weight of one expert."""
        tensors: dict[str, Any] = {name: tensor[index] for name, tensor in self.tensors.items()}
        return replace(self, **tensors)

    def numbers(self) -> torch.Tensor:
        """`quantized` without scales and zero points: float32 [..., outputs, columns]."""
        quantized = self.quantized
        if self.scheme.quant_type not in NIBBLES:
            return quantized.float()
        nibbles = unpack_nibbles(quantized)[..., : self.columns]
        if self.scheme.quant_type == "int4":
            return nibbles.float()
        values = NF4 if self.scheme.quant_type == "nf4" else (*E2M1, *(-value for value in E2M1))
        table = nibbles.new_tensor(values, dtype=_float32())
        return table[nibbles.long()]

    def spread_scales(self) -> torch.Tensor:
        """The scale of every value, float32 [..., outputs, columns]."""
        assert self.scales is not None
        scales = self.scales.float()
        if self.outer is not None:
            outer = self.outer.unsqueeze(-1)
            scales = scales / outer if self.divides else scales * outer
        return _spread(scales, self.scheme.group, self.outputs, self.columns)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The reference: (quantized - zero point) * scale - minimum in float32, rounded to `dtype`,
        [..., outputs, inputs]."""
        if self.scheme.quant_type == "plain":
            return self.quantized.to(dtype)
        numbers = self.numbers()
        if self.zeros is not None:
            numbers -= _spread(self.zeros.float(), self.scheme.group, self.outputs, self.columns)
        elif self.scheme.quant_type == "int4" and self.minima is None:
            numbers -= _OFFSET
        numbers *= self.spread_scales()
        if self.minima is not None:
            numbers -= _spread(self.minima.float(), self.scheme.group, self.outputs, self.columns)
        if self.order is None:
            return numbers.to(dtype)
        whole = numbers.new_zeros(*numbers.shape[:-1], self.inputs)
        return whole.scatter_add_(-1, self.order.long().unsqueeze(-2).expand_as(numbers), numbers).to(dtype)


def pack_nibbles(quantized: torch.Tensor) -> torch.Tensor:
    """uint8 values below 16, [..., columns] -> [..., columns / 2]; a multiple of 32 columns."""
    low, high = quantized.unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    halves = packed.unflatten(-1, (-1, 1, BLOCK // 2)).expand(*packed.shape[:-1], -1, 2, -1).clone()
    halves.select(-2, 0).bitwise_and_(15)
    halves.select(-2, 1).bitwise_right_shift_(4)
    return halves.flatten(-3)


def _spread(values: torch.Tensor, group: tuple[int, int], outputs: int, columns: int) -> torch.Tensor:
    """Repeat the entry of each group for all of its values."""
    rows, width = group[0] or outputs, group[1] or columns
    return values.repeat_interleave(rows, -2)[..., :outputs, :].repeat_interleave(width, -1)[..., :columns]


def _float32() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a stored tensor: `entries` entries for every `block` outputs or inputs.

    `splits`: an entry may be repeated for pieces of its block, as a scale may be and a packed word
    may not. `whole`: every rank has all entries, whatever its inputs.
    """

    of: Literal["output", "input"]
    block: int = 1
    entries: int = 1
    splits: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One checkpoint tensor of a layer. `axes`: its dimensions; a number is a dimension of fixed
    size.

    A tensor without an output axis is kept for each merged part, unless it is `scalar`: one number,
    which is spread over the outputs. `optional`: the checkpoint may lack it, and it is zero then.
    """

    dtype: torch.dtype
    axes: tuple[Axis | int, ...]
    scalar: bool = False
    optional: bool = False


class LayerFormat(ABC):
    """How one layer, or the experts of one layer, are stored. Merged layers share parameters where
    their formats are equal (`==`)."""

    quantizes: ClassVar[bool] = False  # the checkpoint stores plain weights, which `quantize_weight` quantizes while loading

    @abstractmethod
    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        """The tensors by their checkpoint names after the layer's name. The sizes are those of this
        rank, `outputs` by merged part."""

    @abstractmethod
    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        """Make the canonical form of this rank's tensors.

        Each has a leading dimension for experts if the layer has them. Entries of a splitting axis
        may be finer than the checkpoint's: their number gives their size. Without a change the
        result may share the memory of the tensors.
        """

    def quantize_weight(self, weight: torch.Tensor, outputs: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Quantize a plain weight [outputs, inputs], one of the parts `outputs`: `list_tensors`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FormatContext:
    """What a format is built from. `checkpoint_config`: the checkpoint's `quantization_config`;
    None for plain weights. `folder`: of the checkpoint, for formats whose files describe them."""

    dtype: torch.dtype
    checkpoint_config: Mapping[str, Any] | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class FormatRequirements:
    """What a checkpoint requires of a weight format."""

    checkpoint: str | None  # its `quant_method`; None: plain weights


@dataclass(frozen=True, slots=True)
class FormatCapabilities:
    """What a weight format can do."""

    checkpoints: tuple[str | None, ...]  # `quant_method`s that it reads; None: plain weights, also where it quantizes them
    quant_types: tuple[QuantType, ...] = ("plain",)  # that its layers may have

    def unsupported(self, requirements: FormatRequirements) -> list[Reason]:
        if requirements.checkpoint in self.checkpoints:
            return []
        return [Reason(f"does not load {requirements.checkpoint or 'plain'} weights")]


class WeightFormat(ABC):
    """Chooses the storage of each layer, which covers mixed schemes and ignore lists."""

    ignored_weights: tuple[str, ...] = ()  # regular expressions, matched from the start, of checkpoint names that are not loaded

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        self.context = context

    @abstractmethod
    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        """How the layer with the checkpoint name `name` is stored. For experts, the name ends in
        `experts`. Raises CheckpointError for a scheme that the format does not read."""
