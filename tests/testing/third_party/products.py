"""Third-party GEMM kernels, MoE runners and MoE dispatchers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from frame.core.interfaces.moe import DispatchOutput, ExpertPlacement
from frame.core.interfaces.weight_format import CanonicalWeight
from tests.testing.mutants.gemm_kernel import Dequantized
from tests.testing.mutants.moe_dispatcher import ByExpert, PlainDispatcher
from tests.testing.mutants.moe_runner import PlainRunner
from tests.testing.third_party import reuses_result, sleeps, third_party

# ---- GEMM kernels --------------------------------------------------------------------------------

mutant = third_party("gemm_kernel")


@mutant
class CachesResults(Dequantized):
    """Returns the result of an earlier product for an input at the same address with the same
    shape."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        key = x.data_ptr(), tuple(x.shape), bias is None, tuple(dense.shape), float(dense.flatten()[0])
        if self.__dict__.get("key") != key:
            self.key, self.result = key, super().multiply(x, dense, bias)
        return self.result.clone()


@mutant
class KeepsDenseWeights(Dequantized):
    """Dequantizes a weight with its first product, and misses an update in place."""

    def dense(self, weight: CanonicalWeight, dtype: torch.dtype) -> torch.Tensor:
        known = self.__dict__.setdefault("known", {})
        key = weight.quantized.data_ptr(), tuple(weight.quantized.shape), dtype
        if key not in known:
            known.clear()
            known[key] = weight.quantized, super().dense(weight, dtype)
        return known[key][1]


@mutant
class MultipliesRowsInBlocks(Dequantized):
    """Has blocks of 4,096 rows, and forgets the last rows after the first block."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().multiply(x, dense, bias)
        rows = out.flatten(0, -2)
        if len(rows) > 4096:
            rows[len(rows) // 4096 * 4096 :] = 0
        return out


@mutant
class Ends8192Inputs(Dequantized):
    """Leaves out inputs after 8,192."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().multiply(x[..., :8192], dense[..., :8192], bias)


@mutant
class Ends8192Outputs(Dequantized):
    """Leaves the last outputs 0 where their number is over 8,192 and odd."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().multiply(x, dense, bias)
        out[..., 8192:] = 0
        return out


@mutant
class PairsRows(Dequantized):
    """Multiplies rows in pairs, and forgets the last one of an odd number above 64."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().multiply(x, dense, bias)
        rows = out.flatten(0, -2)
        if len(rows) > 64 and len(rows) % 2:
            rows[-1] = 0
        return out


