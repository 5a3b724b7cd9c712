# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The decode kernels: one query token a row, its keys split over programs, and the merge of the parts.

All heads that share keys are taken together, so that keys are read once. A split has a fixed number of keys, the launch's
choice; a row uses as many splits as its keys need.
"""

from __future__ import annotations

import triton
import triton.language as tl

from frame.attention_backends.triton.scan import LOG2E, load_rows, scan_keys


@triton.jit
def first_key(seq_len, WINDOW: tl.constexpr):
    """The first key that a row's new token sees."""
    if WINDOW > 0:
        return tl.maximum(0, seq_len - WINDOW)
    else:
        return 0


@triton.jit
def decode_kernel(
    q1_pointer,
    q2_pointer,
    k1_pointer,
    k2_pointer,
    v_pointer,
    out_pointer,  # [rows, heads, value]; or, with splits, [rows, heads, splits, value] in float32
    weight_pointer,  # float32 [rows, heads, splits]: logarithm (base 2) of each part's sum of weights
    sinks_pointer,
    seq_lens,
    request_slots,
    page_table,
    table_stride,
    q1_stride,
    q1_head,
    q2_stride,
    q2_head,
    k1_stride,
    k1_head,
    k2_stride,
    k2_head,
    v_stride,
    v_head,
    out_stride,
    out_head,
    num_splits,
    split_keys,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK1: tl.constexpr,
    BLOCK2: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SHARED: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: (kv heads * blocks of `HEADS` query heads, splits, rows)."""
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // blocks
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    slot = tl.load(request_slots + row)
    begin = first_key(seq_len, WINDOW) + split * split_keys
    end = tl.minimum(seq_len, begin + split_keys)
    if begin < end:
        places = tl.arange(0, BLOCK_QUERIES)
        in_group = tl.program_id(0) % blocks * HEADS + places
        valid = (places < HEADS) & (in_group < GROUP)
        head = kv_head * GROUP + in_group
        q1 = load_rows(q1_pointer, row * q1_stride + head * q1_head, 1, tl.arange(0, BLOCK1), WIDTH1, valid, True, UPCAST)
        q2 = load_rows(q2_pointer, row * q2_stride + head * q2_head, 1, tl.arange(0, BLOCK2), WIDTH2, valid, True, UPCAST)
        top = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_QUERIES], tl.float32)
        if HAS_SINKS:  # noqa: SIM102 - a constant of the compilation, then a value of the device
            if split == 0:  # the sink belongs to the row, not to each of its parts
                top = tl.load(sinks_pointer + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
                total = tl.full([BLOCK_QUERIES], 1.0, tl.float32)
        acc = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE], tl.float32)
        whole = begin + (end - begin) // BLOCK_KEYS * BLOCK_KEYS  # whole blocks need no mask
        top, total, acc = scan_keys(
            q1,
            q2,
            tl.zeros([BLOCK_QUERIES], tl.int32) + (seq_len - 1),
            top,
            total,
            acc,
            begin,
            whole,
            scale,
            page_table + slot * table_stride,
            0,
            k1_pointer + kv_head * k1_head,
            k2_pointer + kv_head * k2_head,
            v_pointer + kv_head * v_head,
            k1_stride,
            k2_stride,
            v_stride,
            PAGE_SIZE,
            WIDTH1,
            WIDTH2,
            VALUE,
            BLOCK1,
            BLOCK2,
            BLOCK_VALUE,
            BLOCK_KEYS,
            WINDOW,
            SOFT_CAP,
            SHARED,
            False,
            UPCAST,
        )
        top, total, acc = scan_keys(
            q1,
            q2,
            tl.zeros([BLOCK_QUERIES], tl.int32) + (seq_len - 1),
            top,
            total,
            acc,
            whole,
            end,
            scale,
            page_table + slot * table_stride,
            0,
            k1_pointer + kv_head * k1_head,
            k2_pointer + kv_head * k2_head,
            v_pointer + kv_head * v_head,
            k1_stride,
            k2_stride,
            v_stride,
            PAGE_SIZE,
            WIDTH1,
            WIDTH2,
            VALUE,
            BLOCK1,
            BLOCK2,
            BLOCK_VALUE,
            BLOCK_KEYS,
            WINDOW,
            SOFT_CAP,
            SHARED,
            True,
            UPCAST,
        )
        columns = tl.arange(0, BLOCK_VALUE)
        out = acc / total[:, None]
        mask = valid[:, None] & (columns < VALUE)[None, :]
        if SPLIT:
            part = (row * NUM_HEADS + head) * num_splits + split
            tl.store(out_pointer + part[:, None] * VALUE + columns[None, :], out, mask=mask)
            tl.store(weight_pointer + part, top + tl.log2(total), mask=valid)
        else:
            places = (row * out_stride + head * out_head)[:, None] + columns[None, :]
            tl.store(out_pointer + places, out.to(out_pointer.dtype.element_ty), mask=mask)


@triton.jit
def merge_kernel(
    parts_pointer,
    weight_pointer,
    out_pointer,
    seq_lens,
    out_stride,
    out_head,
    num_splits,
    split_keys,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid: (rows, heads). Weighs the parts that the row used; the others were never written."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + row)
    used = tl.cdiv(seq_len - first_key(seq_len, WINDOW), split_keys)
    columns = tl.arange(0, BLOCK_VALUE)
    part = (row * NUM_HEADS + head) * num_splits
    top = tl.load(weight_pointer + part)
    acc = tl.load(parts_pointer + part * VALUE + columns, mask=columns < VALUE, other=0.0)
    total = 1.0
    for split in range(1, used):
        weight = tl.load(weight_pointer + part + split)
        value = tl.load(parts_pointer + (part + split) * VALUE + columns, mask=columns < VALUE, other=0.0)
        new_top = tl.maximum(top, weight)
        fade = tl.exp2(top - new_top)
        share = tl.exp2(weight - new_top)
        acc = acc * fade + value * share
        total = total * fade + share
        top = new_top
    out = acc / total
    tl.store(out_pointer + row * out_stride + head * out_head + columns, out.to(out_pointer.dtype.element_ty), mask=columns < VALUE)
