"""Scores of the indexer and sparse latent attention against their definition in float64.

Collected by `tests/gpu/test_sparse.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from frame.attention_backends.triton.sparse_kernel import attend_sparse
from frame.kernels.index_scores import score_keys
from frame.models import deepseek_v32

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative to the largest value
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize(("heads", "size", "page"), [(8, 16, 4), (20, 40, 16), (64, 128, 64)])
def test_scores(heads: int, size: int, page: int, dtype: torch.dtype) -> None:
    tokens, pages = 3, 7
    q, weights, cached = random(tokens, heads, size, dtype=dtype), random(tokens, heads), random(20, page, size, dtype=dtype)
    table = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(row))[:pages] for row in range(tokens)])
    positions = torch.tensor([0, page + 1, pages * page - 1], device=DEVICE)
    table = table.to(DEVICE, torch.int32)
    got = score_keys(q, weights, cached, table, positions)
    assert got.dtype == torch.float32
    for token in range(tokens):
        keys = cached[table[token].long()].flatten(0, 1)[: positions[token] + 1].double()
        want = weights[token].double() @ (q[token].double() @ keys.T).relu()
        assert (got[token, : len(want)] - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
        assert (got[token, len(want) :] == -torch.inf).all()
    torch.testing.assert_close(deepseek_v32.score_keys(q, weights, cached, table, positions), got, rtol=1e-4, atol=1e-2)


@DTYPES
@pytest.mark.parametrize(("heads", "rank", "rope", "keys"), [(4, 32, 8, 12), (20, 48, 24, 70), (16, 512, 64, 33)])
def test_attention_to_selected_keys(heads: int, rank: int, rope: int, keys: int, dtype: torch.dtype) -> None:
    tokens, k_scale = 3, 0.5
    q, q_rope = random(tokens, heads, rank, dtype=dtype), random(tokens, heads, rope, dtype=dtype)
    cached = random(90, rank + rope, dtype=dtype)
    slots = torch.stack([torch.randperm(90, generator=torch.Generator().manual_seed(row))[:keys] for row in range(tokens)]).to(DEVICE)
    slots[0, 1:] = -1
    slots[1, keys // 2 :] = -1
    got = attend_sparse(q, q_rope, cached, slots, 0.1, k_scale)
    assert got.dtype == dtype
    for token in range(tokens):
        rows = cached[slots[token][slots[token] >= 0]].double() * k_scale
        weights = (torch.cat((q[token], q_rope[token]), -1).double() @ rows.T * 0.1).softmax(-1)
        want = weights @ rows[:, :rank]
        assert (got[token] - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
