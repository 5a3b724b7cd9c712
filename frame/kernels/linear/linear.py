# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
"""Skinny GEMM: GEMMs of few rows with a weight, bound by reading the weight.

out[m, n] = sum_k x[m, k] * w[n, k] + bias[n]. `vector_kernel` (one or two rows, CUDA cores) and
`fragment_kernel` (groups of eight rows, tensor cores) load weights from memory to registers,
several tiles ahead; the first tiles are loaded before the PDL wait, since no step writes weights.
`tile_kernel` (up to 64 rows) goes through shared memory. `linear_plan` selects among them and
`linear_stream`. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels import INTERPRETED
from frame.kernels.launch import ceil_div, launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.linear.linear_plan import WIDE, Plan


@triton.jit
def load_weights(pointers, inside, UPCAST: tl.constexpr):
    """A tile of weights, marked to leave the caches first: each weight is read once."""
    tile = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    if UPCAST:  # the interpreter multiplies bfloat16 incorrectly
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def apply_epilogue(totals, rows, bias, N, HALVES: tl.constexpr, HAS_BIAS: tl.constexpr, dtype: tl.constexpr):
    """Add the bias; with two parts, return SiLU(gate) * up of values rounded as by separate GEMMs
    would be."""
    gate = totals[0]
    if HAS_BIAS:
        gate += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    if HALVES == 2:
        up = totals[1]
        if HAS_BIAS:
            up += tl.load(bias + N + rows, mask=rows < N, other=0.0).to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        gate = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
    return gate.to(dtype)


@triton.jit
def partial_sums(weights, row, LANES: tl.constexpr):
    """[BN, BK] times [BK] -> [BN, BK / LANES]: sums over the LANES values of a row that one thread
    holds."""
    terms = weights.to(tl.float32) * row.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(terms, [weights.shape[0], weights.shape[1] // LANES, LANES]), 2)


@triton.jit(do_not_specialize_on_alignment=["M"])
def vector_kernel(
    x,  # [M, K]
    w,  # [HALVES * N, K]
    bias,  # [HALVES * N]
    out,  # [M, N]
    M, N, K, x_stride, w_stride, out_stride,
    ROWS: tl.constexpr,  # at least M
    BN: tl.constexpr, BK: tl.constexpr,
    DEPTH: tl.constexpr,  # weight tiles in flight
    HALVES: tl.constexpr,  # 2: gate and up
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of BN outputs. Dot products on the CUDA cores, for one or two rows."""
    LANES: tl.constexpr = 8
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.arange(0, BK)
    valid = (rows < N)[:, None]
    pointers = w + rows.to(tl.int64)[:, None] * w_stride + columns[None, :]
    up_offset = N.to(tl.int64) * w_stride
    tiles = ()
    for d in tl.static_range(DEPTH):
        for p in tl.static_range(HALVES):
            tiles += (load_weights(pointers + p * up_offset + d * BK, valid & (d * BK + columns < K)[None, :], UPCAST),)
    launch_dependents(PDL)
    wait_for_previous(PDL)
    inputs = ()
    sums = ()
    for m in tl.static_range(ROWS):
        inputs += (tl.load(x + m * x_stride + columns, mask=columns < tl.where(m < M, K, 0), other=0.0),)
        for _ in tl.static_range(HALVES):
            sums += (tl.zeros([BN, BK // LANES], tl.float32),)
    for start in range(0, K, DEPTH * BK):
        next_tiles = ()
        for d in tl.static_range(DEPTH):
            k = start + d * BK
            after = k + BK + columns
            next_inputs = ()
            next_sums = ()
            for m in tl.static_range(ROWS):
                next_inputs += (tl.load(x + m * x_stride + after, mask=after < tl.where(m < M, K, 0), other=0.0),)
                for p in tl.static_range(HALVES):
                    next_sums += (sums[m * HALVES + p] + partial_sums(tiles[d * HALVES + p], inputs[m], LANES),)
            fresh = k + DEPTH * BK
            for p in tl.static_range(HALVES):
                next_tiles += (load_weights(pointers + p * up_offset + fresh, valid & (fresh + columns < K)[None, :], UPCAST),)
            inputs = next_inputs
            sums = next_sums
        tiles = next_tiles
    for m in tl.static_range(ROWS):
        totals = ()
        for p in tl.static_range(HALVES):
            totals += (tl.sum(sums[m * HALVES + p], 1),)
        result = apply_epilogue(totals, rows, bias, N, HALVES, HAS_BIAS, out.dtype.element_ty)
        tl.store(out + m * out_stride + rows, result, mask=rows < tl.where(m < M, N, 0))


# Layout of `fragment_kernel`: a thread loads eight adjacent inputs, and four neighbouring threads
# load 32. An MMA fragment needs four pairs per thread that lie eight inputs apart. A sum does not
# depend on the order of its terms, so both operands use the same permutation of inputs, which makes
# the loaded layout the fragment layout without any data movement: input 8 t + 2 j + b of a chunk is
# multiplied as input 8 j + 2 t + b.


@triton.jit
def to_left_operand(tile, CHUNKS: tl.constexpr, WARPS: tl.constexpr):
    """Weights [8, CHUNKS * WARPS, 2, 32] -> left MMA operand [WARPS, 16, CHUNKS * 32]. Row 8 h + g
    comes from (g, h); each warp has its own chunks."""
    tile = tl.reshape(tile, [8, CHUNKS, WARPS, 2, 4, 4, 2])
    return tl.reshape(tl.permute(tile, (2, 3, 0, 1, 5, 4, 6)), [WARPS, 16, CHUNKS * 32])


@triton.jit
def to_right_operand(tile, CHUNKS: tl.constexpr, WARPS: tl.constexpr):
    """Rows [8, CHUNKS * WARPS, 32] -> right MMA operand [WARPS, CHUNKS * 32, 8]."""
    tile = tl.reshape(tile, [8, CHUNKS, WARPS, 4, 4, 2])
    return tl.reshape(tl.permute(tile, (2, 1, 4, 3, 5, 0)), [WARPS, CHUNKS * 32, 8])


@triton.jit(do_not_specialize_on_alignment=["M"])
def fragment_kernel(
    x,  # [M, K]
    w,  # [HALVES * N, K]
    bias,  # [HALVES * N]
    out,  # [M, N]
    M, N, K, x_stride, w_stride, out_stride,
    GROUPS: tl.constexpr,  # groups of eight rows; at least M rows in all
    CHUNKS: tl.constexpr,  # chunks of 32 inputs per warp and tile
    DEPTH: tl.constexpr,  # weight tiles in flight
    HALVES: tl.constexpr,  # 2: gate and up
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, UPCAST: tl.constexpr, num_warps: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of 16 outputs. MMA from registers, for groups of eight rows."""
    WARPS: tl.constexpr = num_warps
    SPAN: tl.constexpr = CHUNKS * WARPS * 32
    first = tl.program_id(0) * 16
    eight = tl.arange(0, 8)
    columns = tl.arange(0, CHUNKS * WARPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    w_rows = (first + eight[:, None] + 8 * tl.arange(0, 2)[None, :])[:, None, :, None]
    w_columns = columns[None, :, None, :]
    x_rows = eight[:, None, None]
    x_columns = columns[None, :, :]
    valid = w_rows < N
    pointers = w + w_rows.to(tl.int64) * w_stride + w_columns
    up_offset = N.to(tl.int64) * w_stride
    tiles = ()
    for d in tl.static_range(DEPTH):
        for p in tl.static_range(HALVES):
            tiles += (load_weights(pointers + p * up_offset + d * SPAN, valid & (d * SPAN + w_columns < K), UPCAST),)
    launch_dependents(PDL)
    wait_for_previous(PDL)
    inputs = ()
    sums = ()
    for g in tl.static_range(GROUPS):
        group = x_rows + 8 * g
        inputs += (tl.load(x + group * x_stride + x_columns, mask=(group < M) & (x_columns < K), other=0.0),)
        for _ in tl.static_range(HALVES):
            sums += (tl.zeros([WARPS, 16, 8], tl.float32),)
    for start in range(0, K, DEPTH * SPAN):
        next_tiles = ()
        for d in tl.static_range(DEPTH):
            k = start + d * SPAN
            after = k + SPAN + x_columns
            next_inputs = ()
            next_sums = ()
            for g in tl.static_range(GROUPS):
                group = x_rows + 8 * g
                next_inputs += (tl.load(x + group * x_stride + after, mask=(group < M) & (after < K), other=0.0),)
                right = to_right_operand(inputs[g], CHUNKS, WARPS)
                if UPCAST:
                    right = right.to(tl.float32)
                for p in tl.static_range(HALVES):
                    left = to_left_operand(tiles[d * HALVES + p], CHUNKS, WARPS)
                    next_sums += (tl.dot(left, right, sums[g * HALVES + p], input_precision="ieee"),)
            fresh = k + DEPTH * SPAN
            for p in tl.static_range(HALVES):
                next_tiles += (load_weights(pointers + p * up_offset + fresh, valid & (fresh + w_columns < K), UPCAST),)
            inputs = next_inputs
            sums = next_sums
        tiles = next_tiles
    rows = (first + tl.arange(0, 16))[:, None]
    for g in tl.static_range(GROUPS):
        totals = ()
        for p in tl.static_range(HALVES):
            totals += (tl.sum(sums[g * HALVES + p], 0),)
        result = apply_epilogue(totals, rows, bias, N, HALVES, HAS_BIAS, out.dtype.element_ty)
        group = (8 * g + eight)[None, :]
        tl.store(out + group * out_stride + rows, result, mask=(group < M) & (rows < N))


@triton.jit(do_not_specialize_on_alignment=["M"])
def tile_kernel(
    x,  # [M, K]
    w,  # [HALVES * N, K]
    bias,  # [HALVES * N]
    out,  # [M, N]
    M, N, K, x_stride, w_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PIECES: tl.constexpr,  # pieces of BK inputs, one per warp: blocks of few outputs cannot be split otherwise
    HALVES: tl.constexpr,  # 2: gate and up
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # whole blocks cover N and K
    PDL: tl.constexpr, UPCAST: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of BN outputs. Software-pipelined MMA through shared memory, for up to 64
    rows."""
    launch_dependents(PDL)
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    if PIECES == 1:
        w_rows, w_columns = outputs[:, None], tl.arange(0, BK)[None, :]
        x_rows, x_columns = tl.arange(0, BM)[None, :], tl.arange(0, BK)[:, None]
        total = tl.zeros([BN, BM], tl.float32)
    else:
        columns = tl.arange(0, PIECES)[:, None] * BK + tl.arange(0, BK)[None, :]
        w_rows, w_columns = outputs[None, :, None], columns[:, None, :]
        x_rows, x_columns = tl.arange(0, BM)[None, None, :], columns[:, :, None]
        total = tl.zeros([PIECES, BN, BM], tl.float32)
    total_up = total
    pointers = w + w_rows.to(tl.int64) * w_stride + w_columns
    up_pointers = pointers + N.to(tl.int64) * w_stride
    x_pointers = x + x_rows * x_stride + x_columns
    wait_for_previous(PDL)
    for k in tl.range(0, K, PIECES * BK, num_stages=num_stages):
        if EVEN:
            inputs = tl.load(x_pointers + k, mask=x_rows < M, other=0.0)
        else:
            inputs = tl.load(x_pointers + k, mask=(x_rows < M) & (k + x_columns < K), other=0.0)
        if UPCAST:
            inputs = inputs.to(tl.float32)
        total = tl.dot(load_tile(pointers + k, w_rows, k + w_columns, N, K, EVEN, UPCAST), inputs, total, input_precision="ieee")
        if HALVES == 2:
            up = load_tile(up_pointers + k, w_rows, k + w_columns, N, K, EVEN, UPCAST)
            total_up = tl.dot(up, inputs, total_up, input_precision="ieee")
    if PIECES > 1:
        total = tl.sum(total, 0)
        total_up = tl.sum(total_up, 0)
    rows = outputs[:, None]
    batch = tl.arange(0, BM)[None, :]
    result = apply_epilogue((total, total_up), rows, bias, N, HALVES, HAS_BIAS, out.dtype.element_ty)
    tl.store(out + batch * out_stride + rows, result, mask=(batch < M) & (rows < N))


@triton.jit
def load_tile(pointers, rows, columns, N, K, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    """[BN, BK] of the weights; masked unless EVEN."""
    if EVEN:
        tile = tl.load(pointers, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, mask=(rows < N) & (columns < K), other=0.0, eviction_policy="evict_first")
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan, gated: bool = False) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N] in the dtype of `x`
    (bfloat16 or float16; sums in float32).

    `gated`: the weight's rows are gate and up, and the result is SiLU(gate) * up [M, N // 2].
    `plan` comes from `linear_plan`. The last dimensions must be contiguous.
    """
    rows, inner = x.shape
    halves = 2 if gated else 1
    outputs = weight.shape[0] // halves
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tensors = (x, weight, weight if bias is None else bias, out, rows, outputs, inner, x.stride(0), weight.stride(0), outputs)
    sizes = {"HALVES": halves, "HAS_BIAS": bias is not None, "UPCAST": INTERPRETED} | launch_options(x.device, plan.warps)
    if plan.kernel == "tile":
        block = 32 * plan.chunks
        pieces = plan.warps if plan.outputs < WIDE else 1
        sizes |= {"BM": max(16, next_power_of_2(rows)), "BN": plan.outputs, "BK": block, "PIECES": pieces, "num_stages": plan.depth}
        is_even = outputs % plan.outputs == 0 and inner % (block * pieces) == 0
        tile_kernel[(ceil_div(outputs, plan.outputs),)](*tensors, EVEN=is_even, **sizes)
        return out
    sizes |= {"DEPTH": plan.depth, "num_stages": 1}  # these kernels pipeline in registers, not by Triton's stages
    if plan.kernel == "vector":
        sizes |= {"ROWS": next_power_of_2(rows), "BN": plan.outputs, "BK": 256 * plan.warps}
        vector_kernel[(ceil_div(outputs, plan.outputs),)](*tensors, **sizes)
    else:
        sizes |= {"GROUPS": next_power_of_2(ceil_div(rows, 8)), "CHUNKS": plan.chunks}
        fragment_kernel[(ceil_div(outputs, 16),)](*tensors, **sizes)
    return out
