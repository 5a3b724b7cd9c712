"""MoE runners: pairs sorted by expert, and runners with a bug each."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel

from frame.core.interfaces.moe import DispatchOutput, MoECapabilities, MoERunner
from frame.core.interfaces.rank_context import RankContext
from tests.testing.held_out import Wrong


class SortedPairs(MoERunner):
    """Sorts the (token, expert) pairs, and sums their results in float32."""

    capabilities: ClassVar[MoECapabilities] = MoECapabilities(devices=("cpu", "cuda"))

    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        x, k = tokens.x, tokens.ids.shape[1]
        gate_up, down = self.get_weights(experts)
        ids, weights = self.find_ids(tokens).flatten(), self.find_weights(tokens).flatten()
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=gate_up.shape[0]).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in enumerate(counts):
            pairs = self.choose_pairs(order[start : start + count], len(ids), len(counts))
            pairs = pairs[weights[pairs] != 0]
            start += count
            if len(pairs):
                result = self.compute(x[pairs // k], gate_up[expert], down[expert])
                self.add(out, pairs // k, result.float() * weights[pairs].unsqueeze(1))
        return out.to(x.dtype)

    def get_weights(self, experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return experts.gate_up, experts.down

    def find_ids(self, tokens: DispatchOutput) -> torch.Tensor:
        return tokens.ids

    def find_weights(self, tokens: DispatchOutput) -> torch.Tensor:
        return tokens.weights

    def choose_pairs(self, pairs: torch.Tensor, num_pairs: int, num_experts: int) -> torch.Tensor:
        return pairs

    def compute(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    def add(self, out: torch.Tensor, rows: torch.Tensor, result: torch.Tensor) -> None:
        out.index_add_(0, rows, result)


TWIN = SortedPairs
WRONG = Wrong()


@WRONG.add("Texts change under load: an expert takes at most twice its even share of the tokens, and drops the others.")
class DropsTokens(SortedPairs):
    def choose_pairs(self, pairs: torch.Tensor, num_pairs: int, num_experts: int) -> torch.Tensor:
        return pairs[: max(4, 2 * num_pairs // num_experts)]


@WRONG.add("All layers compute with the experts of the first: its weights are kept at the first call.")
class KeepsWeights(SortedPairs):
    kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def get_weights(self, experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kept is None or self.kept[0].shape != experts.gate_up.shape:
            self.kept = super().get_weights(experts)
        return self.kept


@WRONG.add("With whole experts on several ranks results are too large: weights are made to sum to 1 over the rank's own experts.")
class Renormalises(SortedPairs):
    def find_weights(self, tokens: DispatchOutput) -> torch.Tensor:
        return tokens.weights / tokens.weights.sum(-1, keepdim=True).clamp(min=1e-20)


@WRONG.add("Models with more than 128 experts answer noise: ids are sorted as bytes.")
class ByteIds(SortedPairs):
    def find_ids(self, tokens: DispatchOutput) -> torch.Tensor:
        return tokens.ids % 128


@WRONG.add("A token that names one expert twice gets it once: results are added without accumulation.")
class AddsOnce(SortedPairs):
    def add(self, out: torch.Tensor, rows: torch.Tensor, result: torch.Tensor) -> None:
        out[rows] += result


@WRONG.add("The shared expert and the residual get scaled inputs: routed inputs are scaled in place.")
class ScalesInput(SortedPairs):
    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        if tokens.ids.shape[1] == 1:
            out = super().run(tokens, experts)
            tokens.x.mul_(tokens.weights.to(tokens.x.dtype))
            return out
        out = super().run(tokens, experts)
        tokens.weights.div_(tokens.weights.sum(-1, keepdim=True).clamp(min=1e-20))
        return out


@WRONG.add("Engines with attention groups end when a group has no requests: a step without tokens fails.")
class FailsOnEmpty(SortedPairs):
    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        assert int(tokens.ids.max()) < experts.gate_up.shape[0]
        return super().run(tokens, experts)


@WRONG.add("Long prompts differ from short ones in bfloat16: the sum over a token's experts is rounded at each.")
class RoundsSums(SortedPairs):
    def add(self, out: torch.Tensor, rows: torch.Tensor, result: torch.Tensor) -> None:
        out.copy_(out.index_add(0, rows, result).bfloat16().float())


@WRONG.add("The result of a layer is overwritten by the next one: it is in one buffer.")
class OneBuffer(SortedPairs):
    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.buffers: dict[Any, torch.Tensor] = {}

    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        out = super().run(tokens, experts)
        return self.buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)


@WRONG.add("Large activations overflow to infinity: the product of gate and up is rounded to float16.")
class HalfActivation(SortedPairs):
    def compute(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear((F.silu(gate) * up).half().to(x.dtype), down)


@WRONG.add("Only the first eight experts of a token count: models that choose more answer worse.")
class EightExperts(SortedPairs):
    def find_weights(self, tokens: DispatchOutput) -> torch.Tensor:
        return tokens.weights.masked_fill(torch.arange(tokens.weights.shape[1], device=tokens.weights.device) >= 8, 0.0)


@WRONG.add("Steps are captured in graphs with the routing of the warm-up: the record says that shapes do not depend on data, and they do.")
class ClaimsGraphs(SortedPairs):
    capabilities = MoECapabilities(devices=("cpu", "cuda"), graphs=True)


@WRONG.add("Answers depend on the batch though the record says they do not: an expert's rows are multiplied together, in any order.")
class ClaimsInvariance(SortedPairs):
    capabilities = MoECapabilities(devices=("cpu", "cuda"), batch_invariant=True)

    def compute(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        if len(x) < 8:
            return super().compute(x, gate_up, down)
        halves = gate_up.shape[1] and gate_up.split(max(1, gate_up.shape[1] // 2))
        gate, up = torch.cat([F.linear(x.double(), half.double()).to(x.dtype) for half in halves], -1).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)
