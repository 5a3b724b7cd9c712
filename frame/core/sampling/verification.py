"""Verification of drafted tokens on the device: how many of a row's samples are output.

The sampler draws the token of every drafted position. A drafted token is accepted while it equals
the token drawn at its position, so the output is the one that single tokens would give (lossless
for any sampling parameters, since a draw depends on seed, position and distribution only). Used by
the input batch and the model runner. Must not know a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.core.interfaces.batch import TreeMask
from frame.core.sampling.sampler import Sampled

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.sampling.batch_layout import BatchLayout, DraftLayout
    from frame.core.sampling.logits_pipeline import ProcessorPlan, Processors
    from frame.core.sampling.sampler import Sampler
    from frame.core.sampling.sampling_metadata import SamplingPlan, SamplingTable

# (slots, positions, targets, -1: none) -> which samples are replaced by their drafted token, int64
# [samples], 1 or 0; without it, drafts are compared with what is drawn
ChooseAccepted = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class VerificationPlan:
    """The comparison of one step's samples with the drafts. `arrays`, int64:

      verify.cells    [samples]; sampling row * width + offset of the sample in its row
      verify.targets  [samples]; the drafted token, -1 for the last sample of a row
      verify.first    [sampling rows]; the first sample of the row
      verify.slots    [sampling rows]; request slots
      verify.chosen   [samples]; see `ChooseAccepted`; missing without one

    and of steps with trees the fields of `DraftTrees`, as `verify.parents` and so on, and

      verify.bits     int32 [tokens]; see `TreeMask`
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
    order: torch.Tensor | None = None  # [samples]; of trees: the sample that each output is; the row's others stay. None: as drawn


def plan_verification(layout: BatchLayout, drafts: DraftLayout, slots: np.ndarray) -> VerificationPlan:
    """drafts: those of the layout. slots: int64 [rows], of all rows of the batch."""
    width = int(drafts.num_samples.max(initial=1))
    rows = np.repeat(np.arange(len(drafts.rows)), drafts.num_samples)
    arrays = {
        "verify.cells": rows * width + drafts.offsets,
        "verify.targets": drafts.targets,
        "verify.first": drafts.first,
        "verify.slots": slots[drafts.rows],
    }
    if (trees := drafts.trees) is not None:
        named = {name: getattr(trees, name) for name in ("parents", "depths", "tokens", "branches", "paths")}
        bits = np.full(layout.num_tokens, -1, np.int32)
        bits[layout.logits_indices[: len(rows)]] = trees.bits[rows, drafts.offsets]
        arrays |= {f"verify.{name}": array for name, array in {**named, "bits": bits}.items()}
    return VerificationPlan(len(drafts.rows), width, arrays)


def verify_drafts(token_ids: torch.Tensor, plan: VerificationPlan, tensors: Mapping[str, torch.Tensor]) -> Verified:
    """Compare the drawn tokens, int64 [samples], with the drafts. `tensors`: the plan's arrays on
    the device."""
    if "verify.parents" in tensors:
        return _verify_trees(token_ids, plan, tensors)
    agrees, cells, targets = token_ids.new_zeros(plan.num_rows * plan.width), tensors["verify.cells"], tensors["verify.targets"]
    chosen = tensors.get("verify.chosen")
    agrees.index_copy_(0, cells, token_ids.eq(targets).to(token_ids.dtype) if chosen is None else chosen)
    accepted = agrees.view(plan.num_rows, plan.width).cumprod(dim=1)
    counts = accepted.sum(dim=1) + 1
    if chosen is not None:
        token_ids = torch.where(accepted.view(-1).index_select(0, cells) > 0, targets, token_ids)
    return Verified(token_ids, counts, token_ids.index_select(0, tensors["verify.first"] + counts - 1))


def _verify_trees(token_ids: torch.Tensor, plan: VerificationPlan, tensors: Mapping[str, torch.Tensor]) -> Verified:
    """A node is accepted if its token and those of the nodes before it are the ones drawn after
    their parents. The deepest accepted node ends the output."""
    cells, first, parents, tokens, depths, branches, paths = (
        tensors[f"verify.{name}"] for name in ("cells", "first", "parents", "tokens", "depths", "branches", "paths")
    )
    drawn = token_ids.new_full((plan.num_rows * plan.width,), -1).index_copy_(0, cells, token_ids).view(plan.num_rows, plan.width)
    is_wrong = drawn.gather(1, parents).ne(tokens)
    end = depths.masked_fill((is_wrong.unsqueeze(1) & branches).any(dim=2), -1).argmax(dim=1, keepdim=True)
    counts = depths.gather(1, end).squeeze(1) + 1
    order = paths.gather(1, end.unsqueeze(2).expand(-1, 1, plan.width)).squeeze(1) + first.unsqueeze(1)
    last = token_ids.index_select(0, first + end.squeeze(1))
    return Verified(token_ids, counts, last, order.flatten().index_select(0, cells))


