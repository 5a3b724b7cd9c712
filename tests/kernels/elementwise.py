"""Norm, activation and rotation kernels against float64, over dtypes, shapes and strides.

Collected by `tests/gpu/test_elementwise.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from frame.core.interfaces.row_operations import KVCacheTarget, QKVLayout
from frame.kernels.elementwise.activation import sigmoid_mul, silu_mul
from frame.kernels.elementwise.finite import replace_non_finite_rows
from frame.kernels.elementwise.norm import add_rms_norm, rms_norm
from frame.kernels.elementwise.rope import latent_norm_rope_store, norm_rope_store, rotate_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# relative error of one rounding
UNIT = {torch.float32: 2**-16, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float8_e4m3fn: 2**-4}
if DEVICE.type == "cpu":
    UNIT[torch.bfloat16] = 2**-7  # the interpreter truncates instead of rounding,
    UNIT[torch.float8_e4m3fn] = 0.5  # and drops the carry where rounding reaches the next power of two
EPS = 1e-6


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def random(*shape: int, dtype: torch.dtype, gap: int = 0) -> torch.Tensor:
    """Random rows; consecutive rows are `gap` elements further apart than they are long."""
    whole = torch.randn(*shape[:-1], shape[-1] + gap, dtype=torch.float32).to(DEVICE, dtype)
    return whole[..., : shape[-1]]


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    unit = UNIT[got.dtype]
    torch.testing.assert_close(got.double(), want.double().to(got.device), rtol=1.01 * unit, atol=unit * 2**-2)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@each_type
@pytest.mark.parametrize(("rows", "size", "gap"), [(1, 64, 0), (70, 1024, 512), (3, 1100, 4)])
def test_non_finite_values_are_replaced(dtype: torch.dtype, rows: int, size: int, gap: int) -> None:
    x = random(rows, size, dtype=dtype, gap=gap)
    for place, wrong in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[place % rows, place * 7] = wrong
    maximum = min(torch.finfo(dtype).max, 2.0**100)
    out = replace_non_finite_rows(x, maximum)
    assert out.is_contiguous()
    assert torch.equal(out, torch.where(x.isfinite(), x, torch.full_like(x, maximum)))


@each_type
@pytest.mark.parametrize(("rows", "size", "gap"), [(1, 64, 0), (3, 1024, 0), (5, 576, 8), (67, 100, 3), (2, 5120, 0)])
def test_norm(dtype: torch.dtype, rows: int, size: int, gap: int) -> None:
    x, weight = random(rows, size, dtype=dtype, gap=gap), random(size, dtype=dtype)
    before = x.clone()
    out = rms_norm(x, weight, EPS)
    assert out.is_contiguous()
    check(out, normed(x, weight))
    assert torch.equal(x, before)


@each_type
@pytest.mark.parametrize(("rows", "size", "gap"), [(1, 64, 0), (2, 2048, 0), (9, 96, 16)])
def test_norm_of_a_sum(dtype: torch.dtype, rows: int, size: int, gap: int) -> None:
    x, residual, weight = random(rows, size, dtype=dtype, gap=gap), random(rows, size, dtype=dtype), random(size, dtype=dtype)
    total = x + residual  # rounded as PyTorch rounds it
    out, stream = add_rms_norm(x, residual, weight, EPS)
    assert stream.data_ptr() == residual.data_ptr()
    if dtype is torch.bfloat16 and DEVICE.type == "cpu":
        check(stream, total)
    else:
        assert torch.equal(stream, total)
    check(out, normed(stream, weight))


# the interpreter truncates bfloat16, twice here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "parts", "size"), [(1, 8, 64), (3, 2, 2048), (9, 6, 96)])
def test_norm_of_a_sum_of_parts(dtype: torch.dtype, rows: int, parts: int, size: int) -> None:
    x, residual, weight = random(rows * parts, size, dtype=dtype), random(rows, size, dtype=dtype), random(size, dtype=dtype)
    x = x.view(rows, parts, size)
    want, total = add_rms_norm(x.float().sum(1).to(dtype), residual.clone(), weight, EPS)
    out, stream = add_rms_norm(x, residual, weight, EPS)
    check(stream, total.double())
    check(out, want.double())


@each_type
@pytest.mark.parametrize(("rows", "inner", "gap"), [(1, 64, 0), (3, 3072, 0), (70, 40, 8), (2, 1000, 1)])
def test_gated_activation(dtype: torch.dtype, rows: int, inner: int, gap: int) -> None:
    x = random(rows, 2 * inner, dtype=dtype, gap=gap) * 4
    gate, up = x.double().chunk(2, -1)
    check(silu_mul(x), gate * torch.sigmoid(gate) * up)


@each_type
@pytest.mark.parametrize(("tokens", "heads", "dim", "gap"), [(1, 16, 256, 0), (3, 5, 24, 8)])
def test_output_gate(dtype: torch.dtype, tokens: int, heads: int, dim: int, gap: int) -> None:
    """The gates follow each query in rows that also hold keys and values."""
    x = random(tokens, heads * dim, dtype=dtype, gap=gap)
    gate = random(tokens, 2 * heads + 3, dim, dtype=dtype)[:, 1 : 2 * heads : 2]
    check(sigmoid_mul(x, gate), x.double() * torch.sigmoid(gate.double()).flatten(1))


def rotary_table(positions: int, dim: int, interleaved: bool, dtype: torch.dtype) -> torch.Tensor:
    """As `Rotary` lays it out: every cosine twice, then every sine with both signs."""
    angles = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return torch.stack((cos, sin), 1).unsqueeze(2).to(DEVICE, dtype)


def rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, heads, dim] in float64, rotated as by `Rotary.rotate`."""
    cos, sin = table[positions].double().unbind(1)
    x = x.double()
    dim = cos.shape[-1]
    head, tail = x[..., :dim], x[..., dim:]
    swapped = head.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else head.roll(dim // 2, -1)
    return torch.cat((head * cos + swapped * sin, tail), -1)


@each_type
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "norm", "gap"),
    [
        (1, QKVLayout(16, 8, 128, 128), True, 0),
        (5, QKVLayout(4, 2, 64, 64), False, 24),
        (7, QKVLayout(7, 1, 64, 32), True, 0),
        (70, QKVLayout(2, 2, 16, 16, True), False, 0),
        (3, QKVLayout(12, 3, 96, 96), True, 1),
        (4, QKVLayout(5, 5, 80, 32, True), True, 0),
        (2, QKVLayout(5, 1, 64, 16, gated=True), True, 8),
    ],
)
def test_rotation_and_store(dtype: torch.dtype, kv_dtype: torch.dtype | None, tokens: int, heads: QKVLayout, norm: bool, gap: int) -> None:
    """The last two tokens are padding: both are stored to slot 0, which is reserved."""
    dim, num_kv = heads.dim, heads.num_kv_heads
    step = 2 if heads.gated else 1
    qkv = random(tokens, (step * heads.num_heads + 2 * num_kv) * dim, dtype=dtype, gap=gap)
    q, k, v = qkv.clone().unflatten(-1, (-1, dim)).split((step * heads.num_heads, num_kv, num_kv), 1)
    gates, q = q[:, 1::2] if heads.gated else q[:, :0], q[:, ::step]
    v = v * 200  # beyond the range of float8_e4m3
    qkv[:, -num_kv * dim :] *= 200
    table = rotary_table(50, heads.rotated, heads.interleaved, dtype)
    positions = torch.randint(50, (tokens,)).to(DEVICE)
    slots = (torch.randperm(72)[:tokens] + 4).to(DEVICE)
    if tokens > 2:
        slots[-2:] = 0
    cached_k, cached_v = (torch.zeros(19, 4, num_kv, dim, dtype=kv_dtype or dtype, device=DEVICE) for _ in range(2))
    weights = random(2, dim, dtype=dtype)
    out = norm_rope_store(
        qkv, positions, table, heads, (weights, EPS) if norm else None, KVCacheTarget(slots, cached_k, cached_v, 0.5, 2.0)
    )
    if norm:
        q, k = normed(q, weights[0]), normed(k, weights[1])
    q, k = (rotated(part, positions, table, heads.interleaved) for part in (q, k))
    assert out.is_contiguous()
    check(out, q)
    after = qkv.unflatten(-1, (-1, dim))
    check(after[:, -2 * num_kv : -num_kv], k)
    assert torch.equal(after[:, 1 : 2 * heads.num_heads : 2] if heads.gated else gates, gates)
    real = slots != 0
    for cached, want in ((cached_k, k * 2 if kv_dtype else k), (cached_v, v / 2 if kv_dtype else v)):
        rows = cached.view(-1, num_kv, dim)
        check(rows.view(torch.uint8)[slots[real]].view(rows.dtype) if kv_dtype else rows[slots[real]], stored(want[real], kv_dtype))
        written = rows.view(torch.uint8).flatten(1).any(1).sum()
        assert written == real.sum() + (1 if tokens > 2 else 0)


