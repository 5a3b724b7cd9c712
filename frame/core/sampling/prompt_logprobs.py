"""Log-probabilities of prompt tokens, computed in blocks, because the logits of a long prompt over
a large vocabulary would take too much memory; and the hidden states of prompt tokens.

Used by `SamplingPlanner` and by runners. Must not know pages or how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from frame.core.interfaces.batch import PromptLogprobs

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.interfaces.device_operations import DeviceOperations
    from frame.core.sampling.batch_layout import BatchLayout
    from frame.core.sampling.sampling_metadata import SamplingTable

_BLOCK_CELLS = 1 << 23  # maximum number of logits per block
_CUDA_BLOCK_CELLS = 1 << 25  # larger on CUDA, where each block costs kernel launches


class PromptOutputs(NamedTuple):
    """What a step yields for prompt tokens, one entry per batch row; see `StepResult`."""

    logprobs: list[PromptLogprobs | None] | None
    states: list[np.ndarray | None] | None


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """The prompt tokens of one row that get a log-probability: `count` tokens from position
    `first`. The token after the end of the prompt gets none. `tokens`: the row's own, among those
    of the plan."""

    row: int
    first: int
    count: int
    num_top: int
    tokens: slice


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The scored rows of one step, and those that return hidden states: (row, its tokens among
    those of the plan). `targets`, int64: the next prompt token of each computed token, 0 where
    there is none."""

    rows: tuple[ScoredRow, ...]
    states: tuple[tuple[int, slice], ...]
    targets: np.ndarray
    num_rows: int

    @property
    def num_top(self) -> int:
        return max(row.num_top for row in self.rows)

    def list_scored(self, num_tokens: int) -> list[slice]:
        """Which tokens of the plan, of which there are so many, are scored."""
        return [row.tokens for row in self.rows] if self.states else [slice(0, num_tokens)]


def plan_prompts(batch: ScheduledBatch, layout: BatchLayout, table: SamplingTable) -> PromptPlan:
    """The prompt tokens that a step scores of `layout.prompt_logprob_rows`, of which there are
    some: the logits at position p are those of the token at p + 1."""
    rows: list[ScoredRow] = []
    states: list[tuple[int, slice]] = []
    targets: list[np.ndarray] = []
    end = 0
    for row in layout.prompt_logprob_rows.tolist():  # few rows request them
        slot, start, length = int(batch.slots[row]), int(batch.num_computed[row]), int(batch.num_scheduled[row])
        target, tokens = np.zeros(length, np.int64), slice(end, end := end + length)
        if table.returns_states(slot):
            states.append((row, tokens))
        else:
            known = table.prompt(slot)[start + 1 : start + 1 + length]
            target[: len(known)] = known
            rows.append(ScoredRow(row, start + 1, len(known), table.num_top_prompt_logprobs(slot), tokens))
        targets.append(target)
    return PromptPlan(tuple(rows), tuple(states), np.concatenate(targets), len(batch.slots))


class PromptScores:
    """The log-probabilities and hidden states of one step on the device; implements
    `PromptResult`."""

    def __init__(
        self,
        plan: PromptPlan,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        head: Callable[[torch.Tensor, int], torch.Tensor],
        vocab: int,
        operations: DeviceOperations,
    ) -> None:
        """hidden: [tokens, hidden_size], of the plan's rows. head: hidden states, and
        the index of the first of them -> logits [n, vocab]."""
        self._plan = plan
        block = max(1, (_CUDA_BLOCK_CELLS if hidden.is_cuda else _BLOCK_CELLS) // vocab)
        self._tensors = []
        if plan.rows:
            places = (
                slice(start, min(start + block, scored.stop))
                for scored in plan.list_scored(len(hidden))
                for start in range(scored.start, scored.stop, block)
            )
            pieces = [_scores(operations, head(hidden[each], each.start), targets[each], plan.num_top) for each in places]
            self._tensors += [torch.cat(column) for column in zip(*pieces, strict=True)]
        if plan.states:
            self._tensors.append(torch.cat([hidden[tokens] for _, tokens in plan.states]).float())

    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    def build_outputs(self, arrays: list[np.ndarray]) -> PromptOutputs:
        states = spread_states(self._plan.states, arrays[-1], self._plan.num_rows) if self._plan.states else None
        return PromptOutputs(self._list_logprobs(*arrays[:4]) if self._plan.rows else None, states)

    def _list_logprobs(self, chosen: np.ndarray, top_ids: np.ndarray, top: np.ndarray, ranks: np.ndarray) -> list[PromptLogprobs | None]:
        results: list[PromptLogprobs | None] = [None] * self._plan.num_rows
        start = 0
        for scored in self._plan.rows:
            here = slice(start, start + scored.count)
            ids = top_ids[here, : scored.num_top].astype(np.int32)
            likeliest = top[here, : scored.num_top].copy()
            results[scored.row] = PromptLogprobs(scored.first, chosen[here].copy(), ids, likeliest, ranks[here].astype(np.int32))
            start += scored.tokens.stop - scored.tokens.start
        return results


def _scores(operations: DeviceOperations, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """The result of `compute_logprobs` for logits [n, vocab], and the rank [n] of each target: 1 +
    the number of tokens with a greater logit."""
    ranks = (logits > logits.gather(1, targets.unsqueeze(1))).sum(dim=-1) + 1
    return (*operations.compute_logprobs(logits, targets, num_top), ranks)


def spread_states(rows: Sequence[tuple[int, slice]], states: np.ndarray, num_rows: int) -> list[np.ndarray | None]:
    """The hidden states of each of `num_rows` rows. states: [tokens, hidden_size], of `rows` one
    after another."""
    results: list[np.ndarray | None] = [None] * num_rows
    start = 0
    for row, tokens in rows:
        results[row] = states[start : (start := start + tokens.stop - tokens.start)].copy()
    return results
