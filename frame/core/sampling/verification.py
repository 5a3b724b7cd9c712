"""Verification of drafted tokens on the device: how many of a row's samples are output.

The sampler draws the token of every drafted position. A drafted token is accepted while it equals
the token drawn at its position, so the output is the one that single tokens would give (lossless
for any sampling parameters, since a draw depends on seed, position and distribution only). Used by
the input batch and the model runner. Must not know a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.sampling.sampler import Sampled

if TYPE_CHECKING:
    from frame.core.sampling.batch_layout import BatchLayout, DraftLayout
    from frame.core.sampling.logits_pipeline import ProcessorPlan, Processors
    from frame.core.sampling.sampler import Sampler
    from frame.core.sampling.sampling_metadata import SamplingPlan, SamplingTable


@dataclass(frozen=True, slots=True)
class VerificationPlan:
    """The comparison of one step's samples with the drafts. `arrays`, int64:

      verify.cells    [samples]; sampling row * width + offset of the sample in its row
      verify.targets  [samples]; the drafted token, -1 for the last sample of a row
      verify.first    [sampling rows]; the first sample of the row
      verify.slots    [sampling rows]; request slots
      verify.chosen   [samples]; see `SyntheticAcceptance.choose`; missing without one
    """

    num_rows: int
    width: int  # most samples of a row
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Verified:
    """Device tensors, int64."""

    token_ids: torch.Tensor  # [samples]; as drawn, except with synthetic acceptance
    counts: torch.Tensor  # [sampling rows]; samples that are output
    last: torch.Tensor  # [sampling rows]; the last token that is output


def plan_verification(drafts: DraftLayout, slots: np.ndarray) -> VerificationPlan:
    """slots: int64 [rows], of all rows of the batch."""
    width = int(drafts.num_samples.max(initial=1))
    rows = np.repeat(np.arange(len(drafts.rows)), drafts.num_samples)
    arrays = {
        "verify.cells": rows * width + drafts.offsets,
        "verify.targets": drafts.targets,
        "verify.first": drafts.first,
        "verify.slots": slots[drafts.rows],
    }
    return VerificationPlan(len(drafts.rows), width, arrays)


def verify_drafts(token_ids: torch.Tensor, plan: VerificationPlan, tensors: Mapping[str, torch.Tensor]) -> Verified:
    """Compare the drawn tokens, int64 [samples], with the drafts. `tensors`: the plan's arrays on
    the device."""
    agrees, cells, targets = token_ids.new_zeros(plan.num_rows * plan.width), tensors["verify.cells"], tensors["verify.targets"]
    chosen = tensors.get("verify.chosen")
    agrees.index_copy_(0, cells, token_ids.eq(targets).to(token_ids.dtype) if chosen is None else chosen)
    accepted = agrees.view(plan.num_rows, plan.width).cumprod(dim=1)
    counts = accepted.sum(dim=1) + 1
    if chosen is not None:
        token_ids = torch.where(accepted.view(-1).index_select(0, cells) > 0, targets, token_ids)
    return Verified(token_ids, counts, token_ids.index_select(0, tensors["verify.first"] + counts - 1))


@dataclass(frozen=True, slots=True)
class SampleRound:
    """The samples of one offset in their rows. Names of `arrays` begin with `prefix`; beside those
    of the plans there are `samples` and `rows`, int64 [n]: the samples and their sampling rows."""

    sampling: SamplingPlan
    processing: ProcessorPlan | None
    prefix: str
    arrays: dict[str, np.ndarray]

    def select(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The round's tensors by their names without the prefix."""
        start = len(self.prefix)
        return {name[start:]: tensors[name] for name in self.arrays}


def plan_rounds(
    layout: BatchLayout, drafts: DraftLayout, table: SamplingTable, processors: Processors, slots: np.ndarray, mask: np.ndarray | None
) -> tuple[SampleRound, ...]:
    """The rounds of a step with drafts whose rows use logits processors: what a processor does to a
    token's logits may depend on the tokens before it, so the samples of a row are drawn in order.
    slots: int64 [samples]. mask: int32 [samples, words], or None."""
    rows = np.repeat(np.arange(len(drafts.rows)), drafts.num_samples)
    rounds = []
    for offset in range(int(drafts.num_samples.max(initial=0))):
        samples = np.flatnonzero(drafts.offsets == offset)
        positions = layout.sample_positions[samples]
        sampling = table.plan_samples(slots[samples], positions, None if mask is None else mask[samples])
        processing = processors.plan(slots[samples], positions)
        arrays = {**sampling.arrays, "samples": samples, "rows": rows[samples]}
        if processing is not None:
            arrays |= processing.arrays
        prefix = f"round.{offset}."
        named = {f"{prefix}{name}": array for name, array in arrays.items()}
        rounds.append(SampleRound(replace(sampling, logprob_rows=None), processing, prefix, named))
    return tuple(rounds)


class RoundSampler:
    """Draws the samples of a step round by round; the logits processors observe the output of each
    round before the next one."""

    def __init__(self, sampler: Sampler, processors: Processors, agree: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`agree`: tokens drawn on this rank -> those of rank 0."""
        self._sampler = sampler
        self._processors = processors
        self._agree = agree

    def sample(self, logits: torch.Tensor, rounds: tuple[SampleRound, ...], tensors: Mapping[str, torch.Tensor]) -> Sampled:
        """logits: [samples, vocab], which stay unchanged. tensors: the arrays of the rounds and of
        the verification."""
        targets = tensors["verify.targets"]
        token_ids, best = torch.empty_like(targets), logits.new_empty(len(logits), dtype=torch.float32)
        is_output = torch.ones_like(tensors["verify.first"], dtype=torch.bool)
        masked = "grammar_mask" in tensors  # a deferred mask, which the rounds do not have
        if masked:
            allowed = tensors["grammar_mask"].new_full((len(targets), tensors["grammar_mask"].shape[1]), -1)
            allowed.index_copy_(0, tensors["grammar_rows"], tensors["grammar_mask"])
        for each in rounds:
            own = each.select(tensors)
            samples, rows = own["samples"], own["rows"]
            if masked:
                own |= {"grammar_rows": torch.arange(len(samples), device=samples.device), "grammar_mask": allowed.index_select(0, samples)}
            drawn = self._sampler.sample(logits.index_select(0, samples), each.sampling, each.processing, own)
            ids = self._agree(drawn.token_ids)
            token_ids.index_copy_(0, samples, ids)
            best.index_copy_(0, samples, drawn.best)
            kept = is_output.index_select(0, rows)
            if each.processing is not None:
                self._processors.observe_tokens(ids, each.processing, own, kept)
            is_output.index_copy_(0, rows, kept & ids.eq(targets.index_select(0, samples)))
        return Sampled(token_ids, best)
