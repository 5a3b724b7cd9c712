# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels of the expert GEMMs: the first with its activation, then the weighted down
GEMM.

`experts_kernel`: grouped GEMM over block-aligned rows of one expert per block, on the tensor cores
(as vLLM's and SGLang's fused MoE kernel). The `vector` kernels: one (token, expert) pair per
program on the CUDA cores, for one token or a few. Weights are unquantized, or float8 with a float32
scale per block of 128 x 128 or per output; rows are then float8 with a scale per 128 columns.
Depends neither on routing nor on the choice of tiles (`expert_tiles`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.kernels.launch import launch_dependents, wait_for_previous
from frame.kernels.linear.fp8_quantize import round_to_fp8
from frame.kernels.moe.expert_deltas import add_deltas

SCALE_BLOCK = tl.constexpr(128)  # outputs and inputs that share one scale


@triton.jit
def _load_weights(w, first, k, rows, w_row, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr):
    """[BN, BK] of one expert's weights: from row `first` of a descriptor, or `rows` from a
    pointer."""
    if TMA:
        tile = w.load([first, k])
    else:
        columns = k + tl.arange(0, BK)
        if K % BK == 0:
            tile = tl.load(w + rows[:, None] * w_row + columns[None, :])
        else:
            tile = tl.load(w + rows[:, None] * w_row + columns[None, :], mask=(columns < K)[None, :], other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _multiply_accumulate(x, tile, acc, x_scale, scale, SWAP: tl.constexpr, SCALED: tl.constexpr):
    """acc + x times tile -> [BM, BN], or [BN, BM] if SWAP: the weights then fill the long side of
    the MMA, so few rows waste nothing."""
    if SWAP:
        left, right = tile, tl.trans(x)
    else:
        left, right = x, tl.trans(tile)
    if SCALED:
        dots = tl.dot(left, right, input_precision="ieee") * scale
        dots *= x_scale[None, :] if SWAP else x_scale[:, None]
        acc += dots
    else:
        acc = tl.dot(left, right, acc, input_precision="ieee")
    return acc


@triton.jit
def _load_scales(scales, x_scale, source, step, up_offset, stride, GATED: tl.constexpr, SCALED: tl.constexpr, BY_OUTPUT: tl.constexpr):
    """The scales of the weights, of the ups, and of the rows [BM], for one block of inputs; unused
    numbers where there are none."""
    scale, up_scale, row_scale = 1.0, 1.0, 0.0
    if SCALED:
        row_scale = tl.load(x_scale + step * stride + source)
        if not BY_OUTPUT:
            scale = tl.load(scales + step)
            if GATED:
                up_scale = tl.load(scales + up_offset + step)
    return scale, up_scale, row_scale


@triton.jit
def _scale_outputs(acc, scales, rows, SWAP: tl.constexpr):
    """A result [BM, BN], or [BN, BM] if SWAP, times the scales of its outputs."""
    scale = tl.load(scales + rows)
    return acc * (scale[:, None] if SWAP else scale[None, :])


@triton.jit
def _quantize_tile(values, places, column, out_scale, stride):
    """[BM, BN] divided by one scale per row, which is stored; all BN columns share it."""
    step = tl.maximum(tl.max(tl.abs(values), 1) / 448.0, 1e-12)
    tl.store(out_scale + column * stride + places, step)
    return values * (1.0 / step)[:, None]


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The factors of the second GEMM; without gates, `gate` holds the results."""
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh":
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        gate = (up + 1) * gate * tl.sigmoid(gate * ALPHA)
    elif ACTIVATION == "squared_relu":
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        gate = gate * gate
    return gate


@triton.jit
def _add_bias(acc, bias, rows, SWAP: tl.constexpr):
    """A result [BM, BN], or [BN, BM] if SWAP, plus the bias of its outputs."""
    added = tl.load(bias + rows).to(tl.float32)
    return acc + (added[:, None] if SWAP else added[None, :])


@triton.jit
def _compute_tile(
    x, w, out, pair_weights, pairs_of, x_scale, w_scale, out_scale, bias, delta, expert, start, first, num_pairs, x_stride,
    x_scale_stride, out_scale_stride, w_expert, w_row, b_stride, max_pages,
    N: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, FIRST: tl.constexpr, BY_PAIR: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, BY_OUTPUT: tl.constexpr,
    SPLITS: tl.constexpr, PAGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """BM rows from `start` on, of one expert, times BN of its outputs from `first` on."""
    places = start + tl.arange(0, BM)
    pairs = tl.load(pairs_of + places)
    valid = pairs < num_pairs
    source = places
    if FIRST:
        source = tl.where(valid, pairs, 0) // TOP  # padding rows read token 0; their results are dropped
    x_rows = x + source.to(tl.int64)[:, None] * x_stride
    columns = first + tl.arange(0, BN)
    rows = tl.minimum(columns, N - 1)
    WEIGHT_ROWS: tl.constexpr = 2 * N if GATED else N
    ups = w
    if not TMA:
        w += expert.to(tl.int64) * w_expert
        if GATED:
            ups = w + N * w_row
    row = expert * WEIGHT_ROWS + first
    SCALES: tl.constexpr = (K + SCALE_BLOCK - 1) // SCALE_BLOCK
    SCALE_ROWS: tl.constexpr = (N + SCALE_BLOCK - 1) // SCALE_BLOCK
    scales = w_scale + (expert.to(tl.int64) * (2 * SCALE_ROWS if GATED else SCALE_ROWS) + first // SCALE_BLOCK) * SCALES
    shape: tl.constexpr = [BN, BM] if SWAP else [BM, BN]
    acc = tl.zeros(shape, tl.float32)
    up_acc = tl.zeros(shape, tl.float32)
    scale, up_scale, row_scale = _load_scales(scales, x_scale, source, 0, SCALE_ROWS * SCALES, x_scale_stride, GATED, SCALED, BY_OUTPUT)
    for k in range(0, K, BK):
        # scales are loaded one step ahead: nothing else hides their latency
        ahead = tl.minimum(k + BK, K - 1) // SCALE_BLOCK
        following = _load_scales(scales, x_scale, source, ahead, SCALE_ROWS * SCALES, x_scale_stride, GATED, SCALED, BY_OUTPUT)
        inputs = k + tl.arange(0, BK)
        if K % BK == 0:
            tile = tl.load(x_rows + inputs[None, :])
        else:
            tile = tl.load(x_rows + inputs[None, :], mask=(inputs < K)[None, :], other=0.0)
        if UPCAST:
            tile = tile.to(tl.float32)
        weights = _load_weights(w, row, k, rows, w_row, K, BN, BK, TMA, UPCAST)
        acc = _multiply_accumulate(tile, weights, acc, row_scale, scale, SWAP, SCALED)
        if GATED:
            weights = _load_weights(ups, row + N, k, rows, w_row, K, BN, BK, TMA, UPCAST)
            up_acc = _multiply_accumulate(tile, weights, up_acc, row_scale, up_scale, SWAP, SCALED)
        scale, up_scale, row_scale = following
    inside = (columns < N)[None, :]
    if BY_OUTPUT:
        output_scales = w_scale + expert.to(tl.int64) * WEIGHT_ROWS
        acc = _scale_outputs(acc, output_scales, rows, SWAP)
        if GATED:
            up_acc = _scale_outputs(up_acc, output_scales + N, rows, SWAP)
    if BIASED:
        acc = _add_bias(acc, bias + expert.to(tl.int64) * WEIGHT_ROWS, rows, SWAP)
        if GATED:
            up_acc = _add_bias(up_acc, bias + expert.to(tl.int64) * WEIGHT_ROWS + N, rows, SWAP)
    if SPLITS > 0:
        acc, up_acc = add_deltas(
            acc, up_acc, pairs, valid, expert, columns, columns < N, delta[0], delta[1], delta[2], delta[3], delta[4], num_pairs,
            b_stride, max_pages, N, TOP, GATED, SPLITS, PAGES, BM, BN, SWAP, UPCAST,
        )  # fmt: skip
    if FIRST:
        acc = activate(acc, up_acc, ACTIVATION, ALPHA, LIMIT)
    else:
        weight = tl.load(pair_weights + pairs, mask=valid, other=0.0)
        acc *= weight[None, :] if SWAP else weight[:, None]
    if BY_PAIR or not FIRST:
        places = pairs
        inside = inside & valid[:, None]
    if SWAP:
        acc = tl.trans(acc)
    if FIRST and SCALED and out.dtype.element_ty == tl.float8e4nv:
        result = round_to_fp8(_quantize_tile(acc, places, first // SCALE_BLOCK, out_scale, out_scale_stride), UPCAST)
    else:
        result = acc.to(out.dtype.element_ty)
    tl.store(out + places.to(tl.int64)[:, None] * N + columns[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "x_scale_stride", "out_scale_stride"])
def experts_kernel(
    x,  # [tokens, K]; in the second GEMM [rows, K]
    w,  # [experts, weight rows, K], or a descriptor of [experts * weight rows, K]
    out,  # first GEMM: [rows, N]; second GEMM: [pairs, N]
    pair_weights, pairs_of, experts_of, used,
    x_scale,  # float32 [K / 128, tokens or rows]
    w_scale,  # float32 [experts, blocks of weight rows, K / 128]; if BY_OUTPUT [experts, weight rows]
    out_scale,  # float32 [N / 128, rows]
    bias,  # [experts, weight rows]
    shrunk, b, places, place_pages, counts,  # of `PairDelta`
    num_pairs, x_scale_stride, out_scale_stride, x_stride, w_expert, w_row, b_stride, max_pages,
    N: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr,
    FIRST: tl.constexpr,  # the first GEMM, which applies the activation; the second applies the pairs' weights
    BY_PAIR: tl.constexpr,  # the first GEMM's result is [pairs, N]
    GATED: tl.constexpr,  # the weights are gates, then ups
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIASED: tl.constexpr,
    SCALED: tl.constexpr,  # x, weights and the first GEMM's result are float8 with scales
    BY_OUTPUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
    HALF_BLOCKS: tl.constexpr,  # an expert's last block computes half of the rows if that suffices
    SPLITS: tl.constexpr,  # of `shrunk`; 0: no deltas
    PAGES: tl.constexpr,  # of an adapter, that are multiplied at a time
    PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows times blocks of N, the latter fastest."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    blocks: tl.constexpr = (N + BN - 1) // BN
    block = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BN
    if block >= tl.load(used):
        return
    expert = tl.load(experts_of + block)
    start = block * BM
    delta = (shrunk, b, places, place_pages, counts)
    is_half = False
    if HALF_BLOCKS:
        is_half = tl.load(pairs_of + start + BM // 2) >= num_pairs
    if is_half:
        _compute_tile(
            x, w, out, pair_weights, pairs_of, x_scale, w_scale, out_scale, bias, delta, expert, start, first, num_pairs, x_stride,
            x_scale_stride, out_scale_stride, w_expert, w_row, b_stride, max_pages, N, K, TOP, FIRST, BY_PAIR, GATED, ACTIVATION,
            ALPHA, LIMIT, BIASED, SCALED, BY_OUTPUT, SPLITS, PAGES, BM // 2, BN, BK, TMA, SWAP, UPCAST,
        )  # fmt: skip
    else:
        _compute_tile(
            x, w, out, pair_weights, pairs_of, x_scale, w_scale, out_scale, bias, delta, expert, start, first, num_pairs, x_stride,
            x_scale_stride, out_scale_stride, w_expert, w_row, b_stride, max_pages, N, K, TOP, FIRST, BY_PAIR, GATED, ACTIVATION,
            ALPHA, LIMIT, BIASED, SCALED, BY_OUTPUT, SPLITS, PAGES, BM, BN, BK, TMA, SWAP, UPCAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def persistent_down_kernel(
    x,  # a descriptor of [rows, K]
    w,  # a descriptor of [experts * N, K]
    out,  # [pairs, N]
    pair_weights, pairs_of, experts_of, used, num_pairs,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS. The second GEMM with persistent programs: the first tiles of the next
    block are loaded while the last block's results are stored, which is much of the time when K is
    short.

    Carry no value from block to block: Triton 3.6 flattens the two loops, and gives the inner steps
    of a block the values of the next one.
    """
    wait_for_previous(PDL)
    launch_dependents(PDL)
    blocks: tl.constexpr = (N + BN - 1) // BN
    total = tl.load(used) * blocks
    for number in tl.range(tl.program_id(0), total, PROGRAMS, flatten=True):
        start = number // blocks * BM
        first = number % blocks * BN
        expert = tl.load(experts_of + number // blocks)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            rows = x.load([start, k])
            weights = w.load([expert * N + first, k])
            if UPCAST:
                rows, weights = rows.to(tl.float32), weights.to(tl.float32)
            acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
        pairs = tl.load(pairs_of + start + tl.arange(0, BM))
        valid = pairs < num_pairs
        acc *= tl.load(pair_weights + pairs, mask=valid, other=0.0)[:, None]
        columns = first + tl.arange(0, BN)
        inside = valid[:, None] & (columns < N)[None, :]
        tl.store(out + pairs.to(tl.int64)[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def combine_kernel(
    rows, out,
    places,  # int64 [tokens * TOP]: the row of each pair
    pair_weights, tokens,
    N: tl.constexpr, TOP: tl.constexpr,
    PLACED: tl.constexpr,  # rows are at `places`; otherwise in the order of pairs
    WEIGHTED: tl.constexpr,  # rows get their weights here
    BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[rows, N] -> [tokens, N]: sums over each token's pairs, in float32. Grid: (blocks of tokens,
    blocks of N)."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    token = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (token < tokens)[:, None] & (columns < N)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for place in tl.static_range(TOP):
        pair = token * TOP + place
        row = tl.load(places + pair, mask=token < tokens, other=0) if PLACED else pair
        dots = tl.load(rows + row[:, None] * N + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            dots *= tl.load(pair_weights + pair, mask=token < tokens, other=0.0)[:, None]
        total += dots
    tl.store(out + token[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _partial_sums(tile, row, LANES: tl.constexpr):
    """[BN, BK] times [BK] -> [BN, BK / LANES]: sums over the LANES values of a row that one thread
    holds."""
    terms = tile.to(tl.float32) * row[None, :]
    return tl.sum(tl.reshape(terms, [tile.shape[0], tile.shape[1] // LANES, LANES]), 2)


@triton.jit
def _load_page(shrunk, b, page, is_used, split_stride, SPLITS: tl.constexpr):
    """One page of the deltas of several pairs: `b` [pairs, outputs, 16], and what it multiplies,
    float32 [pairs, 16]. shrunk: pointers [pairs] to the page's first rank of the first split; b: to
    that of each output in page 0, [pairs, outputs]; page: the page's offset in `b`."""
    rank = tl.arange(0, 16)
    is_rank = rank < tl.where(is_used, 16, 0)
    inner = tl.zeros([shrunk.shape[0], 16], tl.float32)
    for split in tl.static_range(SPLITS):
        inner += tl.load((shrunk + split * split_stride)[:, None] + rank[None, :], mask=is_rank[None, :], other=0.0)
    return tl.load((b + page)[:, :, None] + rank[None, None, :], mask=is_rank[None, None, :], other=0.0), inner


@triton.jit
def _multiply_page(b_tile, inner):
    """-> float32 [outputs], the sum over the pairs."""
    return tl.sum(tl.sum(b_tile.to(tl.float32) * inner[:, None, :], 2), 0)


@triton.jit(do_not_specialize=["num_pairs"])
def vector_gate_up_kernel(
    x, w,
    act,  # [pairs, INNER], already times the pairs' weights
    ids, pair_weights,
    bias,  # [experts, weight rows]
    shrunk, b, places, place_pages, counts,  # of `PairDelta`
    x_stride, w_expert, w_row, b_stride, max_pages, num_pairs,
    INNER: tl.constexpr, HIDDEN: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIASED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr,  # of `shrunk`; 0: no deltas
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of INNER, pairs)."""
    LANES: tl.constexpr = 8
    wait_for_previous(PDL)
    launch_dependents(PDL)
    pair = tl.program_id(1)
    first = tl.program_id(0) * BN
    expert = tl.load(ids + pair)
    columns = first + tl.arange(0, BN)
    x += (pair // TOP).to(tl.int64) * x_stride
    gates = w + expert * w_expert + tl.minimum(columns, INNER - 1)[:, None] * w_row
    if SPLITS > 0:  # the first page is loaded beside the weights
        PARTS: tl.constexpr = 2 if GATED else 1
        place = tl.load(places + pair // TOP)
        count = tl.load(counts + place, mask=place >= 0, other=0)
        inner_rows = shrunk + pair * PARTS * max_pages * 16 + tl.arange(0, 1)
        b_rows = b + (expert * PARTS * INNER + tl.minimum(columns, INNER - 1)[None, :]) * 16
        split_stride, pages = num_pairs * PARTS * max_pages * 16, place_pages + place * max_pages
        page = tl.load(pages, mask=count > 0, other=0).to(tl.int64) * b_stride
        b_tile, inner = _load_page(inner_rows, b_rows, page, count > 0, split_stride, SPLITS)
        if GATED:
            up_b, up_inner = _load_page(inner_rows + max_pages * 16, b_rows + INNER * 16, page, count > 0, split_stride, SPLITS)
    gate = tl.zeros([BN, BK // LANES], tl.float32)
    up = tl.zeros([BN, BK // LANES], tl.float32)
    for k in tl.static_range(0, HIDDEN, BK):
        inputs = k + tl.arange(0, BK)
        mask = inputs < HIDDEN
        gate_tile = tl.load(gates + inputs[None, :], mask=mask[None, :], other=0.0, eviction_policy="evict_first")
        row = tl.load(x + inputs, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up_tile = tl.load(gates + INNER * w_row + inputs[None, :], mask=mask[None, :], other=0.0, eviction_policy="evict_first")
            up += _partial_sums(up_tile, row, LANES)
        gate += _partial_sums(gate_tile, row, LANES)
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if SPLITS > 0:
        for number in range(count):
            gate_sum += _multiply_page(b_tile, inner)
            is_next = number + 1 < count
            page = tl.load(pages + number + 1, mask=is_next, other=0).to(tl.int64) * b_stride
            following = inner_rows + (number + 1) * 16
            b_tile, inner = _load_page(following, b_rows, page, is_next, split_stride, SPLITS)
            if GATED:
                up_sum += _multiply_page(up_b, up_inner)
                up_b, up_inner = _load_page(following + max_pages * 16, b_rows + INNER * 16, page, is_next, split_stride, SPLITS)
    if BIASED:
        biases = bias + expert * (2 * INNER if GATED else INNER) + tl.minimum(columns, INNER - 1)
        gate_sum += tl.load(biases).to(tl.float32)
        if GATED:
            up_sum += tl.load(biases + INNER).to(tl.float32)
    result = activate(gate_sum, up_sum, ACTIVATION, ALPHA, LIMIT) * tl.load(pair_weights + pair)
    tl.store(act + pair * INNER + columns, result.to(act.dtype.element_ty), mask=columns < INNER)


@triton.jit
def _load_expert_rows(w, ids, place, k, rows, w_expert, INNER: tl.constexpr, PLACES: tl.constexpr, BK: tl.constexpr):
    """[PLACES, BN, BK]: inner values from k on, of `rows`, of PLACES experts of a token."""
    expert = tl.load(ids + place + tl.arange(0, PLACES), cache_modifier=".cg")
    inputs = (k + tl.arange(0, BK))[None, None, :]
    tile = w + (expert * w_expert)[:, None, None] + rows[None, :, None] + inputs
    if INNER % BK == 0:
        return tl.load(tile, eviction_policy="evict_first")
    return tl.load(tile, mask=inputs < INNER, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_pairs"])
def vector_down_kernel(
    act,  # [pairs, INNER], already times the pairs' weights
    w,
    out,  # [tokens, HIDDEN]
    ids, pair_weights,
    bias,  # [experts, HIDDEN]
    shrunk, b, places, place_pages, counts,  # of `PairDelta`, from `act`
    w_expert, w_row, b_stride, max_pages, num_pairs,
    INNER: tl.constexpr, HIDDEN: tl.constexpr, TOP: tl.constexpr,
    PLACES: tl.constexpr,  # experts loaded at a time
    BIASED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr,  # of `shrunk`; 0: no deltas
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of HIDDEN, tokens). A program sums its token's experts.

    The first weights are loaded before the PDL wait. That is safe for the ids too: the kernel
    before the previous one wrote them, and the previous kernel let this one start only after its
    own wait.
    """
    LANES: tl.constexpr = 8
    STEPS: tl.constexpr = (INNER + BK - 1) // BK
    token = tl.program_id(1)
    first = tl.program_id(0) * BN
    columns = first + tl.arange(0, BN)
    rows = tl.minimum(columns, HIDDEN - 1) * w_row
    ids += token * TOP
    following = _load_expert_rows(w, ids, 0, 0, rows, w_expert, INNER, PLACES, BK)
    if SPLITS > 0:  # tables of this step, which kernels before all of this layer's wrote
        outputs = tl.minimum(columns, HIDDEN - 1)[None, :]
        place = tl.load(places + token)
        count = tl.load(counts + place, mask=place >= 0, other=0)
        pages = place_pages + place * max_pages
        page = tl.load(pages, mask=count > 0, other=0).to(tl.int64) * b_stride
    wait_for_previous(PDL)
    launch_dependents(PDL)
    acc = tl.zeros([PLACES, BN, BK // LANES], tl.float32)
    for step in tl.static_range(TOP // PLACES * STEPS):
        tile = following
        if step + 1 < TOP // PLACES * STEPS:
            following = _load_expert_rows(w, ids, (step + 1) // STEPS * PLACES, (step + 1) % STEPS * BK, rows, w_expert, INNER, PLACES, BK)
        places = step // STEPS * PLACES + tl.arange(0, PLACES)
        inputs = (step % STEPS * BK + tl.arange(0, BK))[None, None, :]
        row = tl.load(act + ((token * TOP + places) * INNER)[:, None, None] + inputs, mask=inputs < INNER, other=0.0).to(tl.float32)
        terms = tile.to(tl.float32) * row
        acc += tl.sum(tl.reshape(terms, [PLACES, BN, BK // LANES, LANES]), 3)
    total = tl.sum(tl.sum(acc, 2), 0)
    if SPLITS > 0:
        for number in range(count):
            for choice in tl.static_range(0, TOP, PLACES):
                choices = choice + tl.arange(0, PLACES)
                inner_rows = shrunk + ((token * TOP + choices) * max_pages + number) * 16
                b_rows = b + (tl.load(ids + choices)[:, None] * HIDDEN + outputs) * 16
                b_tile, inner = _load_page(inner_rows, b_rows, page, count > 0, num_pairs * max_pages * 16, SPLITS)
                total += _multiply_page(b_tile, inner)
            page = tl.load(pages + number + 1, mask=number + 1 < count, other=0).to(tl.int64) * b_stride
    if BIASED:
        for place in tl.static_range(TOP):
            biases = bias + tl.load(ids + place) * HIDDEN + tl.minimum(columns, HIDDEN - 1)
            total += tl.load(biases).to(tl.float32) * tl.load(pair_weights + token * TOP + place)
    tl.store(out + token * HIDDEN + columns, total.to(out.dtype.element_ty), mask=columns < HIDDEN)
