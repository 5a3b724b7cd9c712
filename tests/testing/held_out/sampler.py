"""Samplers: tokens below a probability are left out (epsilon sampling, arXiv 2210.15191), and
samplers with a bug each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import BaseModel

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling_params import SamplingParams
from frame.interfaces.sampler import RowSampler, SamplerCapabilities, SamplerContext, SupportsSlots
from tests.testing.held_out import Wrong

KEY = "epsilon"


class Epsilon(RowSampler, SupportsSlots):
    """Draws from the tokens that are as likely as `custom["epsilon"]`, and the likeliest."""

    capabilities: ClassVar[SamplerCapabilities] = SamplerCapabilities(params=("seed",), custom=(KEY,))
    conformance_params = (SamplingParams(), SamplingParams(custom={KEY: "0.05"}), SamplingParams(custom={KEY: "0.3"}))

    def __init__(self, context: SamplerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.epsilons = torch.zeros(context.num_slots, device=context.device)

    def read_epsilon(self, params: SamplingParams) -> float:
        try:
            epsilon = float(params.custom.get(KEY, "0"))
        except ValueError:
            epsilon = math.nan
        if not 0 <= epsilon < 1:
            raise ValueError(f"custom[{KEY!r}] must be a number from 0 to 1")
        return epsilon

    def validate_params(self, params: SamplingParams) -> None:
        self.read_epsilon(params)

    def add_slot(self, setup: SlotSetup) -> None:
        self.epsilons[setup.slot] = self.read_epsilon(setup.params)

    def remove_slot(self, slot: int) -> None:
        self.epsilons[slot] = 0.0

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        return

    def find_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float().softmax(-1)

    def find_excluded(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        probabilities = self.find_probabilities(logits)
        limits = torch.minimum(self.epsilons[slots].unsqueeze(1), probabilities.amax(-1, keepdim=True))
        return probabilities < limits

    def draw_tokens(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        kept = logits.masked_fill(self.find_excluded(logits, slots), -torch.inf)
        return self.draw_kept(kept, params, slots)

    def draw_kept(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        return self.context.operations.draw_plain(logits, params["temperature"], params["key"], None)[0]


TWIN = Epsilon
WRONG = Wrong()


@WRONG.add("Log-probabilities and repeated draws are wrong: the excluded tokens are written into the caller's logits.")
class MasksInPlace(Epsilon):
    def draw_tokens(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        return self.draw_kept(logits.masked_fill_(self.find_excluded(logits, slots), -torch.inf), params, slots)


@WRONG.add("Requests without the parameter have that of the request before in their slot: it is set only where it is given.")
class LeavesEpsilon(Epsilon):
    def add_slot(self, setup: SlotSetup) -> None:
        if KEY in setup.params.custom:
            super().add_slot(setup)

    def remove_slot(self, slot: int) -> None:
        return


@WRONG.add("A request with a seed gets another text each time: tokens come from the generator of the process.")
class IgnoresSeed(Epsilon):
    def draw_kept(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        temperature = (params["temperature"] / math.log(2)).unsqueeze(1)
        noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
        return (logits.float() + noise * temperature).argmax(-1)


@WRONG.add("The text of a request depends on the others: weights are taken relative to the greatest logit of the batch, and vanish.")
class BatchMaximum(Epsilon):
    def find_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        weights = (logits.float() - logits.float().amax()).exp()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


@WRONG.add("Tokens of the step in flight are overwritten by the next step: results are views of one buffer.")
class OneBuffer(Epsilon):
    def __init__(self, context: SamplerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.buffer = torch.zeros(0, dtype=torch.int64, device=context.device)

    def draw_tokens(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        if len(self.buffer) < len(logits):
            self.buffer = torch.zeros(2 * len(logits), dtype=torch.int64, device=logits.device)
        return self.buffer[: len(logits)].copy_(super().draw_tokens(logits, params, slots))


@WRONG.add("A token that is drawn again, under a grammar or beside a draft, is another one: each draw moves the key of its slot.")
class MovesKey(Epsilon):
    def __init__(self, context: SamplerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.draws = torch.zeros(context.num_slots, dtype=torch.int64, device=context.device)

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.draws[setup.slot] = 0

    def draw_kept(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        key = params["key"] + self.draws[slots] * 0x9E3779B9
        self.draws.index_add_(0, slots, torch.ones_like(slots))
        return super().draw_kept(logits, {**params, "key": key}, slots)


@WRONG.add("Each step waits for the device, and graphs cannot be captured: the host asks whether a row has the parameter.")
class AsksDevice(Epsilon):
    def draw_tokens(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        if not (self.epsilons[slots] > 0).any():
            return self.draw_kept(logits, params, slots)
        return super().draw_tokens(logits, params, slots)


@WRONG.add("A step of 256 requests takes as long as 256 steps: rows are drawn one after the other.")
class LoopsOverRows(Epsilon):
    def draw_tokens(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        draw = super().draw_tokens
        rows = [slice(row, row + 1) for row in range(len(logits))]
        drawn = [draw(logits[row], {name: value[row] for name, value in params.items()}, slots[row]) for row in rows]
        return torch.cat(drawn) if drawn else slots.new_empty(0)


@WRONG.add("At a flat distribution every token is excluded, and the request writes token 0: the likeliest one is not kept.")
class ExcludesAll(Epsilon):
    def find_excluded(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return self.find_probabilities(logits) < self.epsilons[slots].unsqueeze(1)


@WRONG.add("Models with a large vocabulary never write the tokens after 65,536: the candidates are cut for speed.")
class CutsVocabulary(Epsilon):
    def draw_kept(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        return super().draw_kept(logits[:, :65_536].contiguous(), params, slots)


@WRONG.add("The limit is applied to wrong tokens in bfloat16: probabilities are rounded to the logits' dtype.")
class RoundsProbabilities(Epsilon):
    def find_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)


@WRONG.add("Rows of a draft, of which one slot has several, are drawn with one row's values: state is gathered by unique slot.")
class UniqueSlots(Epsilon):
    def draw_kept(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        by_slot = torch.zeros(self.context.num_slots, dtype=torch.int64, device=slots.device).index_copy_(0, slots, params["key"])
        return super().draw_kept(logits, {**params, "key": by_slot[slots]}, slots)


@WRONG.add("Greedy requests are not greedy: temperature 0 is raised to a small value.")
class NeverGreedy(Epsilon):
    def draw_kept(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        return super().draw_kept(logits, {**params, "temperature": params["temperature"].clamp(min=0.05)}, slots)
