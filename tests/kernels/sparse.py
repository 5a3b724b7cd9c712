"""Scores of the indexer and sparse latent attention against their definition in float64.

Collected by `tests/gpu/test_sparse.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from frame.attention_backends.triton import sparse_kernel
from frame.attention_backends.triton.sparse_kernel import attend_sparse
from frame.core.kv_cache.kv_pool import quantize_rows
from frame.kernels.index_scores import BINS, score_keys, select_best, select_keys
from frame.models import deepseek_v32

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative to the largest value
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize(("heads", "size", "page", "pages"), [(8, 16, 4, 7), (20, 40, 16, 12), (64, 128, 64, 7)])
def test_scores_and_selection(heads: int, size: int, page: int, pages: int, dtype: torch.dtype) -> None:
    """Rows of several slots, at positions below, at and above the number of selected keys. Two keys
    have the score of a third."""
    top_k, width = 2 * page, pages * page
    table = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(row))[:pages] for row in range(3)])
    owners = torch.tensor([2, 0, 1, 1, 2, 0], device=DEVICE)
    positions = torch.tensor([0, top_k - 1, top_k, width - 3, width - 1, width - 2], device=DEVICE)
    q, weights, cached = random(6, heads, size, dtype=dtype), random(6, heads), random(20, page, size, dtype=dtype)
    cached[table[1, 1], 0] = cached[table[1, 0], 2] = cached[table[1, 0], 1]
    table = table.to(DEVICE, torch.int32)
    inputs = q, weights, cached, table, owners, positions, width, top_k
    scores, counts = score_keys(*inputs)
    slots = select_best(scores, counts, table, owners, positions, page, top_k)
    assert slots.shape == (6, top_k)
    expected = deepseek_v32.select_keys(*inputs)
    for token, position in enumerate(positions.tolist()):
        rows = (table[owners[token]].long()[:, None] * page + torch.arange(page, device=DEVICE)).flatten()[: position + 1]
        if position < top_k:
            assert slots[token].tolist() == rows.tolist() + [-1] * (top_k - 1 - position)
            assert expected[token].sort().values.tolist() == slots[token].sort().values.tolist()
            continue
        want = weights[token].double() @ (q[token].double() @ cached.flatten(0, 1)[rows].double().T).relu()
        got = scores[token, : position + 1]
        assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
        worst = got.topk(top_k).values[-1]
        chosen = (got > worst) | ((got == worst) & ((got == worst).cumsum(0) <= top_k - (got > worst).sum()))
        assert slots[token].tolist() == rows[chosen].tolist()
        if dtype == torch.float32:
            assert len(set(slots[token].tolist()) - set(expected[token].tolist())) <= 2  # rounding, and equal scores


@pytest.mark.parametrize("kind", ["equal", "signs", "one bit"])
def test_selection_among_special_scores(kind: str) -> None:
    """All scores equal; zeros and infinities of both signs; scores that differ in their last
    bits."""
    seen, top_k, generator = 300, 40, torch.Generator().manual_seed(3)
    scores = torch.full((1, 400), torch.nan)
    if kind == "equal":
        scores[:, :seen] = -2.5
    elif kind == "signs":
        choices = torch.tensor([0.0, -torch.inf, torch.inf, -1e-42, 1e-42, -3.0])
        scores[:, :seen] = choices[torch.randint(6, (1, seen), generator=generator)]
    else:
        bits = torch.tensor(1.5).view(torch.int32) + torch.randint(50, (1, seen), generator=generator).int()
        scores[:, :seen] = bits.view(torch.float32)
    bits = scores[0, :seen].view(torch.int32).long()
    first = torch.where(bits < 0, -1 - bits, bits + 2**31) >> 21
    counts = torch.bincount(first, minlength=BINS)[None].int()
    table, position = torch.arange(100, dtype=torch.int32)[None], torch.tensor([seen - 1])
    given = [tensor.to(DEVICE) for tensor in (scores, counts, table, torch.tensor([0]), position)]
    got = select_best(*given, 4, top_k)[0].tolist()  # type: ignore[call-arg, arg-type]
    assert got == sorted(got)
    order = torch.sort(scores[0, :seen], descending=True, stable=True).indices[:top_k]
    assert got == order.sort().values.tolist()


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "heads", "rank", "rope", "keys"), [(3, 4, 32, 8, 12), (3, 20, 48, 24, 70), (3, 16, 512, 64, 33), (2, 20, 48, 24, 600)]
)
def test_attention_to_selected_keys(tokens: int, heads: int, rank: int, rope: int, keys: int, dtype: torch.dtype) -> None:
    """The last case divides its keys; a part of the first token's has none."""
    k_scale, total = 0.5, keys + 50
    q, q_rope = random(tokens, heads, rank, dtype=dtype), random(tokens, heads, rope, dtype=dtype)
    cached = random(total, rank + rope, dtype=dtype)
    slots = torch.stack([torch.randperm(total, generator=torch.Generator().manual_seed(row))[:keys] for row in range(tokens)]).to(DEVICE)
    slots[0, 1:] = -1
    slots[1, keys // 2 :: 2] = -1
    got = attend_sparse(q, q_rope, cached, slots, 0.1, k_scale)
    assert got.dtype == dtype
    for token in range(tokens):
        rows = cached[slots[token][slots[token] >= 0]].double() * k_scale
        weights = (torch.cat((q[token], q_rope[token]), -1).double() @ rows.T * 0.1).softmax(-1)
        want = weights @ rows[:, :rank]
        assert (got[token] - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


def test_programs_of_many_heads_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, heads, rank, rope, keys = 2, 80, 48, 16, 70
    shapes = ((tokens, heads, rank), (tokens, heads, rope), (90, rank + rope))
    operands = [random(*shape, dtype=torch.bfloat16) for shape in shapes]
    slots = torch.arange(keys, device=DEVICE).flip(0).repeat(tokens, 1)
    narrow = attend_sparse(*operands, slots, 0.1, 0.5)
    monkeypatch.setattr(sparse_kernel, "_WIDE_PROGRAMS", tokens)
    wide = attend_sparse(*operands, slots, 0.1, 0.5, 1 << 20)
    torch.testing.assert_close(wide, narrow, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_attention_to_selected_keys_of_8_bits(stored: torch.dtype) -> None:
    tokens, heads, rank, rope, keys = 2, 20, 48, 16, 300
    q, q_rope = random(tokens, heads, rank, dtype=torch.bfloat16), random(tokens, heads, rope, dtype=torch.bfloat16)
    slots = torch.stack([torch.randperm(keys, generator=torch.Generator().manual_seed(row)) for row in range(tokens)]).to(DEVICE)
    numbers, scales, k_scale = random(keys, rank + rope), None, 0.5
    if stored == torch.int8:
        cached, units = quantize_rows(numbers)
        scales, k_scale, rows = units, 1.0, cached.double() * units.double()[:, None]
    else:
        cached = numbers.to(stored)
        rows = cached.float().double() * k_scale
    got = attend_sparse(q, q_rope, cached, slots, 0.1, k_scale, scales=scales)
    weights = (torch.cat((q, q_rope), -1).double() @ rows.T * 0.1).softmax(-1)
    want = weights @ rows[:, :rank]
    assert (got - want).abs().max() <= TOLERANCE[torch.bfloat16] * want.abs().max()


def test_fixed_pieces_give_a_token_the_same_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batch-invariant mode; otherwise three tokens have one piece each, and one has two."""
    tokens, heads, rank, rope, keys = 3, 16, 32, 16, 300
    monkeypatch.setattr(sparse_kernel, "PROGRAMS", 3)
    q, q_rope, cached = random(tokens, heads, rank), random(tokens, heads, rope), random(keys, rank + rope)
    slots = torch.stack([torch.randperm(keys, generator=torch.Generator().manual_seed(row)) for row in range(tokens)]).to(DEVICE)
    for is_fixed in (True, False):
        whole = attend_sparse(q, q_rope, cached, slots, 0.1, 1.0, is_fixed=is_fixed)
        alone = [
            attend_sparse(q[t : t + 1], q_rope[t : t + 1], cached, slots[t : t + 1], 0.1, 1.0, is_fixed=is_fixed) for t in range(tokens)
        ]
        assert torch.equal(torch.cat(alone), whole) == is_fixed


def test_the_invariant_selection_is_that_of_the_kernels() -> None:
    """Equal scores too: the first keys, in their order."""
    page, pages, top_k = 4, 6, 9
    table = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(row))[:pages] for row in range(2)]).int().to(DEVICE)
    q, weights, cached = random(4, 2, 16), random(4, 2), random(20, page, 16)
    positions = torch.tensor([3, 8, 15, 23], device=DEVICE)
    inputs = q, weights, cached, table, torch.tensor([0, 1, 1, 0], device=DEVICE), positions, pages * page, top_k
    assert deepseek_v32.select_invariant_keys(*inputs).tolist() == select_keys(*inputs).tolist()
    narrow = *(each[:2] for each in inputs[:2]), cached, table, inputs[4][:2], positions[:2], 12, top_k
    assert deepseek_v32.select_invariant_keys(*narrow).tolist() == deepseek_v32.select_invariant_keys(*inputs)[:2].tolist()
