"""fp8 (e4m3) weights and their scales: parameters that load them, dequantization, and quantization.

Depends on no checkpoint format and no layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F

from frame.models.layers.parameter import Part, ShardedParameter, ShardRule
from frame.quantization.fp8_format import Sharing

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128  # block size (outputs and inputs) of weights that are quantized here
_SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Scales:
    """float32 [outputs / rows, inputs / columns]: each scale covers `rows` outputs and `columns`
    inputs. `columns` 0: all inputs, [outputs]."""

    values: torch.Tensor
    rows: int = 1
    columns: int = 0

    def coarsen(self, rows: int, columns: int) -> Self:
        """The same scales by blocks of `rows` and `columns`, if they are equal inside each block;
        otherwise these."""
        if not self.columns:
            return self
        by_rows, by_columns = rows // self.rows, columns // self.columns
        coarse = self.values[::by_rows, ::by_columns].contiguous()
        again = coarse.repeat_interleave(by_rows, 0).repeat_interleave(by_columns, 1)
        if not torch.equal(again[: self.values.shape[0], : self.values.shape[1]], self.values):
            return self
        return type(self)(coarse, rows, columns)


def dequantize(weight: torch.Tensor, scales: Scales, dtype: torch.dtype) -> torch.Tensor:
    """weight * scale, [outputs, inputs] in `dtype`."""
    values = scales.values
    if scales.columns:
        outputs, inputs = weight.shape
        values = values.repeat_interleave(scales.rows, 0)[:outputs].repeat_interleave(scales.columns, 1)[:, :inputs]
    else:
        values = values[:, None]
    return weight.float().mul_(values).to(dtype)


def quantize_outputs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] -> (e4m3 of the same shape, float32 [outputs]). The largest magnitude of a
    row becomes 448."""
    numbers = weight.float()
    scale = (numbers.abs().amax(1) / FP8_MAX).clamp_min_(_SMALLEST)
    return (numbers / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] -> (e4m3 of the same shape, float32 [outputs / 128, inputs / 128], both
    rounded up)."""
    outputs, inputs = weight.shape
    padded = F.pad(weight.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min_(_SMALLEST)
    rounded = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return rounded.flatten(2, 3).flatten(0, 1)[:outputs, :inputs].contiguous(), scale


def make_scale_parameter(
    sharing: Sharing, block: tuple[int, int], output_sizes: Sequence[int], input_size: int, experts: int = 0
) -> ShardedParameter:
    """The scales of a layer of `output_sizes` in one matrix, or of `experts` such layers.

    By block; per output (as a column); or per output with one number in the checkpoint's tensor.
    Block scales are stored as finely as parts that end inside a block require.
    """
    lead, first, expert = ((experts,), 1, 0) if experts else ((), 0, None)
    outputs = sum(output_sizes)
    if sharing == "block":
        rows, columns = gcd(block[0], *output_sizes), gcd(block[1], input_size)
        rule = ShardRule(first, first + 1, expert, *block, output_step=rows, input_step=columns)
        shape: tuple[int, ...] = (outputs // rows, input_size // columns)
    elif sharing == "channel":
        rule, shape = ShardRule(first, expert=expert), (outputs, 1)
    else:
        rule, shape = ShardRule(first, expert=expert, scalar=True), (outputs,)
    return ShardedParameter(torch.empty(*lead, *shape, dtype=torch.float32), rule)


class Fp8Parameter(ShardedParameter):
    """Values as a checkpoint stores them. A load after the layer was dequantized (`data` of another
    dtype) starts with a new tensor."""

    def load(self, name: str, tensor: LazyTensor) -> None:
        if self.dtype != FP8:
            self.data = torch.empty(0, dtype=FP8, device=self.device)
        super().load(name, tensor)


class RoundedParameter(Fp8Parameter):
    """e4m3 values quantized from unquantized checkpoints while loading, tensor by tensor, so that
    the unquantized weights are never all in memory.

    `scales`: one per output ([outputs]) or, for experts, one per block of 128 x 128 ([experts, …]);
    None before the first load.
    """

    scales: torch.Tensor | None = None

    def write(self, part: Part, value: torch.Tensor) -> None:
        value = value.to(self.device)
        if self.scales is None:
            *experts, outputs, inputs = self.whole_shape
            shape = (*experts, -(-outputs // BLOCK), -(-inputs // BLOCK)) if experts else (outputs,)
            self.scales = torch.ones(shape, dtype=torch.float32, device=self.device)
        if self.dim() == 2:
            rounded, scale = quantize_outputs(value)
            self.scales[part.write[0]] = scale
        else:
            rounded, scale = quantize_blocks(value)
            expert, rows, columns = part.write
            self.scales[expert, _blocks(rows), _blocks(columns)] = scale
        super().write(part, rounded)


def _blocks(span: slice | int) -> slice | int:
    """The blocks that a span of whole blocks covers."""
    return span if isinstance(span, int) else slice(span.start // BLOCK, -(-span.stop // BLOCK))
