"""GEMMs with 4-bit weights by the library humming-kernels, which compiles its CUDA
kernels on first use. Activations keep their dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.moe import DispatchOutput
from frame.core.interfaces.weight_format import CanonicalWeight, unpack_nibbles
from frame.models.layers.weights.expert_activation import activate
from frame.quantization.gemm.weight_only import WeightOnlyGemm, WeightOnlyGroupedGemm

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.rank_context import RankContext
    from frame.kernels.moe.align import Alignment

_TILE = 128  # the library's tiles divide the sizes of a weight, which it pads with zeros
_OUTPUTS, _STEP = 64, 32  # what divides the outputs and the inputs before that
_GROUPS = (0, 16, 32, 64, 128, 256)  # inputs that share a scale; 0: all
_FEW_PAIRS = 32  # of tokens and experts, up to which the Triton kernel is faster
_LOCKS = 2048  # counters of the library's split sums
_NAMES = {"int4": "uint4", "e2m1": "float4e2m1"}
_GROUPED = '{"gemm_type": "grouped_contiguous"}'
_INDEXED = '{"gemm_type": "indexed"}'


class HummingKernel(GemmKernel):
    """Dequantizes weights in registers, for any number of rows."""

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context)
        self._keeps_quantized = bool(getattr(options, "few_rows", False))

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        scheme, dtype = weight.scheme, self.context.dtype
        if scheme.quant_type not in _NAMES:
            return f"it has no kernel for {scheme.quant_type}"
        if weight.order is not None:
            return "the inputs are in act-order"
        if weight.outer is not None:
            return "scales have scales of their own"
        if weight.outputs % _OUTPUTS or weight.inputs % max(_STEP, scheme.group[1]):
            return f"its sizes are not multiples of {_OUTPUTS} outputs and of {_STEP} inputs or a group"
        if scheme.group[0] != 1 or scheme.group[1] not in _GROUPS:
            return f"it has no kernel for scales by {scheme.group}"
        if weight.scales is None or weight.scales.dtype != dtype:
            return f"scales are not in the model's dtype, {dtype}"
        return None

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return HummingGemm(weight, WeightOnlyGemm(weight) if self._keeps_quantized else None)

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        few = WeightOnlyGroupedGemm(weight, self.context.limits.max_tokens_per_step) if self._keeps_quantized else None
        return HummingGroupedGemm(weight, few)

    def count_bytes(self, weight: CanonicalWeight) -> int:
        outputs, inputs = (-(-size // _TILE) * _TILE for size in (weight.outputs, weight.inputs))
        values = weight.quantized.shape[:-2].numel() * outputs * inputs
        groups = values // (weight.scheme.group[1] or inputs)
        num_bytes = values // 2 + groups * self.context.dtype.itemsize + groups // 2 * (weight.zeros is not None) + 4 * _LOCKS
        return num_bytes + (super().count_bytes(weight) if self._keeps_quantized else 0)


class HummingGemm:
    """x times one weight, whose tensors are in the library's layout. `few` multiplies few rows, by
    the quantized values in canonical form."""

    def __init__(self, weight: CanonicalWeight, few: WeightOnlyGemm | None = None) -> None:
        from humming.forward import humming_forward
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors

        assert weight.scales is not None
        self._few = few
        device, dtype = weight.quantized.device, weight.scales.dtype
        schema = HummingWeightSchema(
            b_dtype=_NAMES[weight.scheme.quant_type],
            weight_scale_group_size=weight.scheme.group[1],
            has_zero_point=weight.zeros is not None,
        )
        self._config, tensors = prepare_and_transform_humming_tensors(
            _name_tensors(weight),
            weight.outputs,
            weight.inputs,
            schema,
            num_experts=len(weight.quantized) if weight.quantized.dim() == 3 else None,
            pad_n_to_multiple=_TILE,
            pad_k_to_multiple=_TILE,
            torch_dtype=dtype,
            device=device,
        )
        self._tensors: dict[str, torch.Tensor] = tensors
        self._locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)
        self._multiply = humming_forward

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self._tensors.values(), self._locks, *(self._few.tensors if self._few is not None else [])]

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        return None if self._few is None else self._few.multiply_gated(x, bias)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._few is not None and self._few.takes_few(x):
            return self._few(x, bias)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out: torch.Tensor = self._multiply(self._config, flat, **self._tensors, locks=self._locks)
        if bias is not None:
            out += bias
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


class HummingGroupedGemm(HummingGemm):
    """Rows times the weights of their experts."""

    def __init__(self, weight: CanonicalWeight, few: WeightOnlyGroupedGemm | None = None) -> None:
        super().__init__(weight)
        self._few_pairs = few
        self._experts = len(weight.quantized)
        self._blocks: list[tuple[int, int]] = []  # (most pairs, rows of a block of one expert)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors, *(self._few_pairs.tensors if self._few_pairs is not None else [])]

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        layout = F.pad(ends, (1, 0))  # the row before each expert's first
        out: torch.Tensor = self._multiply(
            self._config, x.contiguous(), **self._tensors, locks=self._locks, expert_layout=layout, compute_config=_GROUPED
        )
        return out

    def mix(self, down: GroupedGemm, tokens: DispatchOutput, experts: nn.Module, parts: bool) -> torch.Tensor | None:
        """The whole experts; the GEMMs read tokens where they are."""
        if not isinstance(down, HummingGroupedGemm) or not kernels.can_use_triton(tokens.x.device):
            return None
        few, few_down = self._few_pairs, down._few_pairs  # noqa: SLF001 - own class
        if few is not None and few_down is not None and tokens.ids.numel() <= _FEW_PAIRS:
            return few.mix(few_down, tokens, experts, parts)
        from frame.kernels.elementwise.activation import silu_mul
        from frame.kernels.moe.align import align_tokens
        from frame.kernels.moe.grouped_gemm import combine_pairs

        ids, top = tokens.ids.contiguous(), tokens.ids.shape[1]
        flat = ids.flatten()
        blocks = [each.find_block(ids.numel()) for each in (self, down)]
        first = second = align_tokens(ids, self._experts, blocks[0])
        if blocks[1] != blocks[0]:
            second = align_tokens(ids, self._experts, blocks[1])
        gates = self.multiply_pairs(tokens.x.contiguous(), first, top)
        is_plain = getattr(experts, "activation", None) is None and getattr(experts, "gate_up_bias", None) is None
        rows = down.multiply_pairs(silu_mul(gates) if is_plain else activate(experts, gates, flat), second, 1)
        if (bias := getattr(experts, "down_bias", None)) is not None:
            rows = rows + bias.index_select(0, flat)
        return combine_pairs(rows, top, tokens.weights.contiguous())

    def multiply_pairs(self, x: torch.Tensor, order: Alignment, top: int) -> torch.Tensor:
        """x [pairs / top, inputs] -> [pairs, outputs], by the expert of each pair."""
        out: torch.Tensor = self._multiply(
            self._config, x, **self._tensors, locks=self._locks, compute_config=_INDEXED, top_k=top,
            sorted_ids=order.pairs, expert_ids=order.experts, num_tokens_padded=order.rows,
        )  # fmt: skip
        return out

    def find_block(self, pairs: int) -> int:
        """The rows of a block in the configuration that the library chooses for so many pairs."""
        if not self._blocks:
            from humming.tune import get_heuristics_config

            num_bytes = get_heuristics_config(self._config, gemm_type="indexed", device=self._locks.device)
            self._blocks = [(maximum, config["block_shape"][0]) for _, maximum, config in num_bytes]
        return next(block for maximum, block in self._blocks if pairs <= maximum)


def _name_tensors(weight: CanonicalWeight) -> dict[str, torch.Tensor]:
    """The weight as the library reads it: unsigned quantized values in 32-bit words, the first in
    the lowest bits, along the inputs; zero points along the outputs."""
    assert weight.scales is not None
    tensors = {"weight": _pack_words(unpack_nibbles(weight.quantized)[..., : weight.inputs]), "weight_scale": weight.scales}
    if weight.zeros is not None:
        tensors["zero_point"] = _pack_words(weight.zeros.to(torch.uint8).transpose(-1, -2)).transpose(-1, -2).contiguous()
    return tensors


def _pack_words(quantized: torch.Tensor) -> torch.Tensor:
    """uint8 values below 16, [..., n] -> int32 [..., n / 8]."""
    pairs = quantized.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
