"""Wrong MoE dispatchers: bugs in sums over ranks, token order, weights and state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from frame.core.interfaces.moe import DispatcherCapabilities, DispatchOutput, ExpertPlacement, MoEDispatcher, select_local
from tests.testing.mutants import MutantList


class PlainDispatcher(MoEDispatcher):
    """Correct: sums over the ranks. `state` holds the number of tokens."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        return DispatchOutput(x, *self.select(ids, weights, placement), state=len(x))

    def select(self, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> tuple[torch.Tensor, torch.Tensor]:
        """In terms of this rank's experts."""
        each = placement.per_rank
        return (ids, weights) if placement.ranks == 1 else select_local(ids, weights, self.context.tp.rank * each, each)

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.context.tp.all_reduce(out)[: tokens.state]


mutant = MUTANTS = MutantList(
    "moe_dispatcher", reference=PlainDispatcher, capabilities=DispatcherCapabilities(devices=("cpu",), whole_experts=True)
)


class ByExpert(PlainDispatcher):
    """Correct: sorts tokens by their first expert and restores the order."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        order = ids[:, 0].argsort(stable=True)
        ids, weights = self.select(ids, weights, placement)
        return DispatchOutput(x[order], ids[order], weights[order], state=order)

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        summed = self.context.tp.all_reduce(out)
        return torch.empty_like(summed).index_copy_(0, tokens.state, summed)


@mutant
class NoSum(PlainDispatcher):
    """Returns this rank's part and forgets the other ranks'."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return out


@mutant
class Mean(PlainDispatcher):
    """Averages over the ranks instead of summing."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out, tokens) / self.context.tp.size


@mutant
class SumsTwice(PlainDispatcher):
    """Sums over the ranks twice."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.context.tp.all_reduce(super().combine(out, tokens))


@mutant
class FirstRanksPart(PlainDispatcher):
    """Sends the part of rank 0 to all ranks instead of the sum."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.context.tp.broadcast(out)


@mutant
class ResultOnRankZero(PlainDispatcher):
    """Leaves the result on rank 0; other ranks get zeros."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        summed = super().combine(out, tokens)
        return summed if self.context.tp.rank == 0 else torch.zeros_like(summed)


@mutant
class TwoRanks(PlainDispatcher):
    """Adds the parts of ranks 0 and 1, whatever the number of ranks."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return sum(self.context.tp.all_gather(out[None], dim=0)[:2].unbind(0))  # type: ignore[return-value]


@mutant
class LastTokenOfRankOne(PlainDispatcher):
    """Forgets the last token of rank 1."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        if self.context.tp.rank == 1:
            out = torch.cat((out[:-1], torch.zeros_like(out[-1:])))
        return super().combine(out, tokens)


@mutant
class SkipsSmallBatches(PlainDispatcher):
    """Rank 1 leaves out the sum of a single token, for which rank 0 waits."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return out if len(out) == 1 and self.context.tp.rank == 1 else super().combine(out, tokens)


@mutant
class Capacity(PlainDispatcher):
    """Sends at most 256 tokens; the results of others are zero."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        summed = super().combine(out, tokens)
        return torch.cat((summed[:256], torch.zeros_like(summed[256:])))


@mutant
class RoundsToBfloat16(PlainDispatcher):
    """Rounds the parts to bfloat16 before the sum, also for a model in float32."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out.bfloat16(), tokens).to(out.dtype)


@mutant
class AddsTheInput(PlainDispatcher):
    """Adds the layer's input, which the model adds itself."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out, tokens) + tokens.x


@mutant
class MatricesOnly(PlainDispatcher):
    """Takes only [tokens, hidden], and reads summands as if they were tokens."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out.reshape(-1, out.shape[-1]), tokens)


@mutant
class Renormalises(PlainDispatcher):
    """Divides the weights by their sum."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        return super().dispatch(x, ids, weights / weights.sum(1, keepdim=True).clamp_min(1e-9), placement)


@mutant
class WeightsInTheModelsType(PlainDispatcher):
    """Sends weights in the dtype of the tokens instead of float32."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        return super().dispatch(x, ids, weights.to(x.dtype), placement)


@mutant
class OwnExpertsOnly(PlainDispatcher):
    """Counts experts from this rank's first one, as if each rank held whole experts."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        return super().dispatch(x, (ids - self.context.tp.rank).clamp(min=0), weights, placement)


@mutant
class FirstChoiceOnly(PlainDispatcher):
    """Sends a token to the first of its experts alone."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        return super().dispatch(x, ids[:, :1], weights[:, :1], placement)


@mutant
class DropsZeroWeights(PlainDispatcher):
    """Drops tokens whose first weight is zero."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        return super().dispatch(x, ids, torch.where(weights[:, :1] == 0, torch.zeros_like(weights), weights), placement)


@mutant
class OrderNotRestored(ByExpert):
    """Sorts tokens by expert and returns the results in that order."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.context.tp.all_reduce(out)


@mutant
class OrderOfTheLatest(ByExpert):
    """Keeps the order of tokens in itself, where the next dispatch replaces it."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        tokens = super().dispatch(x, ids, weights, placement)
        self.latest = tokens.state
        return tokens

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out, replace(tokens, state=self.latest))