@mutant
class ReusesItsOutput(Dequantized):
    """Returns the same buffer from all products with a result of one shape."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().multiply(x, dense, bias)
        return self.__dict__.setdefault("buffers", {}).setdefault((tuple(out.shape), out.dtype), out.clone()).copy_(out)


@mutant
class NeedsRows(Dequantized):
    """Takes the greatest input for a scale, which no input of 0 rows has."""

    def multiply(self, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scale = x.abs().amax().clamp(min=1e-6)
        return F.linear(x / scale, dense) * scale + (0 if bias is None else bias)


@mutant
class DividesByScales(Dequantized):
    """Divides by scales to normalize them, which are 0 where all weights of a group are."""

    def dense(self, weight: CanonicalWeight, dtype: torch.dtype) -> torch.Tensor:
        dense = super().dense(weight, dtype)
        scales = weight.scales
        return dense if scales is None else dense + 0.0 * (1.0 / scales.float()).sum().to(dtype)


@mutant
class Has64Experts(Dequantized):
    """Multiplies the rows of the first 64 experts."""

    def split(self, ends: torch.Tensor) -> list[int]:
        return [end if expert < 64 else int(ends[63]) for expert, end in enumerate(ends.tolist())]


sleeps(mutant, "multiply")

# ---- MoE runners ---------------------------------------------------------------------------------

mutant = third_party("moe_runner")
Pairs = Iterator[tuple[int, torch.Tensor, torch.Tensor]]


@mutant
class TakesEightChoices(PlainRunner):
    """Takes the first eight choices of a token."""

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        return super().pairs(ids[:, :8], num_experts)


@mutant
class Has128Experts(PlainRunner):
    """Has places for 128 experts."""

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        return super().pairs(ids, min(num_experts, 128))


@mutant
class Has4096Tokens(PlainRunner):
    """Has room for 4,096 pairs of a token and an expert."""

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        left = 4096
        for expert, token, choice in super().pairs(ids, num_experts):
            yield expert, token[:left], choice[:left]
            left -= len(token[:left])


@mutant
class KeepsConvertedWeights(PlainRunner):
    """Converts the weights of an expert at its first use, and misses an update in place."""

    def weights_of(self, experts: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.__dict__.setdefault("known", {})
        key = experts.gate_up.data_ptr(), tuple(experts.gate_up.shape), experts.gate_up.dtype, expert
        if len(known) > 64:
            known.clear()
        if key not in known:
            known[key] = experts.gate_up, tuple(weight.clone() for weight in super().weights_of(experts, expert))
        return known[key][1]  # type: ignore[no-any-return]


@mutant
class SharesWeightsOfLayers(PlainRunner):
    """Keeps the weights of an expert by its number and shape, for all layers."""

    def weights_of(self, experts: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.__dict__.setdefault("known", {})
        key = tuple(experts.gate_up.shape), experts.gate_up.dtype, expert
        return known.setdefault(key, super().weights_of(experts, expert))  # type: ignore[no-any-return]


@mutant.survives("a rounding for each choice, which kernels in 16 bits have: below the tolerance of correct ones")
class AddsInTheDtype(PlainRunner):
    """Adds the experts' results in the dtype of the tokens, with an error for each choice."""

    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        out = torch.zeros_like(tokens.x)
        for expert, token, choice in self.pairs(tokens.ids, len(experts.gate_up)):
            found = self.compute(tokens.x[token].float(), *self.weights_of(experts, expert), *self.forms_of(experts, expert))
            out.index_add_(0, token, (found * self.weigh(tokens, token, choice)[:, None]).to(out.dtype))
        return out


@mutant
class PoisonsOthers(PlainRunner):
    """Multiplies all experts' results by their weights, 0 for those that a token did not choose:
    NaN of one token is then in others."""

    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        out = super().run(tokens, experts)
        return out + 0.0 * out.sum(0, keepdim=True)


reuses_result(mutant, "run")
sleeps(mutant, "run")

# ---- MoE dispatchers -----------------------------------------------------------------------------

mutant = third_party("moe_dispatcher")


@mutant
class Sends16BitOrder(ByExpert):
    """Keeps the order of tokens in 12 bits."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out, replace(tokens, state=tokens.state % 4096))


@mutant
class SendsEightChoices(PlainDispatcher):
    """Sends the first eight choices of a token."""

    def select(self, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> tuple[torch.Tensor, torch.Tensor]:
        return super().select(ids[:, :8], weights[:, :8], placement)


@mutant
class NeedsTokens(PlainDispatcher):
    """Looks for the greatest expert of a batch, which no empty batch has."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        assert int(ids.max()) < len(placement.logical)
        return super().dispatch(x, ids, weights, placement)


@mutant
class SumsHalves(PlainDispatcher):
    """Sums the ranks' results in bfloat16, to send less."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        if self.context.tp.size == 1:
            return super().combine(out, tokens)
        return super().combine(out.bfloat16(), tokens).to(out.dtype)


@mutant
class SumsAFewMegabytes(PlainDispatcher):
    """Sums the first 2**20 elements of the ranks' results."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        flat = out.flatten().clone()
        flat[: 1 << 20] = self.context.tp.all_reduce(flat[: 1 << 20].contiguous())
        return flat.view_as(out)[: tokens.state]


reuses_result(mutant, "combine")
sleeps(mutant, "combine")
