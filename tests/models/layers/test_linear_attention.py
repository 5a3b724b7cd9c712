"""The recurrence of linear attention equals its definition and transformers, for whole rows, chunks
and decodes; a convolution finds its past inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.kernels.linear_attention import StatePages
from frame.models.layers.linear_attention import gated_delta, kimi_delta, mamba2
from frame.models.layers.linear_attention.convolution import RowPositions, ShortConvolution
from frame.models.layers.linear_attention.recurrence import run_tokens, scan
from frame.models.layers.parameter import Range
from tests.models.layers.recurrences import draw_recurrence
from tests.models.layers.recurrent_rows import *  # noqa: F403


def test_the_gated_delta_rule_equals_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    inputs, state = draw_recurrence(75)
    rows = inputs.map(lambda part: part[None])
    want, after = torch_chunk_gated_delta_rule(*rows[:3], g=rows.decay, beta=rows.beta, initial_state=state, output_final_state=True)
    got, new = scan(rows._replace(q=rows.q * rows.q.shape[-1] ** -0.5), state)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(new, after, atol=1e-5, rtol=1e-4)


def test_one_token_after_another_equals_the_scan_and_has_the_bits_of_any_chunks() -> None:
    lens, pages = (40, 1, 23), torch.tensor([2, 0, 1])
    inputs, _ = draw_recurrence(sum(lens))
    heads, width = inputs.v.shape[1], (inputs.k.shape[2], inputs.v.shape[2])
    states = torch.randn(3, heads, *width)
    whole = states.clone()
    got = run_tokens(inputs, whole, StatePages(pages, pages), list(lens))
    first = 0
    for length, page in zip(lens, pages.tolist(), strict=True):
        row, start = inputs.map(lambda part, a=first, b=first + length: part[a:b]), states[page : page + 1]
        want, new = scan(row.map(lambda part: part[None]), start)
        torch.testing.assert_close(got[first : first + length], want[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(whole[page], new[0], atol=1e-4, rtol=1e-3)
        state, alone = start.clone(), StatePages(torch.tensor([0]), torch.tensor([0]))
        sizes = [min(7, length - at) for at in range(0, length, 7)]
        pieces = [row.map(lambda part, at=7 * i, size=size: part[at : at + size]) for i, size in enumerate(sizes)]
        parts = [run_tokens(piece, state, alone, [size]) for piece, size in zip(pieces, sizes, strict=True)]
        assert torch.equal(torch.cat(parts), got[first : first + length])
        assert torch.equal(state[0], whole[page])
        first += length


def find_rows(lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What `RowPositions` needs of rows."""
    query_lens = torch.tensor(lens, dtype=torch.int32)
    return F.pad(query_lens.cumsum(0, dtype=torch.int32), (1, 0)), query_lens, sum(lens)


def test_a_convolution_finds_its_past_inputs() -> None:
    """Rows shorter than the convolution, and longer ones, in three steps, against whole rows."""
    context = BuildContext(device=torch.device("cpu"), dtype=torch.float32, tp=LocalGroup(), limits=Limits(8, 64, 64, 4))
    conv = ShortConvolution(context, {"conv": Range.whole(6)}, 4)
    conv.weight.data.normal_()
    lens = [[1, 2, 7], [2, 1, 1], [5, 1, 3]]
    whole = [torch.randn(sum(step[row] for step in lens), 6) for row in range(3)]
    states, pages, at, got = torch.zeros(4, 3, 6), torch.tensor([2, 0, 3]), [0, 0, 0], [[], [], []]  # type: ignore[var-annotated]
    for step in lens:
        x = torch.cat([whole[row][at[row] : at[row] + size] for row, size in enumerate(step)])
        out = conv(x, states, StatePages(pages, pages), RowPositions(*find_rows(step), 4))
        for row, part in enumerate(out.split(step)):
            got[row].append(part)
            at[row] += step[row]
    for row, x in enumerate(whole):
        want = F.silu(F.conv1d(F.pad(x.T, (3, 0)), conv.weight, groups=6).T)
        torch.testing.assert_close(torch.cat(got[row]), want, atol=1e-5, rtol=1e-5)


def test_layers_declare_a_state_of_each_sequence() -> None:
    """Sizes of one rank: the convolution's past inputs, and a matrix for each head."""
    config = {"hidden_size": 32, "linear_num_heads": 4, "linear_head_dim": 8}
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "hidden_size": 32}
    assert kimi_delta.read_sizes(config) == (4, 8, 4)
    assert mamba2.MambaSizes.read_config(sizes).fused["conv1d"] == {"conv1d_x": 32, "conv1d_b": 32, "conv1d_c": 32}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
    fused = gated_delta.DeltaSizes.read_config(config | delta, grouped=False).fused
    assert fused["in_proj_qkv"] == {"in_proj_q": 16, "in_proj_k": 16, "in_proj_v": 64}
