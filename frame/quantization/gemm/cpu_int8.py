"""GEMMs with int8 weights on a CPU: by oneDNN's integer matmuls, or on CPUs without VNNI by
PyTorch's packed kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.weight_format import CanonicalWeight
from frame.quantization.gemm.each_expert import EachExpert

# PyTorch's int8 kernel reads half the bytes but uses no matrix instructions, so it is faster only
# for few rows. Xeon with AMX, 2048 x 2048, µs at 1, 4, 8, 16 rows: 630, 1540, 2580, 5240;
# dequantized to bfloat16: 5000 to 6000 for any number.
_KERNEL_ROWS = 8
_SMALLEST = 1e-30
_MULTIPLE = 32  # the int8 kernel reads past the end of rows of other lengths
_DIGIT = 128  # of inputs as numbers of two digits, each an int8
_MAXIMUM = 127 * _DIGIT  # the largest magnitude of a row
# Rows up to which both digits of the inputs cost less than dequantizing the weight on a CPU with
# AMX. 3072 x 1024, ms at 1, 8, 32, 128 rows with weights in memory: two digits 1.5, 1.7, 2.9, 6.4;
# one digit 1.4, 1.4, 2.1, 2.7; bfloat16 3.3, 3.5, 4.1, 5.3; dequantized 5.6, 5.1, 7.4, 6.2. Without
# AMX they always cost less. One core with VNNI, ms at 1, 8, 128, 1024 rows: two digits 0.2, 0.3,
# 2.5, 22; dequantized 1.2, 1.5, 11, 79.
_DIGIT_ROWS = 64
# Rows from which on AMX multiplies signed inputs. For fewer, oneDNN's reference multiplies small
# weights, 3 ms instead of 0.01; of unsigned inputs it multiplies none.
_SIGNED_ROWS = 16
_ZERO = 128  # what is added to signed inputs to make them unsigned


class Int8CpuKernel(GemmKernel):
    """int8 weights with one scale per output."""

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        if weight.quantized.device.type not in ("cpu", "meta"):
            return "the weight is not on a CPU"
        if weight.scheme.group != (1, 0) and weight.scheme.group != (1, weight.columns):
            return "it takes one scale per output"
        if weight.zeros is not None or weight.order is not None:
            return "it takes no zero points or order"
        return None

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return PackedInt8Gemm(weight) if self._packs() else Int8Gemm(weight, self.context.dtype)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return EachExpert([self.prepare(weight.expert(index)) for index in range(len(weight.quantized))])

    def count_bytes(self, weight: CanonicalWeight) -> int:
        copies = 2 if self._packs() and not weight.quantizes_inputs and _has_amx() else 1
        scale = 4 if self._packs() else self.context.dtype.itemsize
        return weight.quantized.nbytes * copies + weight.quantized.shape[:-1].numel() * scale

    def _packs(self) -> bool:
        """Whether GEMMs read oneDNN's layout."""
        is_fast = torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()  # noqa: SLF001
        return self.context.dtype == torch.bfloat16 and bool(is_fast)


class PackedInt8Gemm:
    """The weight in oneDNN's layout for AMX or VNNI.

    Inputs become fixed-point numbers of 15 bits and one scale per row, which keep what bfloat16
    resolves; their two digits are rows of one GEMM. Inputs of checkpoints made for quantized ones
    have one digit. With AMX, other weights keep their quantized values beside for many rows: to
    read them from oneDNN's layout takes as long as their GEMM. Without AMX, and for few rows,
    oneDNN multiplies signed inputs by its reference, so inputs are unsigned with a zero point.
    """

    def __init__(self, weight: CanonicalWeight) -> None:
        assert weight.scales is not None
        self.packed = torch.ops.onednn.qlinear_prepack(weight.quantized, None)
        self.scales = weight.scales.flatten().float()
        self._has_amx = _has_amx()
        self._quantizes_inputs = weight.quantizes_inputs
        self._quantized = weight.quantized if self._has_amx and not weight.quantizes_inputs else None
        self.tensors = (self.packed, self.scales, *([] if self._quantized is None else [self._quantized]))
        self._zeros = torch.zeros(weight.outputs, dtype=torch.int64)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if self._quantizes_inputs:
            step = _find_step(flat, 127)
            out = self._multiply((flat / step).round_().to(torch.int8)).mul_(step).to(x.dtype)
        elif self._quantized is None or len(flat) <= _DIGIT_ROWS:
            step = _find_step(flat, _MAXIMUM)
            numbers = flat / step
            high = (numbers * (1 / _DIGIT)).round_()
            digits = torch.cat((high, torch.add(numbers, high, alpha=-_DIGIT).round_())).to(torch.int8)
            first, second = self._multiply(digits).chunk(2)
            out = torch.add(second, first, alpha=_DIGIT).mul_(step).to(x.dtype)
        else:
            out = F.linear(flat, self._quantized.to(x.dtype)) * self.scales.to(x.dtype)
        if bias is not None:
            out += bias
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """int8 [rows, inputs] -> float32 [rows, outputs], times the weight's scales."""
        if not len(rows):
            return torch.empty(0, len(self.scales))
        zero = 0
        if not self._has_amx or len(rows) < _SIGNED_ROWS:
            rows, zero = rows.view(torch.uint8) ^ _ZERO, _ZERO
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, zero, self.packed, self.scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return out


def _has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001


def _find_step(x: torch.Tensor, maximum: int) -> torch.Tensor:
    """float32 [rows, 1], by which a row is divided so that its largest magnitude is `maximum`."""
    return x.abs().amax(1, keepdim=True).float().clamp_min_(_SMALLEST).mul_(1 / maximum)


class Int8Gemm:
    """`torch._weight_int8pack_mm` for few rows of bfloat16; else the quantized values as numbers of
    the model's dtype, with scales afterwards."""

    def __init__(self, weight: CanonicalWeight, dtype: torch.dtype) -> None:
        assert weight.scales is not None
        self.quantized, self.scales = weight.quantized, weight.scales.flatten().to(dtype)
        self.tensors = (self.quantized, self.scales)
        self._fits = self.quantized.shape[1] % _MULTIPLE == 0 and self.quantized.is_contiguous()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._fits and x.dtype == torch.bfloat16 and x.dim() == 2 and 0 < x.shape[0] <= _KERNEL_ROWS:
            out = torch._weight_int8pack_mm(x.contiguous(), self.quantized, self.scales)  # noqa: SLF001
        else:
            out = F.linear(x, self.quantized.to(x.dtype)) * self.scales
        return out if bias is None else out + bias
