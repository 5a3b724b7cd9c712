"""MoE dispatchers: tokens stay, each rank computes its experts, results are summed; and dispatchers
with a bug each."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import BaseModel

from frame.core.interfaces.moe import DispatcherCapabilities, DispatchOutput, ExpertPlacement, MoEDispatcher
from frame.core.interfaces.rank_context import RankContext
from tests.testing.held_out import Wrong


class StaysAndSums(MoEDispatcher):
    """All ranks have the same tokens."""

    capabilities: ClassVar[DispatcherCapabilities] = DispatcherCapabilities(devices=("cpu", "cuda"), whole_experts=True)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        if placement.ranks == 1:
            return DispatchOutput(x, ids, weights)
        first, count = self.find_range(placement)
        local = ids - first
        is_own = (local >= 0) & (local < count)
        return DispatchOutput(x, local.where(is_own, self.find_other(local, count)), self.mask(weights, is_own))

    def find_range(self, placement: ExpertPlacement) -> tuple[int, int]:
        return self.context.ep_group.rank * placement.per_rank, placement.per_rank

    def find_other(self, local: torch.Tensor, count: int) -> torch.Tensor:
        return local % count

    def mask(self, weights: torch.Tensor, is_own: torch.Tensor) -> torch.Tensor:
        return weights.where(is_own, 0.0)

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        if out.dim() == 3:
            out = out.sum(1)
        return self.reduce(out, tokens)

    def reduce(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.context.tp.all_reduce(out) if self.context.tp.size > 1 else out


TWIN = StaysAndSums
WRONG = Wrong()


@WRONG.add("With overlapping batches results have the shape and values of another one: what `combine` needs is kept in the object.")
class KeepsBatch(StaysAndSums):
    last: DispatchOutput | None = None

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        self.last = super().dispatch(x, ids, weights, placement)
        return self.last

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        assert self.last is not None
        return super().combine(out, self.last)[: len(self.last.x)]


@WRONG.add("On several ranks, layers with another number of experts than the first send tokens to wrong ones: the first placement is kept.")
class KeepsPlacement(StaysAndSums):
    placement: ExpertPlacement | None = None

    def find_range(self, placement: ExpertPlacement) -> tuple[int, int]:
        if self.placement is None:
            self.placement = placement
        return super().find_range(self.placement)


@WRONG.add("On several ranks results are sums with wrong experts: the weights of other ranks' experts are not set to 0.")
class MasksNothing(StaysAndSums):
    def mask(self, weights: torch.Tensor, is_own: torch.Tensor) -> torch.Tensor:
        return weights


@WRONG.add("The router's weights are lost for the shared expert and the balance: they are masked in place.")
class MasksInPlace(StaysAndSums):
    def mask(self, weights: torch.Tensor, is_own: torch.Tensor) -> torch.Tensor:
        return weights.masked_fill_(~is_own, 0.0)


@WRONG.add("equivalent: on one rank `combine` may return the summands as they are, which the layer adds.")
class TakesSumsOnly(StaysAndSums):
    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.reduce(out, tokens)


@WRONG.add("All tokens of other ranks count as those of the first expert, which becomes the slowest: they are not spread.")
class SendsToFirst(StaysAndSums):
    def find_other(self, local: torch.Tensor, count: int) -> torch.Tensor:
        return torch.zeros_like(local)


@WRONG.add("The last tokens of a step are zeros on several ranks where they do not divide it: the exchange has equal parts.")
class EqualParts(StaysAndSums):
    def reduce(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        group = self.context.tp
        if group.size == 1 or len(out) < group.size:
            return super().reduce(out, tokens)
        whole = len(out) // group.size * group.size
        result = torch.zeros_like(out)
        result[:whole] = group.all_gather(group.reduce_scatter(out[:whole].contiguous()), dim=0)
        return result


@WRONG.add("An engine of several ranks hangs now and then: a rank whose experts have no token does not take part in the sum.")
class SkipsSum(StaysAndSums):
    def reduce(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        if tokens.weights.numel() and not bool((tokens.weights != 0).any()):
            return out
        return super().reduce(out, tokens)


@WRONG.add("The sum over ranks loses digits: it is sent in bfloat16.")
class SendsHalf(StaysAndSums):
    def reduce(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        if self.context.tp.size == 1:
            return out
        return self.context.tp.all_reduce(out.bfloat16()).to(out.dtype)


@WRONG.add("Layers after this one get another dtype on several ranks: the sum is returned in float32.")
class ReturnsWide(StaysAndSums):
    def reduce(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return out if self.context.tp.size == 1 else self.context.tp.all_reduce(out.float())


@WRONG.add("With slices of experts on several ranks results are too small: the sum is divided by the ranks, as a mean.")
class TakesMean(StaysAndSums):
    def reduce(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return super().reduce(out, tokens) / self.context.tp.size


@WRONG.add("A step that is computed twice has other inputs: large inputs are clipped in place before they are sent.")
class ClipsInPlace(StaysAndSums):
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        return super().dispatch(x.clamp_(-8.0, 8.0), ids, weights, placement)


@WRONG.add("On several ranks, a layer routes as an earlier one with as many tokens: expert ids are remembered by their number.")
class ReusesRouting(StaysAndSums):
    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.places: dict[int, torch.Tensor] = {}

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        if placement.ranks == 1:
            return super().dispatch(x, ids, weights, placement)
        key = len(x)
        if self.places.setdefault(key, ids).shape != ids.shape:
            self.places[key] = ids
        return super().dispatch(x, self.places[key], weights, placement)