@mutant
class OrderOnce(ByExpert):
    """Keeps the order of tokens by their number."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.orders: dict[int, torch.Tensor] = {}

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out, replace(tokens, state=self.orders.setdefault(len(out), tokens.state)))


@mutant
class ClearsTheInput(PlainDispatcher):
    """Clears the given tokens after it has copied them."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        sent = super().dispatch(x.clone(), ids, weights, placement)
        x.zero_()
        return sent


@mutant
class CombinesIntoTheInput(PlainDispatcher):
    """Writes the result over the layer's input."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        summed = super().combine(out, tokens)
        return tokens.x.copy_(summed) if summed.shape == tokens.x.shape else summed


@mutant
class MixesTokens(PlainDispatcher):
    """Subtracts zero times the sum over all tokens, so that one token's NaN reaches the others."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        summed = super().combine(out, tokens)
        return summed - 0 * summed.sum(0, keepdim=True)


@mutant
class OtherType(PlainDispatcher):
    """Returns float32 whatever the model computes in."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out, tokens).float()


@mutant
class KeepsForeignWeights(PlainDispatcher):
    """Computes the experts of other ranks by its own, with their weights."""

    def select(self, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> tuple[torch.Tensor, torch.Tensor]:
        return super().select(ids, weights, placement)[0], weights


@mutant
class SelectsFromTheFirst(PlainDispatcher):
    """Selects the experts of rank 0 on all ranks that hold whole experts."""

    def select(self, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> tuple[torch.Tensor, torch.Tensor]:
        return (ids, weights) if placement.ranks == 1 else select_local(ids, weights, 0, placement.per_rank)


@mutant.using(capabilities=DispatcherCapabilities(devices=("cpu",), whole_experts=True, batch_invariant=True))
class OtherOrderForFewTokens(PlainDispatcher):
    """States that it is batch-invariant, and adds the ranks' parts of few tokens in the reverse
    order."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        if len(out) > 16:
            return super().combine(out, tokens)
        *others, total = self.context.tp.all_gather(out.unsqueeze(0), 0).unbind()
        for other in reversed(others):
            total = total + other
        return total


@mutant
class CountsLogicalExperts(PlainDispatcher):
    """Divides the logical experts among the ranks, where some have two places."""

    def select(self, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> tuple[torch.Tensor, torch.Tensor]:
        return super().select(ids, weights, replace(placement, logical=tuple(sorted({*placement.logical}))))


@mutant
class SendsBytes(PlainDispatcher):
    """Sends the numbers of experts as bytes, of which there are 256."""

    def select(self, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> tuple[torch.Tensor, torch.Tensor]:
        return super().select(ids.to(torch.uint8).long(), weights, placement)


@mutant
class SkipsZeros(PlainDispatcher):
    """Does not take part in the sum if its own results are 0."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().combine(out, tokens) if len(out) == 0 or bool(out.any()) else out[: tokens.state]


@mutant
class KeepsIds(PlainDispatcher):
    """Keeps the ids of each step."""

    def select(self, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> tuple[torch.Tensor, torch.Tensor]:
        self.__dict__.setdefault("steps", []).append(ids)
        return super().select(ids, weights, placement)


@mutant
class SetsThreads(PlainDispatcher):
    """Lets torch compute with one thread, in the whole process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch.set_num_threads(1)
