"""Verification of drafted tokens on the device: how many of a row's samples are output.

The sampler draws the token of every drafted position. A drafted token is accepted while it equals
the token drawn at its position, so the output is the one that single tokens would give (lossless
for any sampling parameters, since a draw depends on seed, position and distribution only), except
with `chosen` of benchmarks. Used by the model runner. Must not know a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from frame.core.sampling.sampler import Sampled
from frame.core.sampling.sampling_metadata import GrammarArrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from frame.core.sampling.batch_layout import DraftTrees
    from frame.core.sampling.logits_pipeline import Processors
    from frame.core.sampling.sampler import Sampler
    from frame.core.sampling.step_plan import SampleRound, StepArrays, VerificationArrays, VerificationPlan


@dataclass(frozen=True, slots=True)
class Verified:
    """Device tensors, int64."""

    token_ids: torch.Tensor  # [samples]; as drawn, except with synthetic acceptance
    counts: torch.Tensor  # [sampling rows]; samples that are output
    last: torch.Tensor  # [sampling rows]; the last token that is output
    order: torch.Tensor | None = None  # [samples]; of trees: the sample that each output is; the row's others stay. None: as drawn


def verify_drafts(token_ids: torch.Tensor, plan: VerificationPlan, tensors: VerificationArrays[torch.Tensor]) -> Verified:
    """Compare the drawn tokens, int64 [samples], with the drafts. `tensors`: the plan's arrays on
    the device."""
    if tensors.trees is not None:
        return _verify_trees(token_ids, plan, tensors, tensors.trees)
    agrees, cells, targets, chosen = token_ids.new_zeros(plan.num_rows * plan.width), tensors.cells, tensors.targets, tensors.chosen
    agrees.index_copy_(0, cells, token_ids.eq(targets).to(token_ids.dtype) if chosen is None else chosen)
    accepted = agrees.view(plan.num_rows, plan.width).cumprod(dim=1)
    counts = accepted.sum(dim=1) + 1
    if chosen is not None:
        token_ids = torch.where(accepted.view(-1).index_select(0, cells) > 0, targets, token_ids)
    return Verified(token_ids, counts, token_ids.index_select(0, tensors.first + counts - 1))


def _verify_trees(
    token_ids: torch.Tensor, plan: VerificationPlan, tensors: VerificationArrays[torch.Tensor], trees: DraftTrees[torch.Tensor]
) -> Verified:
    """A node is accepted if its token and those of the nodes before it are the ones drawn after
    their parents. The deepest accepted node ends the output."""
    cells, first, depths = tensors.cells, tensors.first, trees.depths
    drawn = token_ids.new_full((plan.num_rows * plan.width,), -1).index_copy_(0, cells, token_ids).view(plan.num_rows, plan.width)
    is_wrong = drawn.gather(1, trees.parents).ne(trees.tokens)
    end = depths.masked_fill((is_wrong.unsqueeze(1) & trees.branches).any(dim=2), -1).argmax(dim=1, keepdim=True)
    counts = depths.gather(1, end).squeeze(1) + 1
    order = trees.paths.gather(1, end.unsqueeze(2).expand(-1, 1, plan.width)).squeeze(1) + first.unsqueeze(1)
    last = token_ids.index_select(0, first + end.squeeze(1))
    return Verified(token_ids, counts, last, order.flatten().index_select(0, cells))


class RoundSampler:
    """Draws the samples of a step round by round; the logits processors observe the output of each
    round before the next one."""

    def __init__(self, sampler: Sampler, processors: Processors, agree: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`agree`: tokens drawn on this rank -> those of rank 0."""
        self._sampler = sampler
        self._processors = processors
        self._agree = agree

    def sample(self, logits: torch.Tensor, rounds: tuple[SampleRound, ...], tensors: StepArrays[torch.Tensor]) -> Sampled:
        """logits: [samples, vocab], which stay unchanged. tensors: of the step."""
        drafts = tensors.verification
        if drafts is None:
            raise RuntimeError("a step is sampled in rounds, but has no drafts")
        targets, nodes = drafts.targets, None if drafts.trees is None else _ReachedNodes(drafts.first, drafts.trees)
        # nodes that are not reached are not drawn; the last cell takes what is drawn for ended rows
        token_ids, best = targets.new_full((len(targets) + 1,), -1), logits.new_zeros(len(targets) + 1, dtype=torch.float32)
        is_output = torch.ones_like(drafts.first, dtype=torch.bool)
        allowed, deferred = None, None if tensors.sampling is None else tensors.sampling.grammar
        if deferred is not None:  # a deferred mask, which the rounds do not have
            allowed = deferred.mask.new_full((len(targets), deferred.mask.shape[1]), -1)
            allowed.index_copy_(0, deferred.rows, deferred.mask)
        for each, arrays in zip(rounds, tensors.rounds, strict=True):
            samples, rows, sampling = arrays.samples, arrays.rows, arrays.sampling
            kept = is_output.index_select(0, rows)
            if nodes is not None:
                samples = nodes.find_samples(rows)
            if allowed is not None:
                every = torch.arange(len(samples), device=samples.device)
                sampling = replace(sampling, grammar=GrammarArrays(every, allowed.index_select(0, samples)))
            drawn = self._sampler.sample(logits.index_select(0, samples), each.sampling, each.processing, sampling)
            ids = self._agree(drawn.token_ids)
            cells = samples if nodes is None else torch.where(kept, samples, len(targets))
            token_ids.index_copy_(0, cells, ids)
            best.index_copy_(0, cells, drawn.best)
            if each.processing is not None and sampling.processing is not None:
                self._processors.observe_tokens(ids, each.processing, sampling.processing, kept)
            is_right = ids.eq(targets.index_select(0, samples)) if nodes is None else nodes.advance(rows, ids, kept)
            is_output.index_copy_(0, rows, kept & is_right)
        return Sampled(token_ids[:-1], best[:-1])


class _ReachedNodes:
    """The node of each row's tree that the tokens drawn so far lead to."""

    def __init__(self, first: torch.Tensor, trees: DraftTrees[torch.Tensor]) -> None:
        self._first, self._parents, self._tokens = first, trees.parents, trees.tokens
        self._nodes = torch.zeros_like(self._first)

    def find_samples(self, rows: torch.Tensor) -> torch.Tensor:
        return (self._first + self._nodes).index_select(0, rows)

    def advance(self, rows: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Follow the tokens drawn for these rows, of which those `kept` are output. -> whether each
        is a drafted one, bool [rows]."""
        nodes = self._nodes.index_select(0, rows)
        follows = self._parents.index_select(0, rows).eq(nodes.unsqueeze(1)) & self._tokens.index_select(0, rows).eq(ids.unsqueeze(1))
        is_drafted, child = follows.to(torch.int64).max(dim=1)
        self._nodes.index_copy_(0, rows, torch.where(kept & is_drafted.bool(), child, nodes))
        return is_drafted.bool()
