"""Samplers with one deliberate bug each in what they do with a request's values, derived from one
that filters by sorting; the mutants of the kind are in `sampler`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from frame.interfaces.sampler import RowSampler

Params = Mapping[str, torch.Tensor]


class Filtering(RowSampler):
    """Sorts the tokens of each row, and draws those that filters keep by the device's race."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        kept = logits.float()
        if "top_k" in params:
            kept = kept.masked_fill(~self.find_kept(kept, params), -torch.inf)
        return self.context.operations.draw_plain(kept, params["temperature"], params["key"], None)[0]

    def find_kept(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        values, columns = (logits / self.find_divisor(params).unsqueeze(1)).sort(-1, descending=True)
        top_k = params["top_k"].unsqueeze(1)
        kept = (top_k == 0) | (torch.arange(values.shape[1]) < top_k)
        weights = values.masked_fill(~kept, -torch.inf).softmax(-1)
        kept = kept & (weights.cumsum(-1) - weights < params["top_p"].unsqueeze(1))
        kept &= weights >= weights[:, :1] * torch.exp2(params["log_min_p"]).unsqueeze(1)
        return torch.zeros_like(kept).scatter_(1, columns, kept)

    def find_divisor(self, params: Params) -> torch.Tensor:
        temperature = params["temperature"] / math.log(2)
        return torch.where(temperature > 0, temperature, 1.0)


class FiltersBeforeTheTemperature(Filtering):
    """Compares the probabilities at temperature 1 with top_p and min_p."""

    def find_divisor(self, params: Params) -> torch.Tensor:
        return torch.ones_like(params["temperature"])


class HasAGreatestTemperature(Filtering):
    """Takes temperatures above 2 for 2."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        return super().draw_tokens(logits, {**params, "temperature": params["temperature"].clamp(max=2 * math.log(2))}, slots)


class UsesHalfOfTheKey(Filtering):
    """Draws with the low 32 bits of the key."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        return super().draw_tokens(logits, {**params, "key": params["key"] & 0xFFFFFFFF}, slots)


class GathersTheLimit(Filtering):
    """Reads the logit at the place top_k, which fails where there are fewer tokens."""

    def find_kept(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        top_k = params["top_k"].long().unsqueeze(1)
        values = logits.sort(-1, descending=True).values
        least = values.gather(1, (top_k - 1).clamp(min=0))
        kept = (top_k == 0) | (logits >= least)
        return kept & super().find_kept(logits, {**params, "top_k": torch.zeros_like(params["top_k"])})


class ComparesRoundedLogits(Filtering):
    """Compares logits in bfloat16 with the limit of top_k, and so keeps more tokens."""

    def find_kept(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        kept = super().find_kept(logits, params)
        rounded = logits.bfloat16()
        least = rounded.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        return kept | ((rounded >= least) & (params["top_k"] > 0).unsqueeze(1))


class LeavesOutTheLast(Filtering):
    """Leaves out the token whose probability reaches top_p."""

    def find_kept(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        weights, columns = (logits / self.find_divisor(params).unsqueeze(1)).softmax(-1).sort(-1, descending=True)
        below = weights.cumsum(-1) <= params["top_p"].unsqueeze(1)
        below[:, 0] = True
        return torch.zeros_like(below).scatter_(1, columns, below) & super().find_kept(logits, params)


WRONG = (FiltersBeforeTheTemperature, HasAGreatestTemperature, UsesHalfOfTheKey, GathersTheLimit, ComparesRoundedLogits, LeavesOutTheLast)
