"""Poolers: the mean of a prompt, the last token, and poolers with a bug each."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import BaseModel

from frame.core.interfaces.batch import ForwardBatch
from frame.interfaces.pooling import Pooler, PoolerCapabilities, PoolerContext
from tests.testing.held_out import Wrong


class PlainMean(Pooler):
    """The mean of the hidden states of each prompt."""

    capabilities: ClassVar[PoolerCapabilities] = PoolerCapabilities(whole_prompts=True)

    def __init__(self, context: PoolerContext, options: BaseModel | None = None) -> None:
        self.context = context

    def find_rows(self, batch: ForwardBatch) -> torch.Tensor:
        tokens = torch.arange(batch.num_tokens, device=batch.query_starts.device)
        return torch.searchsorted(batch.query_starts[1:].long().contiguous(), tokens, right=True)

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        sums = hidden.new_zeros(batch.num_rows, hidden.shape[1], dtype=torch.float32)
        sums.index_add_(0, self.find_rows(batch), hidden.float())
        return sums / batch.query_lens.unsqueeze(1)


class LastToken(Pooler):
    """The hidden state of the last token of each prompt that is complete."""

    capabilities: ClassVar[PoolerCapabilities] = PoolerCapabilities(whole_prompts=False)

    def __init__(self, context: PoolerContext, options: BaseModel | None = None) -> None:
        self.context = context

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return hidden.index_select(0, batch.logits_indices)


TWIN = PlainMean
TWINS = (PlainMean, LastToken)
WRONG = Wrong()


@WRONG.add("A prompt that is not finite spoils all after it, and vectors depend on the batch: sums are differences of one running sum.")
class RunningSum(PlainMean):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        total = torch.cat([hidden.new_zeros(1, hidden.shape[1], dtype=torch.float32), hidden.float().cumsum(0)])
        starts = batch.query_starts.long()
        return (total[starts[1:]] - total[starts[:-1]]) / batch.query_lens.unsqueeze(1)


@WRONG.add("Vectors of long documents are wrong: they are summed in bfloat16, where small values are lost.")
class SumsInDtype(PlainMean):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        sums = hidden.new_zeros(batch.num_rows, hidden.shape[1])
        for part in range(int(batch.host.query_lens.max(initial=0))):
            indices = batch.query_starts[:-1].long() + part
            is_there = (part < batch.query_lens).unsqueeze(1)
            sums = sums + hidden[indices.clamp(max=len(hidden) - 1)].where(is_there, 0)
        return sums / batch.query_lens.unsqueeze(1)


@WRONG.add("Vectors of prompts above 256 tokens have a wrong length in bfloat16: the number of tokens is rounded.")
class RoundsLength(PlainMean):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        mean = super().pool(hidden, batch)
        return mean * batch.query_lens.unsqueeze(1) / batch.query_lens.to(hidden.dtype).float().unsqueeze(1)


@WRONG.add("Requests get vectors of later steps: results are rows of one buffer.")
class OneBuffer(PlainMean):
    def __init__(self, context: PoolerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.buffer = torch.zeros(256, context.hidden_size, device=context.device)

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        if batch.num_rows > len(self.buffer):
            return super().pool(hidden, batch)
        return self.buffer[: batch.num_rows].copy_(super().pool(hidden, batch))


@WRONG.add("A request whose numbers overflowed gets a vector of zeros instead of an error: what is not finite is replaced.")
class HidesNan(PlainMean):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().pool(hidden.nan_to_num(), batch)


@WRONG.add("Vectors depend on the company of a prompt: the mean of the batch is subtracted to spread them.")
class CentresBatch(PlainMean):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        vectors = super().pool(hidden, batch)
        return vectors - 0.001 * vectors.mean(0) if len(vectors) > 1 else vectors


@WRONG.add("A step of many prompts waits for each of them: they are pooled one after the other.")
class LoopsOverPrompts(PlainMean):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return torch.stack([part.float().mean(0) for part in hidden.split(batch.query_lens.tolist())])


@WRONG.add("One long document among short texts takes the memory of as many long ones: prompts are padded to one length.")
class PadsPrompts(PlainMean):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        longest = int(batch.host.query_lens.max(initial=0))
        places = torch.arange(longest, device=hidden.device)
        indices = (batch.query_starts[:-1].long().unsqueeze(1) + places).clamp(max=len(hidden) - 1)
        is_there = (places < batch.query_lens.unsqueeze(1)).unsqueeze(2)
        return hidden.float()[indices].where(is_there, 0.0).sum(1) / batch.query_lens.unsqueeze(1)


@WRONG.add("The hidden states that are returned beside the vector are wrong: they are scaled in place.")
class ScalesInPlace(PlainMean):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        hidden.div_(batch.query_lens[self.find_rows(batch)].unsqueeze(1))
        sums = hidden.new_zeros(batch.num_rows, hidden.shape[1], dtype=torch.float32)
        return sums.index_add_(0, self.find_rows(batch), hidden.float())


@WRONG.add("Chunks of long prompts get vectors, which go to other requests: each row's last token is read, complete or not.")
class LastOfRows(LastToken):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return hidden.index_select(0, batch.query_starts[1:].long() - 1)


@WRONG.add("Vectors depend on how a prompt was cut into chunks: the mean of the last chunk is returned.")
class MeanOfChunk(LastToken):
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows = torch.searchsorted(batch.query_starts[1:].long().contiguous(), batch.logits_indices, right=True)
        before = hidden.index_select(0, (batch.logits_indices - 1).maximum(batch.query_starts.long()[rows]))
        return 0.5 * (hidden.index_select(0, batch.logits_indices) + before)
