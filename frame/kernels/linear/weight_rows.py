# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment,var-annotated,misc"
"""GEMMs of up to 16 rows with 4-bit weights in groups, for one matrix or for the experts of few
pairs, bound by reading the weight.

A thread loads the 16 bytes of 32 inputs and makes MMA fragments of the quantized values in
registers. Scales multiply the sums: the eight columns of an MMA hold each row once for every group
that its inputs meet. The first loads of a matrix precede the PDL wait, since no step writes
weights. Depends on no layer and no checkpoint format.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

from frame.core.interfaces.weight_format import CanonicalWeight
from frame.kernels import INTERPRETED
from frame.kernels.launch import PreparedLaunch, ceil_div, launch_dependents, next_power_of_2, wait_for_previous
from frame.kernels.moe.expert_kernels import activate
from frame.kernels.moe.grouped_gemm import Activation

_CHUNK = 128  # inputs of which four neighbouring threads load the quantized values of 32 each
_COLUMNS = 8  # of an MMA
_MAX_SETS = 1  # of columns; measured on an H200, two are slower than the kernel for more rows
_FEW_OUTPUTS, _MANY_OUTPUTS = 2560, 10240  # up to which more warps share a block, from which a program takes two
MAX_PAIRS = 64  # of tokens and experts


def _shift(target: str, source: str, bits: int) -> str:
    return f"shl.b32 {target}, {source}, {bits};" if bits > 0 else f"shr.u32 {target}, {source}, {-bits};"


def _write_asm(registers: str, is_int4: bool) -> str:
    """PTX that decodes two words, $8 and $9, to eight pairs of bfloat16: the values at the same
    place of both words."""
    lines = [f".reg .b32 {registers};"]
    if is_int4:  # a value in the mantissa of 128
        lines += ["mov.b32 m, 0x000F000F;", "mov.b32 o, 0x43004300;"]
    else:  # the value's bits in a float; 2^126 corrects the bias of its exponent
        lines += ["mov.b32 g, 0x80008000;", "mov.b32 m, 0x01C001C0;", "mov.b32 f, 0x7E807E80;", "mov.b32 n, 0x80008000;"]
    lines += ["prmt.b32 a, $8, $9, 0x5410;", "prmt.b32 b, $8, $9, 0x7632;"]
    for place in range(8):
        half, shift = "ab"[place // 4], place % 4 * 4
        if is_int4:
            lines += (
                [_shift("t", half, -shift), f"lop3.b32 ${place}, t, m, o, 0xEA;"] if shift else [f"lop3.b32 ${place}, {half}, m, o, 0xEA;"]
            )
        else:
            lines += [_shift("s", half, 12 - shift), "and.b32 s, s, g;"] if shift < 12 else [f"and.b32 s, {half}, g;"]
            lines += [_shift("t", half, 6 - shift), "lop3.b32 t, t, m, s, 0xEA;", f"fma.rn.bf16x2 ${place}, t, f, n;"]
    return "{\n" + "\n".join(lines) + "\n}"


_INT4_ASM = tl.constexpr(_write_asm("a, b, t, m, o", is_int4=True))
_E2M1_ASM = tl.constexpr(_write_asm("a, b, s, t, g, m, f, n", is_int4=False))


@triton.jit
def _decode_one(words, NUMBER: tl.constexpr, QUANT_TYPE: tl.constexpr):
    """`decode_words` of one code, in portable operations."""
    code = (words >> (4 * NUMBER)) & 15
    if QUANT_TYPE == "int4":
        return code.to(tl.float32)
    else:
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def decode_words(words, QUANT_TYPE: tl.constexpr, PORTABLE: tl.constexpr):
    """int32 words of eight quantized values -> eight tensors of their values, the lowest bits
    first. int4: the quantized values and, unless PORTABLE, 128 more."""
    if PORTABLE:
        return (
            _decode_one(words, 0, QUANT_TYPE), _decode_one(words, 1, QUANT_TYPE), _decode_one(words, 2, QUANT_TYPE),
            _decode_one(words, 3, QUANT_TYPE), _decode_one(words, 4, QUANT_TYPE), _decode_one(words, 5, QUANT_TYPE),
            _decode_one(words, 6, QUANT_TYPE), _decode_one(words, 7, QUANT_TYPE),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _INT4_ASM if QUANT_TYPE == "int4" else _E2M1_ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _to_left(words_values, WARPS: tl.constexpr):
    """Values [8, WARPS, 2, 16], word 4 t + 2 j + b -> left MMA operand [WARPS, 16, 16], column
    8 j + 2 t + b, which is where the thread holds it."""
    words_values = tl.reshape(words_values, [8, WARPS, 2, 4, 2, 2])
    return tl.reshape(tl.permute(words_values, (1, 2, 0, 4, 3, 5)), [WARPS, 16, 16])


@triton.jit
def _to_right(words_values, WARPS: tl.constexpr):
    """Inputs [t, g, WARPS, j, b] of word 2 j + b -> right MMA operand [WARPS, 16, 8]."""
    return tl.reshape(tl.permute(words_values, (2, 3, 0, 4, 1)), [WARPS, 16, 8])


@triton.jit
def _split_bytes(half, WARPS: tl.constexpr):
    """[4, 8, WARPS, 2, 8] -> the inputs of bytes 0 to 3 of four words, as right operands."""
    even, odd = tl.split(tl.reshape(half, [4, 8, WARPS, 2, 2, 2, 2]))
    zeroth, second = tl.split(even)
    first, third = tl.split(odd)
    return _to_right(zeroth, WARPS), _to_right(first, WARPS), _to_right(second, WARPS), _to_right(third, WARPS)


@triton.jit
def _load_inputs(pointers, k, K, inputs, is_column, WARPS: tl.constexpr, dtype: tl.constexpr):
    """The right operands of the eight quantized values of each word, for the inputs from `k` on."""
    halves = ()
    for half in tl.static_range(2):
        place = tl.max_contiguous(tl.multiple_of(pointers + (k + 16 * half), [1, 1, 1, 1, 16]), [6, 4, 3, 2, 8])
        halves += (tl.load(place, mask=is_column & (k + 16 * half + inputs < K), other=0.0).to(dtype),)
    low, high = _split_bytes(halves[0], WARPS), _split_bytes(halves[1], WARPS)
    return low[0], high[0], low[1], high[1], low[2], high[2], low[3], high[3]


@triton.jit
def _load_tile(words, scales, zeros, k, K, is_row, offsets, lanes, blocks, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """The words [8, WARPS, 2, 16], scales and zero points [4, 8, WARPS] of outputs g and 8 + g,
    from input `k` on."""
    limit = (K + 31) // 32
    # the hints order the dimensions over the threads: words, then t and g, then warps
    pointers = tl.max_contiguous(words + k // 8, [8, 4, 2, 16])
    quantized = tl.load(pointers, mask=is_row & (k // 8 + lanes < limit * 4), other=0, eviction_policy="evict_first")
    group = (k // 32 + blocks) // (GROUP // 32)
    is_group = group * GROUP < K  # also of a block after the last input, whose thread holds sums of others
    scale = tl.load(scales + offsets[0] + group, mask=is_group, other=0), tl.load(scales + offsets[1] + group, mask=is_group, other=0)
    zero = scale
    if HAS_ZEROS:
        zero = tl.load(zeros + offsets[0] + group, mask=is_group, other=0), tl.load(zeros + offsets[1] + group, mask=is_group, other=0)
    return quantized, scale, zero


@triton.jit
def _spread(pair, WARPS: tl.constexpr):
    """Numbers [4, 8, WARPS] of outputs g and 8 + g -> [WARPS, 16, 8], where thread (g, t) holds the
    sums of columns 2 t and 2 t + 1."""
    both = tl.permute(tl.join(pair[0].to(tl.float32), pair[1].to(tl.float32)), (2, 3, 1, 0))
    return tl.reshape(tl.broadcast_to(tl.reshape(both, [WARPS, 16, 4, 1]), (WARPS, 16, 4, 2)), [WARPS, 16, 8])


@triton.jit
def _multiply(left, right, WARPS: tl.constexpr):
    total = tl.zeros([WARPS, 16, 8], tl.float32)
    for each in tl.static_range(8):
        total = tl.dot(left[each], right[each], total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M", "x_stride"])
def weight_rows_kernel(
    x, quantized, scales, zeros, bias, ids, pair_weights, out, M, x_stride,
    N: tl.constexpr, K: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr,  # pairs that share a row of x; 0: one matrix
    EARLY: tl.constexpr,  # ids may be read before the PDL wait
    WEIGHTED: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    QUANT_TYPE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr, PORTABLE: tl.constexpr,
    GROUPS: tl.constexpr,  # that 128 inputs meet
    SETS: tl.constexpr, BLOCKS: tl.constexpr, DEPTH: tl.constexpr, num_warps: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[m, n] of the GEMMs of x [M, K] and a weight of N outputs, or with TOP of x[pair //
    TOP] and the weight of each pair's expert; GATED: of N gates and N ups.

    Grid: (blocks of outputs, 8 * SETS / GROUPS rows or one pair). Column c of the eight holds the
    inputs of group c // (8 / GROUPS), zeros elsewhere. sum (code - zero) x is sum code x - zero sum
    x, the latter by MMAs with ones. `zeros` are the minima with HAS_MINIMA.
    """
    WARPS: tl.constexpr = num_warps
    SPAN: tl.constexpr = WARPS * 128
    PIECES: tl.constexpr = 2 if GATED else BLOCKS
    STEP: tl.constexpr = N if GATED else 16  # outputs from one part to the next
    TILE: tl.constexpr = 16 if GATED else 16 * BLOCKS
    EACH: tl.constexpr = 8 // GROUPS  # rows in a set of columns
    OFFSET: tl.constexpr = 0.0 if PORTABLE or QUANT_TYPE != "int4" else 128.0
    dtype: tl.constexpr = tl.float32 if PORTABLE else tl.bfloat16
    first = tl.program_id(0) * TILE
    number = tl.program_id(1)
    weight_row = first
    if TOP > 0:
        if not EARLY:
            wait_for_previous(PDL)
        weight_row += tl.load(ids + number).to(tl.int32) * (N * (2 if GATED else 1))
    launch_dependents(PDL)  # after the wait of a launch that gives a dependent EARLY ids
    warp = tl.arange(0, WARPS)
    lanes = (warp[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, None, :]
    rows = (tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 2)[None, :])[:, None, :, None]
    words = quantized + (weight_row + rows).to(tl.int64) * CODE_STRIDE + lanes
    blocks = (tl.arange(0, 4)[:, None] + 4 * warp[None, :])[:, None, :]
    low_rows = tl.arange(0, 8)[None, :, None]
    is_row, offsets = (), ()
    for p in tl.static_range(PIECES):
        place = first + (0 if GATED else p * 16)
        is_row += (place + rows < N,)
        low = (weight_row + tl.minimum(low_rows, N - 1 - place) + p * STEP) * SCALE_STRIDE
        high = (weight_row + tl.minimum(low_rows + 8, N - 1 - place) + p * STEP) * SCALE_STRIDE
        offsets += ((low, high),)
    tiles = ()
    for d in tl.static_range(DEPTH):
        for p in tl.static_range(PIECES):
            place = words + p * STEP * CODE_STRIDE
            tiles += (_load_tile(place, scales, zeros, d * SPAN, K, is_row[p], offsets[p], lanes, blocks, GROUP, HAS_ZEROS),)
    if TOP == 0 or EARLY:
        wait_for_previous(PDL)
    thread, column = tl.arange(0, 4)[:, None, None, None, None], tl.arange(0, 8)[None, :, None, None, None]
    inputs = (tl.arange(0, 4)[:, None] * 32 + warp[None, :] * 128)[:, None, :, None, None]
    inputs += tl.arange(0, 2)[None, None, None, :, None] * 8 + tl.arange(0, 8)[None, None, None, None, :]
    is_group = column // EACH == thread // (4 // GROUPS)
    pointers, is_column = (), ()
    for s in tl.static_range(SETS):
        if TOP > 0:
            # true; without it the pointers would be broadcast, which loses the hint of their order
            source, is_row_of = tl.where(column < M + 8, number // TOP, 0), column % EACH == 0
        else:
            source = (number * SETS + s) * EACH + column % EACH
            is_row_of = source < M
        pointers += (x + source * x_stride + inputs,)
        is_column += (is_group & is_row_of,)
    ones = tl.full([WARPS, 16, 16], 1.0, dtype)
    sums = ()
    for _ in tl.static_range(SETS * PIECES):
        sums += (tl.zeros([WARPS, 16, 8], tl.float32),)
    for start in tl.range(0, K, DEPTH * SPAN, num_stages=1):
        next_tiles = ()
        for d in tl.static_range(DEPTH):
            k = start + d * SPAN
            rights, inputs_sums = (), ()
            for s in tl.static_range(SETS):
                right = _load_inputs(pointers[s], k, K, inputs, is_column[s], WARPS, dtype)
                rights += (right,)
                if QUANT_TYPE == "int4":
                    inputs_sums += (_multiply((ones, ones, ones, ones, ones, ones, ones, ones), right, WARPS),)
            next_sums = ()
            for p in tl.static_range(PIECES):
                packed, scale, zero = tiles[d * PIECES + p]
                values = decode_words(packed, QUANT_TYPE, PORTABLE)
                left = (
                    _to_left(values[0], WARPS), _to_left(values[1], WARPS), _to_left(values[2], WARPS), _to_left(values[3], WARPS),
                    _to_left(values[4], WARPS), _to_left(values[5], WARPS), _to_left(values[6], WARPS), _to_left(values[7], WARPS),
                )  # fmt: skip
                factor = _spread(scale, WARPS)
                for s in tl.static_range(SETS):
                    words_values = _multiply(left, rights[s], WARPS)
                    if HAS_MINIMA:
                        words_values -= OFFSET * inputs_sums[s]
                    elif HAS_ZEROS:
                        words_values -= (_spread(zero, WARPS) + OFFSET) * inputs_sums[s]
                    elif QUANT_TYPE == "int4":
                        words_values -= (8.0 + OFFSET) * inputs_sums[s]
                    words_values = sums[p * SETS + s] + factor * words_values
                    next_sums += (words_values - _spread(zero, WARPS) * inputs_sums[s] if HAS_MINIMA else words_values,)
                place = words + p * STEP * CODE_STRIDE
                fresh = k + DEPTH * SPAN
                next_tiles += (_load_tile(place, scales, zeros, fresh, K, is_row[p], offsets[p], lanes, blocks, GROUP, HAS_ZEROS),)
            sums = next_sums
        tiles = next_tiles
    outputs = tl.arange(0, 16)
    lane = tl.arange(0, EACH)
    for s in tl.static_range(SETS):
        totals = ()
        for p in tl.static_range(PIECES):
            total = tl.sum(tl.reshape(tl.sum(sums[p * SETS + s], 0), [16, GROUPS, EACH]), 1)
            if HAS_BIAS:
                at = weight_row + tl.minimum(outputs, N - 1 - first - (0 if GATED else p * 16)) + p * STEP
                total += tl.load(bias + at).to(tl.float32)[:, None]
            totals += (total,)
        for p in tl.static_range(1 if GATED else PIECES):
            result = totals[p]
            if ACTIVATION != "none":
                result = activate(result, totals[PIECES - 1 if GATED else p], ACTIVATION, ALPHA, LIMIT)
            if WEIGHTED:
                result *= tl.load(pair_weights + number).to(tl.float32)
            if TOP > 0:
                places, valid = number + lane * 0, lane == 0
            else:
                places = (number * SETS + s) * EACH + lane
                valid = places < M
            output = first + p * 16 + outputs
            mask = valid[None, :] & (output < N)[:, None]
            tl.store(out + places[None, :].to(tl.int64) * N + output[:, None], result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """Warps of a program, which share its inputs, tiles of 128 inputs a warp in flight, and blocks
    of 16 outputs."""

    warps: int = 4
    depth: int = 2
    blocks: int = 1


def count_max_rows(weight: CanonicalWeight, dtype: torch.dtype) -> int:
    """The most rows of `dtype` that the kernel multiplies by this weight; 0: none."""
    scheme, scales = weight.scheme, weight.scales
    if dtype != torch.bfloat16 and not INTERPRETED:
        return 0
    if scheme.quant_type not in ("int4", "e2m1") or weight.order is not None or weight.outer is not None or scales is None:
        return 0
    if scheme.group[0] != 1 or not scheme.group[1] or scheme.group[1] % 32:
        return 0
    return min(16, _MAX_SETS * _COLUMNS // _count_groups(weight))


def choose_rows_plan(weight: CanonicalWeight, pairs: int = 0) -> RowsPlan:
    """The plan for a weight [outputs, inputs], or for the experts of so many pairs. Measured on an
    H200."""
    if INTERPRETED:
        return RowsPlan(1, 1, 2)
    columns = weight.columns
    if pairs:
        warps = 4 if columns >= 2048 else 2
        return RowsPlan(warps, min(4 if weight.scheme.quant_type == "int4" else 2, ceil_div(columns, warps * _CHUNK)))
    if weight.outputs >= _MANY_OUTPUTS:
        return RowsPlan(4, 2, 2)
    return RowsPlan(8 if columns >= 4096 and weight.outputs <= _FEW_OUTPUTS else 4, 4)


def multiply_rows(
    x: torch.Tensor, weight: CanonicalWeight, bias: torch.Tensor | None, plan: RowsPlan, activation: Activation | None = None
) -> torch.Tensor:
    """x [rows, inputs], inputs contiguous, up to `count_max_rows` -> [rows, outputs], with the
    activation, which halves gated outputs."""
    out = torch.empty(len(x), _count_outputs(weight, activation), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, None, None, out, plan, activation, 0)
    return out


def multiply_pair_rows(
    x: torch.Tensor,
    weight: CanonicalWeight,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    pair_weights: torch.Tensor | None,
    plan: RowsPlan,
    activation: Activation | None = None,
) -> torch.Tensor:
    """x [tokens, inputs] or [pairs, inputs] times the weight of each pair's expert `ids` -> [pairs,
    outputs]: with the activation, which halves gated outputs, and times the pairs' weights.

    With `pair_weights` the kernel before it must be one of these with the same `ids`: they are read
    while that one runs.
    """
    out = torch.empty(ids.numel(), _count_outputs(weight, activation), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, ids, pair_weights, out, plan, activation, ids.numel() // len(x))
    return out


def _count_outputs(weight: CanonicalWeight, activation: Activation | None) -> int:
    return weight.outputs // 2 if activation is not None and activation.is_gated else weight.outputs


def _count_groups(weight: CanonicalWeight) -> int:
    return _CHUNK // gcd(_CHUNK, weight.scheme.group[1])


def _launch(
    x: torch.Tensor, weight: CanonicalWeight, bias: torch.Tensor | None, ids: torch.Tensor | None, pair_weights: torch.Tensor | None,
    out: torch.Tensor, plan: RowsPlan, activation: Activation | None, top: int,
) -> None:  # fmt: skip
    scales, groups = weight.scales, _count_groups(weight)
    assert scales is not None
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # rows are read by 16 bytes
    quantized = weight.quantized.view(torch.int32)
    zeros = weight.zeros if weight.minima is None else weight.minima
    others = [scales if each is None else each for each in (zeros, bias, ids, pair_weights)]
    tensors = (x, quantized, scales, *others, out)
    sets = 1 if top else next_power_of_2(ceil_div(len(out) * groups, _COLUMNS))
    key = out.shape[1], weight.columns, quantized.shape[-1], scales.shape[-1], weight.scheme.group[1], top, groups, sets
    traits = pair_weights is not None, weight.scheme.quant_type, zeros is not None, weight.minima is not None, bias is not None
    launch = _prepared(tuple(each.dtype for each in tensors), key, traits, activation, plan, x.device)
    is_gated = activation is not None and activation.is_gated
    launch((ceil_div(out.shape[1], 16 if is_gated else 16 * plan.blocks), len(out) if top else 1, 1), tensors, (len(x), x.stride(0)))


@lru_cache(maxsize=256)
def _prepared(
    types: tuple[torch.dtype, ...], key: tuple[int, ...], traits: tuple[bool, str, bool, bool, bool], activation: Activation | None,
    plan: RowsPlan, device: torch.device,
) -> PreparedLaunch:  # fmt: skip
    constants: dict[str, object] = dict(zip(("N", "K", "CODE_STRIDE", "SCALE_STRIDE", "GROUP", "TOP", "GROUPS", "SETS"), key, strict=True))
    constants |= dict(zip(("WEIGHTED", "QUANT_TYPE", "HAS_ZEROS", "HAS_MINIMA", "HAS_BIAS"), traits, strict=True))
    constants |= (activation or Activation("none")).constants
    constants |= {"EARLY": traits[0], "BLOCKS": plan.blocks, "DEPTH": plan.depth, "PORTABLE": INTERPRETED}
    return PreparedLaunch(weight_rows_kernel, (*types, 1, 8), constants, device, plan.warps)