def make_extensions(
    layout: BatchLayout, backend: AttentionBackend, tensors: Mapping[str, torch.Tensor], *, is_plain: bool
) -> dict[type, Any]:
    """The extension `TreeMask` of a step with trees. tensors: the plan's arrays. is_plain: all
    layers are in one cache group, and drafts are compared with what is drawn. Raises ValueError
    where trees cannot be verified."""
    drafts = layout.drafts
    if drafts is None or "verify.bits" not in tensors:
        return {}
    if not backend.capabilities.tree_mask:
        raise ValueError(f"{type(backend).__name__} cannot verify trees of drafted tokens; use a drafter of chains")
    if not is_plain:
        raise ValueError("models with several cache groups, and synthetic acceptance, verify no trees of drafted tokens")
    return {TreeMask: TreeMask(drafts.rows[drafts.num_samples > 1], tensors["verify.bits"])}


@dataclass(frozen=True, slots=True)
class SampleRound:
    """The samples of one offset in their rows; of trees, one sample of each row at one depth, in
    place of the one that the device chooses. Names of `arrays` begin with `prefix`; beside those of
    the plans there are `samples` and `rows`, int64 [n]: the samples and their sampling rows."""

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
    rounds, depths = [], drafts.offsets if drafts.shifts is None else drafts.offsets - drafts.shifts
    for offset in range(int(depths.max(initial=-1)) + 1):
        samples = np.flatnonzero(depths == offset)
        samples = samples[np.unique(rows[samples], return_index=True)[1]]
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
        targets, nodes = tensors["verify.targets"], _ReachedNodes(tensors) if "verify.parents" in tensors else None
        # nodes that are not reached are not drawn; the last cell takes what is drawn for ended rows
        token_ids, best = targets.new_full((len(targets) + 1,), -1), logits.new_zeros(len(targets) + 1, dtype=torch.float32)
        is_output = torch.ones_like(tensors["verify.first"], dtype=torch.bool)
        masked = "grammar_mask" in tensors  # a deferred mask, which the rounds do not have
        if masked:
            allowed = tensors["grammar_mask"].new_full((len(targets), tensors["grammar_mask"].shape[1]), -1)
            allowed.index_copy_(0, tensors["grammar_rows"], tensors["grammar_mask"])
        for each in rounds:
            own = each.select(tensors)
            samples, rows = own["samples"], own["rows"]
            kept = is_output.index_select(0, rows)
            if nodes is not None:
                samples = nodes.find_samples(rows)
            if masked:
                own |= {"grammar_rows": torch.arange(len(samples), device=samples.device), "grammar_mask": allowed.index_select(0, samples)}
            drawn = self._sampler.sample(logits.index_select(0, samples), each.sampling, each.processing, own)
            ids = self._agree(drawn.token_ids)
            cells = samples if nodes is None else torch.where(kept, samples, len(targets))
            token_ids.index_copy_(0, cells, ids)
            best.index_copy_(0, cells, drawn.best)
            if each.processing is not None:
                self._processors.observe_tokens(ids, each.processing, own, kept)
            is_right = ids.eq(targets.index_select(0, samples)) if nodes is None else nodes.advance(rows, ids, kept)
            is_output.index_copy_(0, rows, kept & is_right)
        return Sampled(token_ids[:-1], best[:-1])


class _ReachedNodes:
    """The node of each row's tree that the tokens drawn so far lead to."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._first, self._parents, self._tokens = (tensors[f"verify.{name}"] for name in ("first", "parents", "tokens"))
        self._nodes = torch.zeros_like(self._first)

    def find_samples(self, rows: torch.Tensor) -> torch.Tensor:
        return (self._first + self._nodes).index_select(0, rows)

    def advance(self, rows: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Follow the tokens drawn for these rows, of which those `kept` are output. -> whether each
        is a drafted one, bool [rows]."""
        nodes = self._nodes.index_select(0, rows)
        follows = self._parents.index_select(0, rows).eq(nodes.unsqueeze(1)) & self._tokens.index_select(0, rows).eq(ids.unsqueeze(1))
        is_found, child = follows.to(torch.int64).max(dim=1)
        self._nodes.index_copy_(0, rows, torch.where(kept & is_found.bool(), child, nodes))
        return is_found.bool()
