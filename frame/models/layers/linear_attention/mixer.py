"""`StateMixer`: what a layer computes with the states of its sequences, from the projections to the
results of the recurrence.

Used by the layers of this folder. A graph of a step with prompts calls it between its pieces, by
`AttentionBackend.run_states`. Must not know a projection, a page table or a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.interfaces.batch import SequenceStates
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.kernels.linear_attention import Gates, MixLayout, StatePages
from frame.models.layers.linear_attention.recurrence import Recurrence, run_rows

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.models.layers.linear_attention.convolution import ShortConvolution, StepPositions
    from frame.models.layers.parameter import ShardedParameter

_NORM_EPS = 1e-6  # of the length of queries and keys


class StateMixer(nn.Module):
    """Convolution, gates and recurrence of one layer. The state of a sequence is the past inputs of
    the convolution, and a matrix for each head."""

    def __init__(
        self, context: BuildContext, layer: int, layout: MixLayout, conv: ShortConvolution, positions: StepPositions, least: float = 0.0
    ) -> None:
        """The owner sets the parameters of `Gates`. least: see there."""
        super().__init__()
        if context.attention is None:
            raise TypeError("the build context of a model needs an attention backend")
        self.backend = context.attention
        self.num_heads, self.v_head_dim = layout.heads, layout.value
        self.layout = layout
        self.conv = conv
        self.positions = positions
        self.least = least
        self.log_decay: ShardedParameter
        self.bias: ShardedParameter
        self.skip: ShardedParameter | None = None
        state = CacheTensor((layout.heads, layout.key, layout.value), torch.float32)
        self.cache = LayerCache(layer, "snapshot", (conv.cache_tensor, state))

    def forward(self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """mixed: [tokens, channels], the inputs of the convolution; decay and beta: those of
        `Gates`. All may have strided rows. -> [tokens, heads, value size]."""
        return self.backend.run_states(self, mixed, decay, beta, batch)

    def mix(self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """As `forward`; reads the rows of the batch, and writes their states. Raises TypeError for
        a batch without states."""
        states = batch.get(SequenceStates)
        if states is None:
            raise TypeError("a layer with a recurrent state needs a batch with SequenceStates")
        pages = StatePages(states.pages, states.pages)
        skip = None if self.skip is None else self.skip.data
        gates = Gates(decay, beta, self.log_decay.data.view(-1), self.bias.data, skip, self.least)
        if kernels.can_use_triton(mixed.device):
            return self._mix_with_triton(mixed, gates, pages, batch)
        past, matrices = batch.kv.layer(self.cache.layer)
        mixed = self.conv(mixed, past, pages, self.positions.of(batch))
        inputs = self._activate(mixed, gates)
        out = run_rows(inputs, matrices, pages, batch.host.query_lens.tolist(), batch.num_decodes)
        return out if skip is None else (out.float() + skip[:, None] * inputs.v.float()).to(out.dtype)

    def _mix_with_triton(self, x: torch.Tensor, gates: Gates, pages: StatePages, batch: ForwardBatch) -> torch.Tensor:
        """Compute decodes in other kernels than the other rows."""
        from frame.kernels.linear_attention import chunks, convolution, scan

        past, matrices = batch.kv.layer(self.cache.layer)
        layout, weight = self.layout, self.conv.weight.data
        bias = None if self.conv.bias is None else self.conv.bias.data
        mixed = x.new_empty(x.shape)
        out = x.new_empty((len(x), layout.heads, layout.value))
        first = batch.num_decodes
        if first:
            own = StatePages(*(part[:first] for part in pages))
            convolution.convolve_tokens(layout, x[:first], weight, bias, past, own, mixed)
            scan.scan_rows(layout, mixed, gates, matrices, own, None, out)
        if first < batch.num_rows:
            own, rows = StatePages(*(part[first:] for part in pages)), self.positions.chunks_of(batch)
            convolution.convolve_chunks(layout, x, weight, bias, past, own, rows, mixed)
            convolution.keep_inputs(x, past, own, rows[0], batch.query_lens[first:])
            chunks.extend_rows(layout, mixed, gates, matrices, own, rows, out)
        return out

    def _activate(self, mixed: torch.Tensor, gates: Gates) -> Recurrence:
        """The inputs of the recurrence in PyTorch."""
        layout = self.layout
        widths = (layout.key_heads * layout.key, layout.key_heads * layout.key, layout.heads * layout.value)
        q, k, v = (
            mixed[:, place : place + width].unflatten(-1, (heads, -1))
            for place, width, heads in zip(layout.places, widths, (layout.key_heads, layout.key_heads, layout.heads), strict=True)
        )
        if layout.normalized:
            q, k = (part.float() * torch.rsqrt(part.float().square().sum(-1, keepdim=True) + _NORM_EPS) for part in (q, k))
            q = q * layout.key**-0.5
        step = F.softplus(gates.decay.float() + gates.bias)
        if not layout.delta:
            step = step.clamp(min=gates.least)
            return Recurrence(q, k, v, -gates.log_decay.exp() * step, step, delta=False)
        if layout.by_key:
            decay = -gates.log_decay.exp()[:, None] * step.unflatten(-1, (layout.heads, -1))
        else:
            decay = -gates.log_decay.exp() * step
        return Recurrence(q, k, v, decay, gates.beta.float().sigmoid())
