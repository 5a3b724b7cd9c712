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


WRONG = (FiltersBeforeTheTemperature, HasAGreatestTemperature, UsesHalfOfTheKey)
