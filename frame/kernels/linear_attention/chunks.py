# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Prompts by the chunked parallel form of the gated delta rule (arXiv 2412.06464 §3.3), of Kimi
Delta Attention and of Mamba-2, over ragged rows.

`_accumulate` sums the decays within each chunk. `_prepare` computes what no state is needed for:
the products of queries and keys, and with the delta rule the inverse of its triangular system (the
UT transform). `_extend` takes each row's state from chunk to chunk. Inputs of products have the
dtype of the layer; sums, states and gates are float32. Reference:
`frame.models.layers.linear_attention.recurrence`. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import ceil_div, next_power_of_2
from frame.kernels.linear_attention import CHUNK, Gates, MixLayout, StatePages
from frame.kernels.linear_attention.gates import activate

_SUB = 16  # tokens of a block of the triangular system, and of one reference of the decays of key entries
_MIN_TILE = 16  # sizes of a tensor-core product
_SPILLED = 128  # sizes from which IEEE products of float32 spill registers, and compile for minutes
_PROGRAMS = 128  # programs that keep a GPU busy


def extend_rows(
    layout: MixLayout,
    mixed: torch.Tensor,
    gates: Gates,
    states: torch.Tensor,
    pages: StatePages,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """As `scan.scan_rows`, for rows of many tokens. rows: (query_starts int32 [rows + 1]; row and
    first token of each chunk, int32 [chunks]). Chunks of a row begin CHUNK tokens apart."""
    tokens, heads, delta = len(mixed), layout.heads, layout.delta
    starts, row_of, begins = rows
    chunks = (len(row_of), heads)
    widths = (heads, layout.key) if layout.by_key else (heads,)
    total, strength = (mixed.new_empty((tokens, *width), dtype=torch.float32) for width in (widths, (heads,)))
    attention = mixed.new_empty((tokens, heads, CHUNK))
    solved, read = (mixed.new_empty((tokens, heads, size) if delta else (1,)) for size in (layout.value, layout.key))
    block_k, block_v = (max(_MIN_TILE, next_power_of_2(size)) for size in (layout.key, layout.value))
    is_wide = mixed.dtype is torch.float32
    constants = {**layout.constants, "TOKENS": CHUNK, "BLOCK_K": block_k}
    exact = "ieee" if max(block_k, block_v) < _SPILLED else "tf32x3"  # of float32
    precision = {"PRECISION": exact if is_wide else "tf32"}
    _accumulate[chunks](
        *gates[:4], starts, row_of, begins, total, strength, gates.decay.stride(0), gates.beta.stride(0), gates.minimum,
        HEADS=heads, KEYS=layout.key, BY_KEY=layout.by_key, DELTA=delta, TOKENS=CHUNK, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    _prepare[chunks](
        mixed, total, strength, starts, row_of, begins, attention, solved, read,
        **constants, **precision, BLOCK_V=block_v, SUB=_SUB, SOLVE=exact if is_wide else "tf32x3",
        num_warps=8 if layout.by_key else 4, num_stages=1,
    )  # fmt: skip
    block_v = min(block_v, 64)
    while block_v > _MIN_TILE and len(pages.sources) * heads * ceil_div(layout.value, block_v) < _PROGRAMS:
        block_v //= 2
    _extend[(len(pages.sources), heads, ceil_div(layout.value, block_v))](
        mixed, total, strength, attention, solved, read, gates.log_decay if gates.skip is None else gates.skip,
        states, *pages, starts, out,
        **constants, **precision, BLOCK_V=block_v, HAS_SKIP=gates.skip is not None,
        num_warps=8 if block_v > 32 else 4, num_stages=1 if is_wide else 2,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["starts"])  # slices that start at any row
def _accumulate(
    decays, betas, log_decays, biases, starts, row_of, begins, total, strength, decay_stride, beta_stride, minimum,
    HEADS: tl.constexpr, KEYS: tl.constexpr, BY_KEY: tl.constexpr, DELTA: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: chunks, heads. The log decays of a chunk's tokens, summed from its first token on, and
    the write strengths."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens = tl.load(begins + chunk).to(tl.int64) + tl.arange(0, TOKENS)
    inside = tokens < tl.load(starts + tl.load(row_of + chunk) + 1)
    beta = tl.load(betas + tokens * beta_stride + head, mask=inside, other=0.0).to(tl.float32)
    log_decay = tl.load(log_decays + head)
    if BY_KEY:
        keys = tl.arange(0, BLOCK_K)[None]
        has = inside[:, None] & (keys < KEYS)
        bias = tl.load(biases + head * KEYS + keys, mask=keys < KEYS, other=0.0)
        decay = tl.load(decays + tokens[:, None] * decay_stride + head * KEYS + keys, mask=has, other=0.0).to(tl.float32)
        decay, gate = activate(decay, beta[:, None], log_decay, bias, minimum, DELTA)
        places = (tokens[:, None] * HEADS + head) * KEYS + keys
        tl.store(total + places, tl.cumsum(tl.where(has, decay, 0.0), 0), mask=has)
        tl.store(strength + tokens * HEADS + head, tl.sigmoid(beta), mask=inside)
    else:
        decay = tl.load(decays + tokens * decay_stride + head, mask=inside, other=0.0).to(tl.float32)
        decay, gate = activate(decay, beta, log_decay, tl.load(biases + head), minimum, DELTA)
        tl.store(total + tokens * HEADS + head, tl.cumsum(tl.where(inside, decay, 0.0), 0), mask=inside)
        tl.store(strength + tokens * HEADS + head, gate, mask=inside)


@triton.jit
def _invert(system, SUB: tl.constexpr, TOKENS: tl.constexpr, SOLVE: tl.constexpr):
    """(1 + system)^-1 of a strictly lower triangular `system` [TOKENS, TOKENS]: blocks of SUB on
    the diagonal by substitution, the others by the finite series of a block-triangular matrix."""
    PIECES: tl.constexpr = TOKENS // SUB
    rows, columns = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None]
    is_diagonal = rows // SUB == columns // SUB
    first, second = tl.arange(0, SUB)[None, :, None], tl.arange(0, SUB)[None, None]
    # the blocks of the diagonal, [PIECES, SUB, SUB]
    blocks = -tl.sum(tl.reshape(tl.where(is_diagonal, system, 0.0), (PIECES, SUB, PIECES, SUB)), 2)
    inverse = blocks
    for index in range(2, SUB):
        line = tl.sum(tl.where(first == index, blocks, 0.0), 1)  # [PIECES, SUB]
        line += tl.sum(line[:, :, None] * inverse, 1)
        inverse = tl.where(first == index, line[:, None], inverse)
    inverse += tl.where(first == second, 1.0, 0.0)
    whole = tl.broadcast_to(inverse[:, :, None], (PIECES, SUB, PIECES, SUB))
    inverse = tl.where(is_diagonal, tl.reshape(whole, (TOKENS, TOKENS)), 0.0)
    others = -tl.dot(inverse, tl.where(is_diagonal, 0.0, system), input_precision=SOLVE)
    squared = tl.dot(others, others, input_precision=SOLVE)
    series = tl.where(rows == columns, 1.0, 0.0) + others
    series += tl.dot(series, squared, input_precision=SOLVE)
    return tl.dot(series, inverse, input_precision=SOLVE)


@triton.jit(do_not_specialize_on_alignment=["starts"])  # slices that start at any row
def _prepare(
    mixed, totals, strength, starts, row_of, begins, attention, solved, read,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHANNELS: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BY_KEY: tl.constexpr, DELTA: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Grid: chunks, heads. `attention` [tokens, heads, TOKENS]: decayed products of each query with
    the chunk's keys. `solved` and `read`: the values that the delta rule writes if the state is 0,
    and what it reads of the state before the chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(begins + chunk).to(tl.int64)
    stop = tl.load(starts + tl.load(row_of + chunk) + 1)
    count = tl.arange(0, TOKENS)
    tokens = begin + count
    inside = tokens < stop
    keys = tl.arange(0, BLOCK_K)
    has = inside[:, None] & (keys < KEYS)[None]
    key_head = head // (HEADS // KEY_HEADS)
    key_places = mixed + tokens[:, None] * CHANNELS + K + key_head * KEYS + keys[None]
    q = tl.load(mixed + tokens[:, None] * CHANNELS + Q + key_head * KEYS + keys[None], mask=has, other=0.0)
    k = tl.load(key_places, mask=has, other=0.0)
    rows, columns = count[:, None], count[None]
    beta = tl.load(strength + tokens * HEADS + head, mask=inside, other=0.0)
    if BY_KEY:
        places = totals + (tokens[:, None] * HEADS + head) * KEYS + keys[None]
        total = tl.load(places, mask=has, other=0.0)
        qk = tl.zeros([TOKENS, TOKENS], tl.float32)
        kk = tl.zeros([TOKENS, TOKENS], tl.float32)
        for piece in tl.static_range(1, TOKENS // SUB):  # queries of one block with keys of the blocks before it
            first = tl.sum(tl.where(rows == piece * SUB, total, 0.0), 0)[None]
            later = tl.where((rows // SUB == piece) & inside[:, None], tl.exp(tl.minimum(total - first, 0.0)), 0.0)
            earlier = tl.where(rows < piece * SUB, tl.exp(tl.minimum(first - total, 0.0)), 0.0)
            others = tl.trans((k * earlier).to(mixed.dtype.element_ty))
            qk += tl.dot((q * later).to(mixed.dtype.element_ty), others, input_precision=PRECISION)
            kk += tl.dot((k * later).to(mixed.dtype.element_ty), others, input_precision=PRECISION)
        for lag in range(SUB):  # pairs of one block, whose factors would overflow apart
            before = has & (rows % SUB >= lag)
            other = tl.load(key_places - lag * CHANNELS, mask=before, other=0.0).to(tl.float32)
            weight = other * tl.exp(tl.minimum(total - tl.load(places - lag * (HEADS * KEYS), mask=before, other=0.0), 0.0))
            pairs = (columns == rows - lag) & (rows % SUB >= lag)
            qk = tl.where(pairs, tl.sum(q * weight, 1)[:, None], qk)
            kk = tl.where(pairs, tl.sum(k * weight, 1)[:, None], kk)
        decayed = tl.exp(total)
    else:
        total = tl.load(totals + tokens * HEADS + head, mask=inside, other=0.0)
        between = tl.where(rows >= columns, tl.exp(tl.minimum(total[:, None] - total[None], 0.0)), 0.0)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        kk = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between
        decayed = tl.exp(total)[:, None]
    tl.store(attention + (tokens[:, None] * HEADS + head) * TOKENS + columns, qk.to(attention.dtype.element_ty), mask=inside[:, None])
    if DELTA:
        inverse = _invert(tl.where(rows > columns, kk * beta[:, None], 0.0), SUB, TOKENS, SOLVE).to(mixed.dtype.element_ty)
        reads = tl.dot(inverse, (k * decayed * beta[:, None]).to(mixed.dtype.element_ty), input_precision=PRECISION)
        tl.store(read + (tokens[:, None] * HEADS + head) * KEYS + keys[None], reads.to(read.dtype.element_ty), mask=has)
        values = tl.arange(0, BLOCK_V)
        has_value = inside[:, None] & (values < VALUES)[None]
        v = tl.load(mixed + tokens[:, None] * CHANNELS + V + head * VALUES + values[None], mask=has_value, other=0.0)
        writes = tl.dot(inverse, (v * beta[:, None]).to(mixed.dtype.element_ty), input_precision=PRECISION)
        tl.store(solved + (tokens[:, None] * HEADS + head) * VALUES + values[None], writes.to(solved.dtype.element_ty), mask=has_value)


@triton.jit(do_not_specialize_on_alignment=["sources", "targets", "starts"])  # slices that start at any row
def _extend(
    mixed, totals, strength, attention, solved, read, skips, states, sources, targets, starts, out,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHANNELS: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BY_KEY: tl.constexpr, DELTA: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Grid: rows, heads, blocks of values. A program takes the state of its row through the row's
    chunks."""
    row, head = tl.program_id(0), tl.program_id(1)
    count, keys = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = (keys < KEYS)[None], (values < VALUES)[None]
    has_both = (keys < KEYS)[:, None] & has_value
    entries = (head * KEYS + keys[:, None]) * VALUES + values[None]
    state = tl.load(states + tl.load(sources + row) * (HEADS * KEYS * VALUES) + entries, mask=has_both, other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    start, stop = tl.load(starts + row), tl.load(starts + row + 1)
    for begin in range(start, stop, TOKENS):
        tokens = tl.cast(begin, tl.int64) + count
        inside = (tokens < stop)[:, None]
        last = tl.cast(tl.minimum(begin + TOKENS, stop) - 1, tl.int64)
        at = tokens[:, None]
        q = tl.load(mixed + at * CHANNELS + Q + key_head * KEYS + keys[None], mask=inside & has_key, other=0.0)
        k = tl.load(mixed + at * CHANNELS + K + key_head * KEYS + keys[None], mask=inside & has_key, other=0.0)
        if BY_KEY:
            places = (at * HEADS + head) * KEYS + keys[None]
            total = tl.load(totals + places, mask=inside & has_key, other=0.0)
            end = tl.load(totals + (last * HEADS + head) * KEYS + keys, mask=keys < KEYS, other=0.0)
            written = k * tl.exp(tl.minimum(end[None] - total, 0.0))
            kept = tl.exp(end)[:, None]
        else:
            total = tl.load(totals + at * HEADS + head, mask=inside, other=0.0)
            end = tl.load(totals + last * HEADS + head)
            written = k * tl.exp(tl.minimum(end - total, 0.0))
            kept = tl.exp(end)
        held = state.to(mixed.dtype.element_ty)
        if DELTA:
            value_block = tl.load(solved + (at * HEADS + head) * VALUES + values[None], mask=inside & has_value, other=0.0)
            reads = tl.load(read + (at * HEADS + head) * KEYS + keys[None], mask=inside & has_key, other=0.0)
            new = value_block - tl.dot(reads, held, input_precision=PRECISION)
        else:
            value_block = tl.load(mixed + at * CHANNELS + V + head * VALUES + values[None], mask=inside & has_value, other=0.0)
            new = value_block * tl.load(strength + at * HEADS + head, mask=inside, other=0.0)
        new = new.to(mixed.dtype.element_ty)
        pairs = tl.load(attention + (at * HEADS + head) * TOKENS + count[None], mask=inside, other=0.0)
        result = tl.dot((q * tl.exp(total)).to(mixed.dtype.element_ty), held, input_precision=PRECISION)
        result += tl.dot(pairs, new, input_precision=PRECISION)
        if HAS_SKIP:
            result += tl.load(skips + head) * value_block
        tl.store(out + (at * HEADS + head) * VALUES + values[None], result.to(out.dtype.element_ty), mask=inside & has_value)
        state = state * kept + tl.dot(tl.trans(written.to(mixed.dtype.element_ty)), new, input_precision=PRECISION)
    tl.store(states + tl.load(targets + row) * (HEADS * KEYS * VALUES) + entries, state, mask=has_both)
