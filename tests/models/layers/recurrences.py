"""Random inputs of recurrent layers over ragged rows, and their results token by token in float64.

Used by tests of the PyTorch form and of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from frame.core.interfaces.batch import ForwardBatch, HostView, SequenceStates
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.kernels.linear_attention import MixLayout
from frame.models.layers.linear_attention.convolution import ShortConvolution, StepPositions
from frame.models.layers.linear_attention.mixer import StateMixer
from frame.models.layers.linear_attention.recurrence import Recurrence
from frame.models.layers.parameter import Range, ShardedParameter
from frame.plugins.devices import open_platform
from tests.models.harness import NaiveAttention, NaivePool

CASES = {
    "gated delta": MixLayout(2, 1, 16, 24, (0, 16, 32)),
    "kimi delta": MixLayout(2, 2, 16, 16, (0, 32, 64), by_key=True),
    "mamba2": MixLayout(4, 1, 24, 8, (56, 32, 0), delta=False, normalized=False),
}
WIDTH = 4
MINIMUM = 0.01  # of Mamba's time step


@dataclass
class Drawn:
    """A layer and the inputs of some rows. `pool` holds one state more than there are rows."""

    mixer: StateMixer
    pool: NaivePool
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # mixed, decay, beta: parts of wider tensors
    pages: torch.Tensor
    lens: list[int]

    def make_batch(self, lens: list[int], decodes: int, rows: slice = slice(None)) -> ForwardBatch:
        """A batch of some rows with these numbers of tokens, of which the first ones are
        decodes."""
        device = self.pages.device
        counts = np.array(lens, np.int32)
        query_lens = torch.from_numpy(counts).to(device)
        nothing = torch.zeros(sum(lens), dtype=torch.int64, device=device)
        return ForwardBatch(
            num_decodes=decodes,
            token_ids=nothing,
            positions=nothing,
            kv_slots=nothing,
            request_slots=self.pages[rows],
            seq_lens=query_lens,
            query_lens=query_lens,
            query_starts=F.pad(query_lens.cumsum(0), (1, 0)).int(),
            page_table=nothing,
            logits_indices=nothing,
            kv=self.pool,
            host=HostView(np.arange(len(lens)), counts, counts, np.zeros((1, 1), np.int32)),
            extensions={SequenceStates: SequenceStates(self.pages[rows])},
        )

    @property
    def batch(self) -> ForwardBatch:
        """All rows at once; leading rows of one token are decodes."""
        decodes = next((index for index, count in enumerate(self.lens) if count > 1), len(self.lens))
        return self.make_batch(self.lens, decodes)


def draw(
    case: str,
    lens: list[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: MixLayout | None = None,
    *,
    deterministic: bool = False,
) -> Drawn:
    """A layer of random weights, states and inputs. layout: instead of the case's."""
    layout = CASES[case] if layout is None else layout
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    place = torch.device(device)
    bare = {"device": place, "dtype": dtype, "tp": LocalGroup(), "limits": Limits(8, 64, 64, 4), "platform": open_platform(place)}
    context = BuildContext(**bare, attention=NaiveAttention(BuildContext(**bare)), deterministic=deterministic)
    conv = ShortConvolution(context, {"conv": Range.whole(layout.channels)}, WIDTH, bias=not layout.delta)
    width = layout.heads * layout.key if layout.by_key else layout.heads
    mixer = StateMixer(context, 0, layout, conv, StepPositions(WIDTH), MINIMUM)
    mixer.log_decay, mixer.bias = ShardedParameter(normal(layout.heads).sub(1)), ShardedParameter(normal(width))
    if not layout.delta:
        mixer.skip = ShardedParameter(normal(layout.heads))
    for parameter in conv.parameters():
        parameter.data = normal(*parameter.shape).to(dtype) / 2
    mixer = mixer.to(place)
    tokens = sum(lens)
    wide = normal(tokens, layout.channels + 2 * width + layout.heads)
    mixed, decay, beta, _ = wide.to(place, dtype).split((layout.channels, width, layout.heads, width), -1)
    pool = NaivePool([mixer.cache], 1, 1, len(lens) + 1, dtype)
    pool.data[0] = tuple(normal(*tensor.shape).to(place, tensor.dtype) for tensor in pool.data[0])
    pages = torch.randperm(len(lens) + 2, generator=generator)[: len(lens)].to(place)
    return Drawn(mixer, pool, (mixed, decay, beta if layout.delta else decay), pages, lens)


