"""Log-probabilities of prompt tokens, computed in blocks, because the logits of a long prompt over
a large vocabulary would take too much memory.

Used by the step planner and the model runner. Must not know pages or sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """The prompt tokens of one row that get a log-probability: `count` tokens from position
    `first`. The token after the end of the prompt gets none."""

    row: int
    first: int
    count: int
    num_top: int


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The scored rows of one step. `targets`, int64: the next prompt token of each computed token,
    0 where there is none."""

    rows: tuple[ScoredRow, ...]
    lengths: tuple[int, ...]
    targets: np.ndarray
    num_rows: int

    @property
    def num_top(self) -> int:
        return max(row.num_top for row in self.rows)


def plan_prompts(batch: ScheduledBatch, layout: BatchLayout, table: SamplingTable) -> PromptPlan:
    """The prompt tokens that a step scores of `layout.prompt_logprob_rows`, of which there are
    some: the logits at position p are those of the token at p + 1."""
    rows, lengths, targets = [], [], []
    for row in layout.prompt_logprob_rows.tolist():  # few rows request them
        slot, start, length = int(batch.slots[row]), int(batch.num_computed[row]), int(batch.num_scheduled[row])
        prompt = table.prompt(slot)
        target = np.zeros(length, np.int64)
        known = prompt[start + 1 : start + 1 + length]
        target[: len(known)] = known
        rows.append(ScoredRow(row, start + 1, len(known), table.num_top_prompt_logprobs(slot)))
        lengths.append(length)
        targets.append(target)
    return PromptPlan(tuple(rows), tuple(lengths), np.concatenate(targets), len(batch.slots))


class PromptScores:
    """The log-probabilities of one step on the device; implements `PromptResult`."""

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
        pieces = [
            _scores(operations, head(hidden[start : start + block], start), targets[start : start + block], plan.num_top)
            for start in range(0, len(hidden), block)
        ]
        self._tensors = [torch.cat(column) for column in zip(*pieces, strict=True)]

    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    def finish(self, arrays: list[np.ndarray]) -> list[PromptLogprobs | None]:
        chosen, top_ids, top, ranks = arrays
        results: list[PromptLogprobs | None] = [None] * self._plan.num_rows
        start = 0
        for scored, length in zip(self._plan.rows, self._plan.lengths, strict=True):
            here = slice(start, start + scored.count)
            ids = top_ids[here, : scored.num_top].astype(np.int32)
            likeliest = top[here, : scored.num_top].copy()
            results[scored.row] = PromptLogprobs(scored.first, chosen[here].copy(), ids, likeliest, ranks[here].astype(np.int32))
            start += length
        return results


def _scores(operations: DeviceOperations, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """The result of `compute_logprobs` for logits [n, vocab], and the rank [n] of each target: 1 +
    the number of tokens with a greater logit."""
    ranks = (logits > logits.gather(1, targets.unsqueeze(1))).sum(dim=-1) + 1
    return (*operations.compute_logprobs(logits, targets, num_top), ranks)
