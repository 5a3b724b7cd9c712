"""Poolers with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from frame.core.interfaces.batch import ForwardBatch
from frame.interfaces.pooling import Pooler, PoolerCapabilities, PoolerContext
from tests.testing.mutants import MutantList


class Weighted(Pooler):
    """The mean of all tokens, of which later ones count more."""

    def __init__(self, context: PoolerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.context = context

    def list_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """The row of each token."""
        rows = torch.arange(batch.num_rows, device=batch.token_ids.device)
        return rows.repeat_interleave(batch.query_lens.long(), output_size=batch.num_tokens)

    def weigh(self, batch: ForwardBatch) -> torch.Tensor:
        return (batch.positions + 1).float()

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows, weights = self.list_rows(batch), self.weigh(batch)
        sums = torch.zeros(batch.num_rows, hidden.shape[1], device=hidden.device)
        sums.index_add_(0, rows, hidden.float() * weights.unsqueeze(1))
        return sums / torch.zeros(batch.num_rows, device=hidden.device).index_add_(0, rows, weights).unsqueeze(1)


class Last(Pooler):
    """The last token's state. The reference of what reads no other token."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return hidden.index_select(0, batch.logits_indices)


LAST_ALONE = PoolerCapabilities(whole_prompts=False)

mutant = MUTANTS = MutantList("pooler", reference=Weighted, capabilities=PoolerCapabilities())


@mutant
class StartsAtTheNextToken(Weighted):
    """Is off by one: the first token of a row counts for the row before."""

    def list_rows(self, batch: ForwardBatch) -> torch.Tensor:
        rows = super().list_rows(batch)
        return torch.cat((rows[1:], rows[-1:]))


@mutant
class DividesByTheLongest(Weighted):
    """Divides by the length of the longest prompt of the step."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        return vectors * batch.query_lens.unsqueeze(1) / batch.query_lens.max()


@mutant
class OrdersBySlot(Weighted):
    """Returns the vectors in the order of the request slots."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().pool(hidden, batch).index_select(0, batch.request_slots.argsort())


@mutant
class WeighsBySlot(Weighted):
    """Takes the place in the KV cache for the position in the prompt."""

    def weigh(self, batch: ForwardBatch) -> torch.Tensor:
        return (batch.kv_slots + 1).float()


@mutant
class SumsInTheModelsType(Weighted):
    """Adds in the dtype of the hidden states."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows, weights = self.list_rows(batch), self.weigh(batch).to(hidden.dtype)
        sums = hidden.new_zeros(batch.num_rows, hidden.shape[1])
        sums.index_add_(0, rows, hidden * weights.unsqueeze(1))
        return sums / hidden.new_zeros(batch.num_rows).index_add_(0, rows, weights).unsqueeze(1)


@mutant
class MasksBySums(Weighted):
    """Selects tokens by a product with zeros and ones, so that a NaN reaches all rows."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows, weights = self.list_rows(batch), self.weigh(batch)
        chosen = (rows.unsqueeze(0) == torch.arange(batch.num_rows, device=rows.device).unsqueeze(1)).float() * weights
        return chosen @ hidden.float() / chosen.sum(1, keepdim=True)


@mutant
class HidesNaN(Weighted):
    """Replaces values that are not finite, so that a broken request gets a vector of zeros."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().pool(hidden.nan_to_num(0.0, 0.0, 0.0), batch)


@mutant
class SubtractsTheMean(Weighted):
    """Centres the vectors over the step."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        return vectors - 0.1 * vectors.mean(0, keepdim=True)


@mutant
class ScalesInPlace(Weighted):
    """Multiplies the hidden states themselves by their weights."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        hidden.mul_(1.5)
        return vectors


@mutant
class RemembersAnAddress(Weighted):
    """Returns the vectors of the step before where hidden states have the same address."""

    seen: tuple[Any, Any] = (None, None)

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        key = (hidden.data_ptr(), tuple(hidden.shape))
        if self.seen[0] != key:
            self.seen = key, super().pool(hidden, batch)
        vectors: torch.Tensor = self.seen[1]
        return vectors.clone()


@mutant
class SharesItsBuffer(Weighted):
    """Writes every step's vectors to one buffer."""

    buffer: torch.Tensor | None = None

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        if self.buffer is None:
            self.buffer = torch.zeros(1024, vectors.shape[1], device=vectors.device)
        self.buffer[: len(vectors)] = vectors
        return self.buffer[: len(vectors)]