def compute_by_definition(drawn: Drawn, lens: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(results, past inputs and states after the step), float64, on the CPU. lens: the leading
    tokens of each row that count, if not all; results are then those of these tokens."""
    mixer, layout = drawn.mixer, drawn.mixer.layout
    pasts, states = (tensor.cpu().double() for tensor in drawn.pool.data[0])
    mixed, decay, beta = (part.cpu().double() for part in drawn.inputs)
    log_decay, bias = mixer.log_decay.data.cpu().double(), mixer.bias.data.cpu().double()
    weight = mixer.conv.weight.data[:, 0].cpu().double()
    outs, start = [], 0
    for row, page in enumerate(drawn.pages.tolist()):
        count = drawn.lens[row] if lens is None else lens[row]
        x = torch.cat((pasts[page], mixed[start : start + count]))
        convolved = sum(x[lag : lag + count] * weight[:, lag] for lag in range(WIDTH))
        assert isinstance(convolved, torch.Tensor)
        if mixer.conv.bias is not None:
            convolved = convolved + mixer.conv.bias.data.cpu().double()
        pasts[page] = x[count:]
        step = F.softplus(decay[start : start + count] + bias).unflatten(-1, (layout.heads, -1))
        strength = beta[start : start + count].sigmoid()
        if not layout.delta:
            step = step.clamp(min=MINIMUM)
            strength = step[..., 0]
        kept = (-log_decay.exp()[:, None] * step).exp()
        out, states[page] = run_row(layout, F.silu(convolved), kept, strength, states[page])
        outs.append(out if mixer.skip is None else out + mixer.skip.data.cpu().double()[:, None] * split(layout, F.silu(convolved))[2])
        start += drawn.lens[row]
    return torch.cat(outs), pasts, states


def split(layout: MixLayout, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of the convolution -> q, k and v."""
    q, k = (mixed[:, at : at + layout.key_heads * layout.key].unflatten(-1, (layout.key_heads, -1)) for at in layout.places[:2])
    v = mixed[:, layout.places[2] :][:, : layout.heads * layout.value].unflatten(-1, (layout.heads, -1))
    if layout.normalized:
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        q = q * layout.key**-0.5
    return q, k, v


def run_row(
    layout: MixLayout, mixed: torch.Tensor, kept: torch.Tensor, strength: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row token by token: (results, new state)."""
    q, k, v = split(layout, mixed)
    q, k = (part.repeat_interleave(layout.heads // layout.key_heads, 1) for part in (q, k))
    outs = []
    for token in range(len(mixed)):
        state = state * kept[token][..., None]
        new = v[token]
        if layout.delta:
            new = new - torch.einsum("hkv,hk->hv", state, k[token])
        state = state + torch.einsum("hk,hv->hkv", k[token], new * strength[token][:, None])
        outs.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(outs), state


def draw_recurrence(lens: int) -> tuple[Recurrence, torch.Tensor]:
    """Inputs of the gated delta rule, and a state of one row."""
    layout, generator = CASES["gated delta"], torch.Generator().manual_seed(0)
    heads, keys, values = layout.heads, layout.key, layout.value
    q, k = (torch.randn(lens, layout.key_heads, keys, generator=generator) / keys**0.5 for _ in range(2))
    v, decay = torch.randn(lens, heads, values, generator=generator), -torch.rand(lens, heads, generator=generator)
    inputs = Recurrence(q, k, v, decay, torch.rand(lens, heads, generator=generator))
    return inputs, torch.randn(1, heads, keys, values, generator=generator)
