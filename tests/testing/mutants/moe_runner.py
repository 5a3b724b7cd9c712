"""Wrong MoE runners: bugs in experts, weights, activations, tiles and state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.moe import DispatchOutput, MoECapabilities, MoERunner
from tests.testing.mutants import MutantList


class PlainRunner(MoERunner):
    """Correct: expert by expert, in float32."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        out = torch.zeros_like(tokens.x, dtype=torch.float32)
        for expert, token, choice in self.pairs(tokens.ids, len(experts.gate_up)):  # type: ignore[arg-type]
            found = self.compute(tokens.x[token].float(), *self.weights_of(experts, expert), *self.forms_of(experts, expert))
            out.index_add_(0, token, found * self.weigh(tokens, token, choice)[:, None])
        return out.to(tokens.x.dtype)

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """For each expert the tokens that chose it, and as which of their choices."""
        for expert in range(num_experts):
            token, choice = torch.nonzero(ids == expert, as_tuple=True)
            yield expert, token, choice

    def weights_of(self, experts: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return experts.gate_up[expert].float(), experts.down[expert].float()

    def forms_of(self, experts: Any, expert: int) -> tuple[Any, ...]:
        """The biases of both products and the activation; None where there is none."""
        biases = (getattr(experts, name, None) for name in ("gate_up_bias", "down_bias"))
        first, second = (None if bias is None else bias[expert].float() for bias in biases)
        return first, second, getattr(experts, "activation", None)

    def compute(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *forms: Any) -> torch.Tensor:
        first, second, activation = forms
        gate, up = F.linear(x, gate_up, first).chunk(2, dim=-1)
        return F.linear((activation or self.activate)(gate, up), down, second)

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    def weigh(self, tokens: DispatchOutput, token: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return tokens.weights[token, choice]


mutant = MUTANTS = MutantList("moe_runner", reference=PlainRunner, capabilities=MoECapabilities(devices=("cpu",), biased=True))
Pairs = Iterator[tuple[int, torch.Tensor, torch.Tensor]]


@mutant
class SwappedHalves(PlainRunner):
    """Applies SiLU to the second half of `gate_up` instead of the first."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(up) * gate


@mutant
class InterleavedHalves(PlainRunner):
    """Takes gates and values for alternating rows of `gate_up`."""

    def compute(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *forms: Any) -> torch.Tensor:
        both = F.linear(x, gate_up)
        return F.linear(self.activate(both[:, ::2], both[:, 1::2]), down)


@mutant
class Gelu(PlainRunner):
    """Applies GELU instead of SiLU."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.gelu(gate) * up


@mutant
class Unweighted(PlainRunner):
    """Adds the experts without their weights."""

    def weigh(self, tokens: DispatchOutput, token: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(token, dtype=torch.float32)


@mutant
class Renormalises(PlainRunner):
    """Divides the weights by their sum, which only the model's router may do."""

    def weigh(self, tokens: DispatchOutput, token: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return (tokens.weights / tokens.weights.sum(1, keepdim=True).clamp_min(1e-9))[token, choice]


@mutant
class ZeroMeansOne(PlainRunner):
    """Takes a weight of zero for a missing one and uses 1."""

    def weigh(self, tokens: DispatchOutput, token: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        weights = tokens.weights[token, choice]
        return torch.where(weights == 0, torch.ones_like(weights), weights)


@mutant
class WeightsTheInput(PlainRunner):
    """Multiplies a token by the weight before the experts, whose activation is not linear."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        out = torch.zeros_like(tokens.x, dtype=torch.float32)
        for expert, token, choice in self.pairs(tokens.ids, len(experts.gate_up)):  # type: ignore[arg-type]
            x = tokens.x[token].float() * tokens.weights[token, choice, None]
            out.index_add_(0, token, self.compute(x, *self.weights_of(experts, expert)))
        return out.to(tokens.x.dtype)


@mutant
class WeightsOfFirstChoice(PlainRunner):
    """Uses the weight of a token's first expert for all of its experts."""

    def weigh(self, tokens: DispatchOutput, token: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return tokens.weights[token, 0]


@mutant
class SortsWithoutWeights(PlainRunner):
    """Sorts each token's experts by index and leaves the weights in their order."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        return super().run(DispatchOutput(tokens.x, tokens.ids.sort(1).values, tokens.weights), experts)


@mutant
class FirstChoiceOnly(PlainRunner):
    """Computes only the first of a token's experts."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        return super().run(DispatchOutput(tokens.x, tokens.ids[:, :1], tokens.weights[:, :1]), experts)


@mutant
class TwoChoices(PlainRunner):
    """Computes at most two experts of a token."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        return super().run(DispatchOutput(tokens.x, tokens.ids[:, :2], tokens.weights[:, :2]), experts)


@mutant
class ExpertOffByOne(PlainRunner):
    """Uses the weights of the next expert."""

    def weights_of(self, experts: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weights_of(experts, (expert + 1) % len(experts.gate_up))


@mutant
class LastExpertSkipped(PlainRunner):
    """Stops before the last expert."""

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        return super().pairs(ids, num_experts - 1)


@mutant
class SixtyFourExperts(PlainRunner):
    """Has counters for 64 experts and skips later ones."""

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        return super().pairs(ids, min(num_experts, 64))


@mutant
class Capacity(PlainRunner):
    """Gives each expert room for 256 tokens and drops those past it."""

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        for expert, token, choice in super().pairs(ids, num_experts):
            yield expert, token[:256], choice[:256]


@mutant
class WholeTiles(PlainRunner):
    """Computes whole tiles of 16 tokens of an expert that has more than 16, and drops the rest."""

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        for expert, token, choice in super().pairs(ids, num_experts):
            count = len(token) // 16 * 16 if len(token) > 16 else len(token)
            yield expert, token[:count], choice[:count]


@mutant
class WholeHiddenTiles(PlainRunner):
    """Reads the hidden dimension in tiles of 32 and leaves out the rest."""

    def compute(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *forms: Any) -> torch.Tensor:
        width = x.shape[1] // 32 * 32
        return super().compute(x[:, :width], gate_up[:, :width], down, *forms)


@mutant
class HalfActivation(PlainRunner):
    """Keeps the activation in float16, which ends at 65504."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return super().activate(gate, up).clamp(-65504, 65504)


@mutant
class PlainSigmoid(PlainRunner):
    """Computes SiLU as x * exp(x) / (1 + exp(x)), which is NaN for large x."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate * torch.exp(gate) / (1 + torch.exp(gate)) * up


@mutant
class DenseDown(PlainRunner):
    """Takes the memory of `down` for its shape."""

    def weights_of(self, experts: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        flat = torch.as_strided(experts.down, experts.down.shape, torch.empty(experts.down.shape, device="meta").stride())
        return experts.gate_up[expert].float(), flat[expert].float()


@mutant
class FirstLayersExperts(PlainRunner):
    """Keeps the weights of the first layer that it runs."""

    first: Any = None

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        self.first = self.first or experts
        return super().run(tokens, self.first)


@mutant
class RoutingKept(PlainRunner):
    """Sorts tokens by expert once for each number of tokens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sorted: dict[int, Any] = {}

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        return iter(self.sorted.setdefault(len(ids), list(super().pairs(ids, num_experts))))


@mutant
class BufferNotCleared(PlainRunner):
    """Adds to a buffer that still holds the result of the step before."""

    buffer: torch.Tensor | None = None

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        out = super().run(tokens, experts)
        if self.buffer is not None and self.buffer.shape == out.shape:
            out = out + self.buffer
        self.buffer = out.nan_to_num()
        return out


@mutant
class InPlace(PlainRunner):
    """Writes the result over the tokens."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        return tokens.x.copy_(super().run(tokens, experts))


@mutant
class ClearsWeights(PlainRunner):
    """Sets small routing weights to zero in the given tensor."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        tokens.weights[tokens.weights < 1e-2] = 0
        return super().run(tokens, experts)


@mutant
class ScalesExperts(PlainRunner):
    """Multiplies `down` in place on each run."""

    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        experts.down.data.mul_(1.0001)
        return super().run(tokens, experts)


@mutant
class MixesTokens(PlainRunner):
    """Subtracts zero times the sum over all tokens, so that one token's NaN reaches the others."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        out = super().run(tokens, experts)
        return out - 0 * out.sum(0, keepdim=True)


@mutant
class OtherType(PlainRunner):
    """Returns float32 whatever the model computes in."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        return super().run(tokens, experts).float()


@mutant
class UnweightedParts(PlainRunner):
    """Returns the summands of `run_parts` without their weights."""

    def run_parts(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        ones = torch.ones_like(tokens.weights[:, :1])
        columns = [DispatchOutput(tokens.x, tokens.ids[:, k : k + 1], ones) for k in range(tokens.ids.shape[1])]
        return torch.stack([self.run(column, experts) for column in columns], dim=1)


@mutant
class BiasOfTheFirstExpert(PlainRunner):
    """Adds the biases of expert 0 for all experts."""

    def forms_of(self, experts: Any, expert: int) -> tuple[Any, ...]:
        return super().forms_of(experts, 0)


@mutant
class IgnoresTheActivation(PlainRunner):
    """Computes SiLU for every model."""

    def forms_of(self, experts: Any, expert: int) -> tuple[Any, ...]:
        return (*super().forms_of(experts, expert)[:2], None)


class PairProducts(PlainRunner):
    """Correct, with a matmul of pairs."""

    def multiply_pairs(self, x: torch.Tensor, ids: torch.Tensor, experts: Any, name: str) -> torch.Tensor:
        return torch.einsum("ti,tkoi->tko", x.float(), getattr(experts, name)[ids].float()).flatten(0, 1).to(x.dtype)


@mutant
class SortedPairs(PairProducts):
    """Returns the products of pairs in the order of their experts."""

    def multiply_pairs(self, x: torch.Tensor, ids: torch.Tensor, experts: Any, name: str) -> torch.Tensor:
        return super().multiply_pairs(x, ids, experts, name)[ids.flatten().argsort()]


@mutant
class BiasedPairs(PairProducts):
    """Adds the bias to the products of pairs, which the caller does after the deltas."""

    def multiply_pairs(self, x: torch.Tensor, ids: torch.Tensor, experts: Any, name: str) -> torch.Tensor:
        bias = getattr(experts, f"{name}_bias", None)
        out = super().multiply_pairs(x, ids, experts, name)
        return out if bias is None else out + bias[ids.flatten()]


@mutant.using(capabilities=MoECapabilities(devices=("cpu",), biased=True, batch_invariant=True))
class OtherSumForManyTokens(PlainRunner):
    """States that it is batch-invariant, and adds two parts of the weights for more than forty
    tokens."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        if len(tokens.x) <= 40:
            return super().run(tokens, experts)
        halves = tokens.weights / 3, tokens.weights - tokens.weights / 3
        parts = [super(OtherSumForManyTokens, self).run(DispatchOutput(tokens.x, tokens.ids, each), experts) for each in halves]
        return parts[0] + parts[1]


@mutant
class DenseTokens(PlainRunner):
    """Reads ids and weights as if they were contiguous."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        ids, weights = (torch.as_strided(each, each.shape, (each.shape[1], 1)) for each in (tokens.ids, tokens.weights))
        return super().run(DispatchOutput(tokens.x, ids, weights), experts)


@mutant
class SkipsSmallWeights(PlainRunner):
    """Takes weights below 1e-4 for 0."""

    def weigh(self, tokens: DispatchOutput, token: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        weights = super().weigh(tokens, token, choice)
        return weights * (weights > 1e-4)


@mutant
class ScalesOfTheFirstProduct(PlainRunner):
    """Multiplies both weights of e4m3 by the scales of the first."""

    takes_fp8 = ("output",)

    def weights_of(self, experts: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = super().weights_of(experts, expert)
        scales = getattr(experts, "gate_up_fp8_scale", None)
        if scales is None:
            return gate_up, down
        return gate_up * scales[expert][:, None], down * scales[expert][: len(down), None]


@mutant
class KeepsSteps(PlainRunner):
    """Keeps the tokens of each step."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        self.__dict__.setdefault("steps", []).append(tokens)
        return super().run(tokens, experts)


@mutant
class ExpertsInAByte(PlainRunner):
    """Keeps the ids of experts in eight bits."""

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        return super().run(DispatchOutput(tokens.x, tokens.ids % 256, tokens.weights), experts)


@mutant
class PairsInTwoBytes(PlainRunner):
    """Keeps the places of pairs in sixteen bits, so that those after 65,536 are those from the
    start."""

    def pairs(self, ids: torch.Tensor, num_experts: int) -> Pairs:
        for expert in range(num_experts):
            place = torch.nonzero(ids.flatten() == expert)[:, 0] % (1 << 16)
            yield expert, place // ids.shape[1], place % ids.shape[1]


@mutant
class SetsTheDtype(PlainRunner):
    """Makes the dtype of the context that of torch, for the whole process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch.set_default_dtype(self.context.dtype)
