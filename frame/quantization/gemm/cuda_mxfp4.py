"""Experts with MXFP4 weights by the CUDA kernels of `frame.kernels.moe.blocked_mxfp4`.
Activations keep their dtype."""

from __future__ import annotations

import torch
from torch import nn

from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
from frame.core.interfaces.moe import DispatchOutput
from frame.core.interfaces.weight_format import CanonicalWeight
from frame.kernels import cuda_source, nvidia
from frame.kernels.moe import blocked_mxfp4
from frame.kernels.moe.align import align_tokens, copy_rows
from frame.kernels.moe.grouped_gemm import Activation, Pairs
from frame.models.layers.weights.expert_activation import find_activation
from frame.quantization.gemm.mixture import sum_pairs

_ACTIVATIONS = "silu", "clamped_swiglu"


class CudaMxfp4Kernel(GemmKernel):
    """Multiplies e2m1 values as it reads them, for any number of rows."""

    def find_obstacle(self, weight: CanonicalWeight) -> str | None:
        return cuda_source.find_hopper_obstacle(weight.quantized.device) or blocked_mxfp4.find_obstacle(weight, self.context.dtype)

    def prepare(self, weight: CanonicalWeight) -> Gemm:
        raise NotImplementedError("it multiplies experts only")

    def prepare_experts(self, weight: CanonicalWeight) -> GroupedGemm:
        return CudaMxfp4Gemm(weight, self.context.limits.max_tokens_per_step)

    def count_bytes(self, weight: CanonicalWeight) -> int:
        return blocked_mxfp4.count_bytes(len(weight.quantized), weight.outputs, weight.columns)


class CudaMxfp4Gemm:
    """Rows times the weights of their experts. `maximum`: tokens of a step."""

    def __init__(self, weight: CanonicalWeight, maximum: int) -> None:
        self._kernel, self._experts, self._maximum = blocked_mxfp4.ExpertGemm(weight), len(weight.quantized), maximum
        self._compiled: set[int] = set()  # numbers of experts of a token

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._kernel.tensors

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self._kernel.outputs)
        owners = torch.bucketize(torch.arange(len(x), device=x.device), ends, right=True).clamp_max_(self._experts - 1)
        pairs = Pairs(owners.unsqueeze(1), x.new_empty(0, dtype=torch.float32))
        plan = blocked_mxfp4.choose_plan(len(x), self._experts)
        order = align_tokens(pairs.ids, self._experts, plan.rows)
        return self._kernel.multiply(copy_rows(x, order, pairs.ids), None, pairs, order, plan, is_weighted=False)

    def mix(self, down: GroupedGemm, tokens: DispatchOutput, experts: nn.Module, parts: bool) -> torch.Tensor | None:
        """The whole experts."""
        activation = find_activation(experts)
        if not isinstance(down, CudaMxfp4Gemm) or activation.name not in _ACTIVATIONS:
            return None
        x, (count, top) = tokens.x, tokens.ids.shape
        biases = getattr(experts, "gate_up_bias", None), getattr(experts, "down_bias", None)
        if self._maximum and top not in self._compiled and not nvidia.is_capturing():
            self._compiled.add(top)
            for number in blocked_mxfp4.list_thresholds(self._experts, top, self._maximum):
                spread = torch.arange(number * top, device=x.device).remainder_(self._experts).view(number, top)
                self._run(down, x.new_zeros(number, x.shape[1]), Pairs(spread, tokens.weights.new_zeros(number, top)), biases, activation)
        if not count:
            return x.new_empty(0, top, x.shape[1]) if parts else x.new_empty(0, x.shape[1])
        rows = self._run(down, x, Pairs(tokens.ids.contiguous(), tokens.weights.contiguous()), biases, activation)
        return sum_pairs(rows, count, parts)

    def _run(
        self,
        down: CudaMxfp4Gemm,
        x: torch.Tensor,
        pairs: Pairs,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        activation: Activation,
    ) -> torch.Tensor:
        """-> [pairs, hidden], weighted."""
        first, second = self._kernel, down._kernel
        if pairs.count <= blocked_mxfp4.MAX_FEW_PAIRS:
            return second.multiply_few(first.multiply_few(x, biases[0], pairs, activation), biases[1], pairs)
        plan = blocked_mxfp4.choose_plan(pairs.count, self._experts)
        order = align_tokens(pairs.ids, self._experts, plan.rows)
        rows = first.multiply(copy_rows(x, order, pairs.ids), biases[0], pairs, order, plan, activation)
        return second.multiply(rows, biases[1], pairs, order, plan)
