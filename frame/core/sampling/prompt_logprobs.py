"""Log-probabilities of prompt tokens, in blocks: a long prompt's logits over a large vocabulary are
never in memory at once.

Knows neither pages nor sampling; hidden states in, arrays out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.interfaces.batch import PromptLogprobs
from frame.core.sampling.sampler import logprobs

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.sampling.batch_layout import BatchLayout
    from frame.core.sampling.sampling_metadata import SamplingTable

_BLOCK_CELLS = 1 << 23  # logits at once
_CUDA_BLOCK_CELLS = 1 << 25  # where a block costs launches


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One row's piece: tokens `first …` get a log-probability, `count` of them (the token after the
    last of a prompt is no prompt)."""

    row: int
    first: int
    count: int
    num_top: int


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The step's pieces; `targets` int64 has one entry a computed token (0 where there is no next
    prompt token)."""

    parts: tuple[PromptPart, ...]
    lengths: tuple[int, ...]
    targets: np.ndarray
    num_rows: int

    @property
    def num_top(self) -> int:
        return max(part.num_top for part in self.parts)


def plan_prompts(batch: ScheduledBatch, layout: BatchLayout, table: SamplingTable) -> PromptPlan | None:
    """Which prompt tokens this step can score: the logits at position p are of the token at p + 1.
    None when no row asked."""
    if not len(layout.prompt_logprob_rows):
        return None
    parts, lengths, targets = [], [], []
    for row in layout.prompt_logprob_rows.tolist():  # rows that ask, which are few
        slot, start, length = int(batch.slots[row]), int(batch.num_computed[row]), int(batch.num_scheduled[row])
        prompt = table.prompt(slot)
        target = np.zeros(length, np.int64)
        known = prompt[start + 1 : start + 1 + length]
        target[: len(known)] = known
        parts.append(PromptPart(row, start + 1, len(known), table.num_top_prompt_logprobs(slot)))
        lengths.append(length)
        targets.append(target)
    return PromptPlan(tuple(parts), tuple(lengths), np.concatenate(targets), len(batch.slots))


class PromptScores:
    """The scores of one step on the device (`PromptResult`)."""

    def __init__(
        self, plan: PromptPlan, hidden: torch.Tensor, targets: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], vocab: int
    ) -> None:
        """hidden [tokens, hidden_size] of the rows' tokens; `head` gives their logits."""
        self._plan = plan
        block = max(1, (_CUDA_BLOCK_CELLS if hidden.is_cuda else _BLOCK_CELLS) // vocab)
        pieces = [
            _scores(head(hidden[start : start + block]), targets[start : start + block], plan.num_top)
            for start in range(0, len(hidden), block)
        ]
        self._tensors = [torch.cat(column) for column in zip(*pieces, strict=True)]

    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    def finish(self, arrays: list[np.ndarray]) -> list[PromptLogprobs | None]:
        chosen, top_ids, top, ranks = arrays
        results: list[PromptLogprobs | None] = [None] * self._plan.num_rows
        start = 0
        for part, length in zip(self._plan.parts, self._plan.lengths, strict=True):
            here = slice(start, start + part.count)
            ids = top_ids[here, : part.num_top].astype(np.int32)
            likeliest = top[here, : part.num_top].copy()
            results[part.row] = PromptLogprobs(part.first, chosen[here].copy(), ids, likeliest, ranks[here].astype(np.int32))
            start += length
        return results


def _scores(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """What `logprobs` gives of logits [n, vocab], and the rank [n] of each target: 1 + how many
    tokens are likelier."""
    ranks = (logits > logits.gather(1, targets.unsqueeze(1))).sum(dim=-1) + 1
    return (*logprobs(logits, targets, num_top), ranks)