@mutant
class KeepsWeightsInTheClass(Weighted):
    """Keeps a scale in the class, by the first hidden size."""

    scale: ClassVar[list[float]] = []

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        if not self.scale:
            self.scale.append(float(hidden.shape[1]))
        return super().pool(hidden, batch)[:, : int(self.scale[0])]


@mutant
class Averages(Weighted):
    """Mixes in an average over the steps so far."""

    average: Any = 0.0

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        self.average = 0.9 * self.average + 0.1 * vectors.mean(0)
        return vectors + 0.01 * self.average


@mutant
class LoopsOverRows(Weighted):
    """Pools the rows one by one in Python."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        weights, vectors, start = self.weigh(batch), [], 0
        for length in batch.host.query_lens:
            part = slice(start, start + int(length))
            vectors.append((hidden[part].float() * weights[part, None]).sum(0) / weights[part].sum())
            start += int(length)
        return torch.stack(vectors)


@mutant
class ReadsLengths(Weighted):
    """Reads the number of tokens from the device."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        return vectors if int(batch.query_starts[-1].item()) else vectors * 0


@mutant
class PicksAtRandom(Weighted):
    """Drops tokens at random, as in training."""

    def weigh(self, batch: ForwardBatch) -> torch.Tensor:
        return super().weigh(batch) * (torch.rand(batch.num_tokens, device=batch.token_ids.device) * 0.1 + 0.95)


@mutant
class CutsLongPrompts(Weighted):
    """Reads the first 4,096 tokens of a step alone."""

    def weigh(self, batch: ForwardBatch) -> torch.Tensor:
        weights = super().weigh(batch)
        weights[4096:] *= 1e-9
        return weights


@mutant
class FixesTheWidth(Weighted):
    """Has room for 1,024 dimensions."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().pool(hidden, batch)[:, :1024]


@mutant
class HasRoomForRows(Weighted):
    """Has room for 256 rows and no more."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().pool(hidden, batch)[:256]


@mutant
class ReturnsWholeNumbers(Weighted):
    """Returns whole numbers, as of a quantized index."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return (super().pool(hidden, batch) * 127).to(torch.int8)


@mutant
class KeepsEverySequence(Weighted):
    """Keeps the vectors of all calls."""

    def __init__(self, context: PoolerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.kept: list[torch.Tensor] = []

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        self.kept.append(vectors)
        return vectors


@mutant
class SetsVariables(Weighted):
    """Sets a variable of the environment."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        os.environ["POOLED_ROWS"] = str(batch.num_rows)
        return super().pool(hidden, batch)


@mutant
class IsAlwaysTheSame(Weighted):
    """Divides the vector by itself: all prompts are alike."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        return vectors / vectors


@mutant.using(capabilities=LAST_ALONE)
class ClaimsTheLastToken(Weighted):
    """Says that it reads the last token alone, and averages chunks."""


@mutant.using(capabilities=LAST_ALONE)
class ReturnsEveryRow(Last):
    """Returns a vector for each row, also those whose prompts are not complete."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return hidden.index_select(0, batch.query_starts[1:].long() - 1)


@mutant.using(capabilities=LAST_ALONE)
class NeedsACompletePrompt(Last):
    """Fails in steps of chunks alone."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        return vectors - vectors.max() * 0


@mutant.using(capabilities=LAST_ALONE)
class ReturnsAView(Last):
    """Returns a view of the hidden states where they have one row."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return hidden if len(hidden) == len(batch.logits_indices) else super().pool(hidden, batch)


@mutant
class SeesTheTokenBefore(Weighted):
    """Smooths over two tokens, at the start of a row over the border of the prompt before."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().pool(hidden + 0.1 * hidden.roll(1, 0), batch)


SUMS: list[torch.Tensor] = []


@mutant
class KeepsStatesInItsModule(Weighted):
    """Keeps the states of all steps in a list of its module."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        SUMS.append(hidden)
        return super().pool(hidden, batch)
