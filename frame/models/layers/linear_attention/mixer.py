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
from frame.kernels.linear.invariant import add_halves, map_elements
from frame.kernels.linear_attention import Gates, MixLayout, StatePages
from frame.models.layers.linear_attention.convolution import RowPositions
from frame.models.layers.linear_attention.recurrence import Recurrence, run_rows, run_tokens

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch, KVCache
    from frame.core.interfaces.build import BuildContext
    from frame.models.layers.linear_attention.convolution import ShortConvolution, StepPositions
    from frame.models.layers.parameter import ShardedParameter

_NORM_EPS = 1e-6  # of the length of queries and keys


class StateMixer(nn.Module):
    """Convolution, gates and recurrence of one layer. The state of a sequence is the past inputs of
    the convolution, and a matrix for each head."""

    def __init__(
        self, context: BuildContext, layer: int, layout: MixLayout, conv: ShortConvolution, positions: StepPositions, minimum: float = 0.0
    ) -> None:
        """The owner sets the parameters of `Gates`. minimum: see there."""
        super().__init__()
        if context.attention is None:
            raise TypeError("the build context of a model needs an attention backend")
        self.backend = context.attention
        self.num_heads, self.v_head_dim = layout.heads, layout.value
        self.layout = layout
        self.conv = conv
        self.positions = positions
        self.minimum = minimum
        self._is_deterministic = context.deterministic
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
        drafted = states.drafted
        if drafted is not None:
            inputs = tuple(tensor.index_select(0, drafted.tokens) for tensor in (mixed, decay, beta))
            drafted.inputs[self.cache.layer] = (self, inputs)
        pages = StatePages(states.pages, states.pages if drafted is None else drafted.targets)
        gates = self._build_gates(decay, beta)
        if kernels.can_use_triton(mixed.device):
            return self._mix_with_triton(mixed, gates, pages, batch)
        past, matrices = batch.kv.layer(self.cache.layer)
        mixed = self.conv(mixed, past, pages, self.positions.of(batch))
        recurrence = self._activate(mixed, gates)
        out = self._run(recurrence, matrices, pages, batch.host.query_lens.tolist(), batch.num_decodes)
        return out if gates.skip is None else (out.float() + gates.skip[:, None] * recurrence.v.float()).to(out.dtype)

    def replay(self, inputs: tuple[torch.Tensor, ...], kv: KVCache, pages: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """See `StateLayer.replay`."""
        (mixed, decay, beta), (starts, lens) = inputs, rows
        past, matrices = kv.layer(self.cache.layer)
        in_place = StatePages(pages, pages)
        if kernels.can_use_triton(mixed.device):
            from frame.kernels.linear_attention import convolution, scan

            numbers = torch.arange(len(lens), dtype=torch.int32, device=lens.device)  # each row is one chunk
            bias = None if self.conv.bias is None else self.conv.bias.data
            convolved = mixed.new_empty(mixed.shape)
            chunks = (starts, numbers, starts[:-1])
            convolution.convolve_chunks(self.layout, mixed, self.conv.weight.data, bias, past, in_place, chunks, convolved)
            convolution.keep_inputs(mixed, past, in_place, starts, lens)
            out = mixed.new_empty((len(mixed), self.num_heads, self.v_head_dim))
            gates = self._build_gates(decay, beta)
            scan.scan_rows(self.layout, convolved, gates, matrices, in_place, (starts, lens), out, is_fixed=self._is_deterministic)
            return
        counts = lens.tolist()
        kept = torch.cat([torch.arange(start, start + count) for start, count in zip(starts.tolist(), counts, strict=False)])
        mixed, decay, beta = (tensor.index_select(0, kept) for tensor in inputs)
        positions = RowPositions(F.pad(lens.cumsum(0), (1, 0)), lens, len(kept), self.conv.width)
        recurrence = self._activate(self.conv(mixed, past, in_place, positions), self._build_gates(decay, beta))
        self._run(recurrence, matrices, in_place, counts, 0)

    def _run(self, inputs: Recurrence, states: torch.Tensor, pages: StatePages, lens: list[int], num_decodes: int) -> torch.Tensor:
        """See `run_rows`."""
        if self._is_deterministic:
            return run_tokens(inputs, states, pages, lens)
        return run_rows(inputs, states, pages, lens, num_decodes)

    def _build_gates(self, decay: torch.Tensor, beta: torch.Tensor) -> Gates:
        skip = None if self.skip is None else self.skip.data
        return Gates(decay, beta, self.log_decay.data.view(-1), self.bias.data, skip, self.minimum)

    def _mix_with_triton(self, x: torch.Tensor, gates: Gates, pages: StatePages, batch: ForwardBatch) -> torch.Tensor:
        """Decodes have other kernels than other rows, except in the batch-invariant mode."""
        from frame.kernels.linear_attention import chunks, convolution, scan

        past, matrices = batch.kv.layer(self.cache.layer)
        layout, weight = self.layout, self.conv.weight.data
        bias = None if self.conv.bias is None else self.conv.bias.data
        mixed = x.new_empty(x.shape)
        out = x.new_empty((len(x), layout.heads, layout.value))
        first = 0 if self._is_deterministic else batch.num_decodes
        if first:
            in_place = StatePages(*(tensor[:first] for tensor in pages))
            convolution.convolve_tokens(layout, x[:first], weight, bias, past, in_place, mixed)
            scan.scan_rows(layout, mixed, gates, matrices, in_place, None, out)
        if first < batch.num_rows:
            in_place, rows = StatePages(*(tensor[first:] for tensor in pages)), self.positions.chunks_of(batch, first)
            lens = batch.query_lens[first:]
            convolution.convolve_chunks(layout, x, weight, bias, past, in_place, rows, mixed)
            convolution.keep_inputs(x, past, in_place, rows[0], lens)
            if self._is_deterministic:  # a token's sums have no other order in chunks than alone
                scan.scan_rows(layout, mixed, gates, matrices, in_place, (rows[0], lens), out, is_fixed=True)
            else:
                chunks.extend_rows(layout, mixed, gates, matrices, in_place, rows, out)
        return out

    def _activate(self, mixed: torch.Tensor, gates: Gates) -> Recurrence:
        """The inputs of the recurrence in PyTorch."""
        layout = self.layout
        widths = (layout.key_heads * layout.key, layout.key_heads * layout.key, layout.heads * layout.value)
        q, k, v = (
            mixed[:, place : place + width].unflatten(-1, (heads, -1))
            for place, width, heads in zip(layout.places, widths, (layout.key_heads, layout.key_heads, layout.heads), strict=True)
        )
        is_invariant = self._is_deterministic
        if layout.normalized:
            squares = (tensor.float().square() for tensor in (q, k))
            sums = (add_halves(each, -1).unsqueeze(-1) if is_invariant else each.sum(-1, keepdim=True) for each in squares)
            q, k = (tensor.float() * torch.rsqrt(total + _NORM_EPS) for tensor, total in zip((q, k), sums, strict=True))
            q = q * layout.key**-0.5
        step = gates.decay.float() + gates.bias
        step = map_elements(F.softplus, step) if is_invariant else F.softplus(step)
        if not layout.delta:
            step = step.clamp(min=gates.minimum)
            return Recurrence(q, k, v, -gates.log_decay.exp() * step, step, delta=False)
        if layout.by_key:
            decay = -gates.log_decay.exp()[:, None] * step.unflatten(-1, (layout.heads, -1))
        else:
            decay = -gates.log_decay.exp() * step
        beta = gates.beta.float()
        return Recurrence(q, k, v, decay, map_elements(torch.sigmoid, beta) if is_invariant else beta.sigmoid())
