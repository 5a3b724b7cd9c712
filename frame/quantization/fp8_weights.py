"""Quantization to fp8 (e4m3), and scales by blocks.

Depends on no checkpoint format and no layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128  # block size (outputs and inputs) of weights that are quantized here
_SMALLEST = 1e-12


def coarsen(scales: torch.Tensor, step: tuple[int, int], block: tuple[int, int]) -> tuple[torch.Tensor, tuple[int, int]]:
    """Scales [..., outputs / step, inputs / step] by blocks of `block`, if they are equal inside
    each block, as those on the meta device count; otherwise as they are. -> (scales, their
    block)."""
    by_rows, by_columns = block[0] // step[0], block[1] // step[1]
    coarse = scales[..., ::by_rows, ::by_columns].contiguous()
    again = coarse.repeat_interleave(by_rows, -2).repeat_interleave(by_columns, -1)
    is_equal = scales.is_meta or torch.equal(again[..., : scales.shape[-2], : scales.shape[-1]], scales)
    return (coarse, block) if is_equal else (scales, step)


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
