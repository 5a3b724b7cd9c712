"""Prompt attention of expanded latents against float32: lengths, prefixes, strides, values of other
rows that are no numbers."""

from __future__ import annotations

import pytest
import torch

from frame.core.interfaces.attention import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from frame import kernels
    from frame.attention_backends.triton.hopper import expanded_extend
    from frame.attention_backends.triton.hopper.expanded_extend import QUERIES, attend_prompts, can_run
    from frame.attention_backends.triton.operands import Operands

    pytestmark.append(pytest.mark.skipif(not kernels.supports_tma_streaming(torch.device("cuda")), reason="needs compute capability 9.0"))

DEVICE = torch.device("cuda")
ROWS = {  # (cached, new) tokens
    "one tile": [(0, 128)],
    "edges": [(0, 127), (0, 1), (0, 129), (0, 64), (0, 65), (0, 256)],
    "prefixes": [(5, 200), (300, 128), (127, 1), (128, 128), (1000, 77)],
    "long": [(0, 1500)],
}


def make(rows: list[tuple[int, int]], heads: int, dtype: torch.dtype, decodes: int) -> Operands:
    """Queries of all tokens as slices of one tensor, and the keys of the extends side by side."""
    tokens, keys = decodes + sum(new for _, new in rows), sum(map(sum, rows))
    q = torch.randn(tokens, heads, 192, device=DEVICE).to(dtype)
    latents = torch.randn(keys, 576, device=DEVICE).to(dtype)
    k, v = (torch.randn(keys, heads, 128, device=DEVICE).to(dtype) for _ in range(2))
    return Operands(q[..., :128], q[..., 128:], k, latents[:, None, 512:].expand(-1, heads, -1), v, page_size=0, has_all_keys=True)


def run(operands: Operands, rows: list[tuple[int, int]], decodes: int, scale: float) -> torch.Tensor:
    new, lengths = torch.tensor([1] * decodes + [new for _, new in rows]), torch.tensor([7] * decodes + [sum(row) for row in rows])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0)))
    key_starts = lengths[decodes:].cumsum(0) - lengths[decodes:]
    tiles = [(row, first) for row, (_, count) in enumerate(rows) for first in range(0, count, QUERIES)]
    tensors = tuple(part.to(DEVICE, torch.int32) for part in (starts, lengths, key_starts))
    out = torch.zeros(len(operands.q1), operands.q1.shape[1], 128, device=DEVICE, dtype=operands.q1.dtype)
    attend_prompts(operands, out, torch.tensor(tiles, dtype=torch.int32, device=DEVICE).t().contiguous(), tensors, decodes, scale)
    assert not out[:decodes].any()
    return out[decodes:]


def reference(operands: Operands, rows: list[tuple[int, int]], decodes: int, scale: float) -> torch.Tensor:
    parts, token, key = [], decodes, 0
    q, k = (torch.cat((first, second), -1).float() for first, second in ((operands.q1, operands.q2), (operands.k1, operands.k2)))
    for prefix, new in rows:
        mine, end = slice(token, token + new), key + prefix + new
        scores = torch.einsum("qhd,khd->hqk", q[mine], k[key:end]) * scale
        hidden = torch.arange(prefix + new, device=DEVICE) > torch.arange(prefix, prefix + new, device=DEVICE)[:, None]
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), operands.v[key:end].float()))
        token, key = token + new, end
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "decodes", "processors"), [(1, 0, 132), (3, 2, 5)])
@pytest.mark.parametrize("load", ROWS)
def test_rows(load: str, heads: int, decodes: int, processors: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(expanded_extend, "count_tma_processors", lambda _: processors)
    operands, scale = make(ROWS[load], heads, dtype, decodes), 192**-0.5
    assert can_run(AttentionSpec(0, heads, heads, 192, 128, scale), operands)
    found = run(operands, ROWS[load], decodes, scale)
    torch.testing.assert_close(found.float(), reference(operands, ROWS[load], decodes, scale), rtol=2e-2, atol=1e-2)
    assert torch.equal(run(operands, ROWS[load], decodes, scale), found)


def test_values_of_other_rows_may_be_no_numbers() -> None:
    torch.manual_seed(0)
    rows = [(0, 200), (0, 130), (0, 300)]
    operands = make(rows, 2, torch.bfloat16, 0)
    want = run(operands, rows, 0, 0.07)
    assert operands.v is not None
    operands.v[200:330] = float("nan")
    found = run(operands, rows, 0, 0.07)
    assert found[200:330].isnan().all()
    assert torch.equal(found[:200], want[:200])
    assert torch.equal(found[330:], want[330:])


def test_other_layers_are_refused() -> None:
    spec, operands = AttentionSpec(0, 2, 2, 192, 128, 0.07), make([(0, 128)], 2, torch.bfloat16, 0)
    assert can_run(spec, operands)
    assert not can_run(AttentionSpec(0, 2, 2, 192, 128, 0.07, sliding_window=64), operands)
    assert not can_run(AttentionSpec(0, 2, 2, 192, 128, 0.07, causal=False), operands)
    assert not can_run(spec, operands._replace(has_all_keys=False))
    assert not can_run(spec, operands._replace(k2=None, q2=None))
