"""The short causal convolution before a recurrence, whose past inputs are part of the state.

Used by the layers of this folder. Must not know a recurrence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.cache_groups import CacheTensor
from frame.kernels.linear.invariant import silu
from frame.kernels.linear_attention import CHUNK
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.kernels.linear_attention import StatePages


class RowPositions:
    """Where each token's earlier inputs are, for all layers of one step: indices into [past inputs
    of all rows, tokens]. `width`: inputs that a convolution reads, the token's own included."""

    def __init__(self, query_starts: torch.Tensor, query_lens: torch.Tensor, tokens: int, width: int) -> None:
        """The arrays as those of `ForwardBatch`, for `tokens` tokens."""
        past, rows, device = width - 1, len(query_lens), query_lens.device
        starts, lens = query_starts[:-1].long(), query_lens.long()
        row = torch.repeat_interleave(torch.arange(rows, device=device), lens, output_size=tokens)
        token = torch.arange(tokens, device=device)
        inside = token - starts[row]  # number of the token in its row
        base = rows * past  # tokens follow the past inputs
        self.lags = [torch.where(inside >= lag, base + token - lag, row * past + past + inside - lag) for lag in range(1, width)]
        kept = lens[:, None] - past + torch.arange(past, device=device)  # inputs that the next step finds
        stored = torch.arange(rows, device=device)[:, None] * past + past + kept
        self.kept = torch.where(kept >= 0, base + starts[:, None] + kept, stored).flatten()


class ShortConvolution(nn.Module):
    """SiLU(causal depthwise convolution): [tokens, channels] -> the same shape.

    `streams`: checkpoint layers and this rank's range of the channels of each. Their weights are
    [channels, 1, width].
    """

    def __init__(self, context: BuildContext, streams: Mapping[str, Range], width: int, bias: bool = False) -> None:
        super().__init__()
        self.width = width
        self._is_deterministic = context.deterministic
        self._silu = silu if context.deterministic else F.silu
        channels = sum(span.size for span in streams.values())
        self.cache_tensor = CacheTensor((width - 1, channels), context.dtype)
        self.weight = ShardedParameter(torch.empty(channels, 1, width, dtype=context.dtype), ShardRule(output=0))
        self.bias = ShardedParameter(torch.empty(channels, dtype=context.dtype), ShardRule(output=0)) if bias else None
        local = 0
        for name, span in streams.items():
            placed = Range(span.full, span.start, span.size, local)
            self.weight.bind(f"{name}.weight", placed)
            if self.bias is not None:
                self.bias.bind(f"{name}.bias", placed)
            local += span.size

    def forward(self, x: torch.Tensor, states: torch.Tensor, pages: StatePages, positions: RowPositions) -> torch.Tensor:
        """`states` [pages, width - 1, channels], the rows' past inputs, which are replaced."""
        inputs = torch.cat((states.index_select(0, pages.sources).flatten(0, 1), x))
        weight = self.weight[:, 0].unbind(1)
        out = x * weight[-1]
        for lag, places in enumerate(positions.lags, 1):
            earlier = inputs.index_select(0, places)
            if self._is_deterministic:  # a fused product and sum is rounded once by some instructions, and twice by others
                out = out + earlier * weight[-1 - lag]
            else:
                out = torch.addcmul(out, earlier, weight[-1 - lag])
        states.index_copy_(0, pages.targets, inputs.index_select(0, positions.kept).unflatten(0, (len(pages.targets), -1)))
        return self._silu(out if self.bias is None else out + self.bias)


class StepPositions:
    """Where the rows of the latest step are, which the layers of one model share."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._latest: tuple[ForwardBatch, RowPositions] | None = None
        self._latest_chunks: tuple[ForwardBatch, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None

    def of(self, batch: ForwardBatch) -> RowPositions:
        """Those of the batch, computed by the first layer that asks."""
        if self._latest is None or self._latest[0] is not batch:
            self._latest = (batch, RowPositions(batch.query_starts, batch.query_lens, batch.num_tokens, self.width))
        return self._latest[1]

    def chunks_of(self, batch: ForwardBatch, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the rows from `first` on, which all layers name alike: their `query_starts`; the row
        and the first token of each chunk, int32 [chunks]."""
        if batch.num_decodes == batch.num_rows:  # may be captured: no tensor of its own, which the graph would outlive
            return batch.query_starts, batch.query_starts[:-1], batch.query_starts[:-1]
        if self._latest_chunks is None or self._latest_chunks[0] is not batch:
            self._latest_chunks = (batch, find_chunks(batch, first))
        return self._latest_chunks[1]


def find_chunks(batch: ForwardBatch, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `StepPositions.chunks_of`, without a wait for the device."""
    starts = batch.query_starts[first:]
    total = int((-(-batch.host.query_lens[first:] // CHUNK)).sum())
    counts = (batch.query_lens[first:] + CHUNK - 1) // CHUNK
    row_of = torch.repeat_interleave(counts, output_size=total)
    earlier = (counts.cumsum(0) - counts).index_select(0, row_of)
    begins = starts.index_select(0, row_of) + CHUNK * (torch.arange(total, device=starts.device) - earlier)
    return starts, row_of.int(), begins.int()