def stored(x: torch.Tensor, kv_dtype: torch.dtype | None) -> torch.Tensor:
    """float64 values as the cache can hold them, except for rounding."""
    return x if kv_dtype is None else x.double().clamp(-448, 448)


def check_int8(quantized: torch.Tensor, scales: torch.Tensor, want: torch.Tensor) -> None:
    """The greatest number of a row has the code 127, and no number is off by more than half a
    step, or by the rounding of the numbers themselves."""
    want, scales = want.double(), scales.double()
    assert torch.equal(quantized.int().abs().amax(-1), torch.full_like(quantized[..., 0], 127, dtype=torch.int32))
    torch.testing.assert_close(scales, want.abs().amax(-1) / 127, rtol=2e-3, atol=0)
    assert bool(((quantized * scales.unsqueeze(-1) - want).abs() <= 0.51 * scales.unsqueeze(-1)).all())


@pytest.mark.parametrize(
    ("heads", "norm"), [(QKVLayout(16, 8, 128, 128), True), (QKVLayout(7, 1, 64, 32), False), (QKVLayout(5, 5, 80, 32, True), True)]
)
def test_store_in_an_int8_cache(heads: QKVLayout, norm: bool) -> None:
    dim, num_kv, tokens = heads.dim, heads.num_kv_heads, 5
    qkv = random(tokens, (heads.num_heads + 2 * num_kv) * dim, dtype=torch.float32)
    _, k, v = qkv.clone().unflatten(-1, (-1, dim)).split((heads.num_heads, num_kv, num_kv), 1)
    table, positions = rotary_table(50, heads.rotated, heads.interleaved, torch.float32), torch.randint(50, (tokens,)).to(DEVICE)
    slots, weights = (torch.randperm(72)[:tokens] + 4).to(DEVICE), random(2, dim, dtype=torch.float32)
    caches = [torch.zeros(19, 4, num_kv, dim, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    scales = [torch.zeros(19, 4, num_kv, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    norm_rope_store(qkv, positions, table, heads, (weights, EPS) if norm else None, KVCacheTarget(slots, *caches, 1.0, 1.0, *scales))
    k = rotated(normed(k, weights[1]) if norm else k, positions, table, heads.interleaved)
    for cache, scale, want in zip(caches, scales, (k, v), strict=True):
        check_int8(cache.flatten(0, 1)[slots], scale.flatten(0, 1)[slots], want)
        assert scale.flatten(0, 1).any(1).sum() == tokens


def test_latent_row_in_an_int8_cache() -> None:
    x = random(5, 48 + 96 + 8, dtype=torch.float32)
    _, latent, key = x.clone().split((48, 96, 8), -1)
    weights = random(96, dtype=torch.float32), random(48, dtype=torch.float32)
    table, positions = rotary_table(30, 8, True, torch.float32), torch.randint(30, (5,)).to(DEVICE)
    cache, scales = torch.zeros(9, 2, 104, dtype=torch.int8, device=DEVICE), torch.zeros(9, 2, dtype=torch.float16, device=DEVICE)
    slots = (torch.randperm(17)[:5] + 1).to(DEVICE)
    latent_norm_rope_store(x, positions, table, True, (weights[1], weights[0], EPS), (slots, cache, 1.0), scales)
    want = torch.cat((normed(latent, weights[0]), rotated(key[:, None], positions, table, True)[:, 0]), -1)
    check_int8(cache.flatten(0, 1)[slots], scales.flatten(0, 1)[slots], want)


def test_without_a_cache_only_queries_and_keys_change() -> None:
    heads = QKVLayout(4, 2, 32, 32)
    qkv = random(3, 8 * 32, dtype=torch.float32)
    before = qkv.clone().unflatten(-1, (-1, 32))
    table, positions = rotary_table(9, 32, False, torch.float32), torch.tensor([8, 0, 3], device=DEVICE)
    out = norm_rope_store(qkv, positions, table, heads, None, None)
    check(out, rotated(before[:, :4], positions, table, False))
    check(qkv.unflatten(-1, (-1, 32))[:, 4:6], rotated(before[:, 4:6], positions, table, False))
    assert torch.equal(qkv.unflatten(-1, (-1, 32))[:, 6:], before[:, 6:])
    assert torch.equal(qkv.unflatten(-1, (-1, 32))[:, :4], before[:, :4])


@each_type
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tokens", "num_heads"), [(1, 3), (70, 16)])
def test_rotation_in_place(dtype: torch.dtype, interleaved: bool, tokens: int, num_heads: int) -> None:
    whole = random(tokens, num_heads, 24 + 16, dtype=dtype)
    before = whole.clone()
    table, positions = rotary_table(30, 16, interleaved, dtype), torch.randint(30, (tokens,)).to(DEVICE)
    rotate_(whole[..., 24:], positions, table, interleaved)
    check(whole[..., 24:], rotated(before[..., 24:], positions, table, interleaved))
    assert torch.equal(whole[..., :24], before[..., :24])


@each_type
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("q_rank", "rank", "rope", "interleaved"), [(48, 32, 16, True), (0, 512, 64, True), (100, 96, 8, False)])
def test_latent_row(dtype: torch.dtype, kv_dtype: torch.dtype | None, q_rank: int, rank: int, rope: int, interleaved: bool) -> None:
    tokens = 5
    x = random(tokens, q_rank + rank + rope, dtype=dtype, gap=8)
    q, latent, key = x.clone().split((q_rank, rank, rope), -1)
    weights = random(rank, dtype=dtype), random(max(q_rank, 1), dtype=dtype)
    table, positions = rotary_table(30, rope, interleaved, dtype), torch.randint(30, (tokens,)).to(DEVICE)
    cached = torch.zeros(9, 2, rank + rope, dtype=kv_dtype or dtype, device=DEVICE)
    slots = (torch.randperm(17)[:tokens] + 1).to(DEVICE)
    out = latent_norm_rope_store(x, positions, table, interleaved, (weights[1] if q_rank else None, weights[0], EPS), (slots, cached, 0.25))
    want = torch.cat((normed(latent, weights[0]), rotated(key[:, None], positions, table, interleaved)[:, 0]), -1)
    check(x[:, q_rank:], want)
    rows = cached.view(-1, rank + rope)
    check(rows.view(torch.uint8)[slots].view(rows.dtype) if kv_dtype else rows[slots], want * 4 if kv_dtype else want)
    if q_rank:
        assert out is not None
        check(out, normed(q, weights[1]))
    else:
        assert out is None
