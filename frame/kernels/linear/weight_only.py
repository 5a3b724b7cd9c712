# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""GEMM with quantized weights and unquantized activations: 4-bit and 8-bit values are
dequantized in registers, for one matrix or for experts.

The weights are the left MMA operand, which the tensor cores of compute capability 9.0 read from
registers, and few rows fill the short side. For many rows a second kernel dequantizes the whole
weight once, for PyTorch's GEMM. Depends on no layer and no checkpoint format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from frame.core.interfaces.weight_format import NIBBLES, CanonicalWeight
from frame.kernels import INTERPRETED

_HALF = tl.constexpr(16)  # 4-bit quantized values of a block of 32 inputs in the low nibbles; the others are in the high ones
_MAX_EXPERTS = 1024


@triton.jit
def decode_quantized(packed, zero, QUANT_TYPE: tl.constexpr, dtype: tl.constexpr):
    """Quantized values minus zero points, exact in `dtype`. Integers up to 256 are: a code is
    placed in the mantissa of 128 (bfloat16) or 1024 (float16), which takes one operation and a
    subtraction."""
    if QUANT_TYPE == "int4":
        if dtype == tl.bfloat16:
            return (packed.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128.0).to(tl.bfloat16)
        elif dtype == tl.float16:
            return (packed.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024.0).to(tl.float16)
        else:
            return packed.to(dtype) - zero.to(dtype)
    elif QUANT_TYPE == "e2m1":
        # the code's bits in a float of exponent bias 127 or 15; the factor corrects the bias
        if dtype == tl.float16:
            bits = ((packed & 8).to(tl.int16) << 12) | ((packed & 7).to(tl.int16) << 9)
            return bits.to(tl.float16, bitcast=True) * 16384.0
        else:
            wide = ((packed & 8).to(tl.int32) << 28) | ((packed & 7).to(tl.int32) << 22)
            return (wide.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(dtype)
    elif QUANT_TYPE == "int8":
        return packed.to(dtype) - zero.to(dtype)
    else:
        return packed.to(dtype)


def _write_nibbles_asm() -> str:
    """PTX that decodes four bytes of e2m1 values, $4, to pairs of bfloat16: the low nibbles to $0
    and $1, the high ones to $2 and $3."""
    lines = [".reg .b32 a, b, s, m, f, z;", "mov.b32 f, 0x7E807E80;", "mov.b32 z, 0x80008000;"]
    lines += ["prmt.b32 a, $4, 0, 0x4140;", "prmt.b32 b, $4, 0, 0x4342;"]
    for place in range(4):
        half, shift = "ab"[place % 2], place // 2 * 4
        lines += [f"shl.b32 s, {half}, {12 - shift};", "and.b32 s, s, 0x80008000;"]
        lines += [f"shl.b32 m, {half}, {6 - shift};", "lop3.b32 m, m, 0x01C001C0, s, 0xEA;", f"fma.rn.bf16x2 ${place}, m, f, z;"]
    return "{\n" + "\n".join(lines) + "\n}"


_NIBBLES_ASM = tl.constexpr(_write_nibbles_asm())


@triton.jit
def decode_nibbles(packed, low_zero, high_zero, QUANT_TYPE: tl.constexpr, dtype: tl.constexpr, PORTABLE: tl.constexpr):
    """`decode_quantized` of the low and of the high nibbles. Unless PORTABLE, two e2m1 quantized
    values of bfloat16 share each operation on 32 bits, which the compiler finds for int4 only."""
    if PORTABLE or dtype != tl.bfloat16 or QUANT_TYPE == "int4":
        return decode_quantized(packed & 15, low_zero, QUANT_TYPE, dtype), decode_quantized(packed >> 4, high_zero, QUANT_TYPE, dtype)
    else:
        return tl.inline_asm_elementwise(
            _NIBBLES_ASM,
            "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def apply_scales(values, scales, dtype: tl.constexpr, PORTABLE: tl.constexpr):
    """values * scales, rounded to `dtype`."""
    if PORTABLE or dtype != tl.bfloat16:
        return (values * scales).to(dtype)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }", "=r,r,r", [values, scales],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def load_zero(zeros, offset, QUANT_TYPE: tl.constexpr, HAS_ZEROS: tl.constexpr, mask):
    """Zero points as float32; without them 0, or 8 for int4."""
    if HAS_ZEROS:
        return tl.load(zeros + offset, mask=mask, other=0).to(tl.float32)
    else:
        return (offset * 0).to(tl.float32) + (8.0 if QUANT_TYPE == "int4" else 0.0)


@triton.jit
def repeat_blocks(values, BN: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """[BN, BLOCKS] -> [BN, BLOCKS * WIDTH], each entry repeated."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], (BN, BLOCKS, WIDTH)), (BN, BLOCKS * WIDTH))


@triton.jit
def load_quantized(pointers, k, K, QUANT_TYPE: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """The quantized values of BK inputs from `k` on; `pointers` are those of the first inputs."""
    PACKED: tl.constexpr = QUANT_TYPE == "int4" or QUANT_TYPE == "e2m1"
    step = k // 2 if PACKED else k
    if EVEN_K:
        return tl.load(pointers + step, eviction_policy="evict_first")
    limit = (K + 31) // 32 * 16 if PACKED else K
    return tl.load(pointers + step, mask=(step + tl.arange(0, BK // 2 if PACKED else BK) < limit)[None, :], other=0.0)


@triton.jit
def multiply_quantized(
    packed, scales, zeros, scale_offset, low_x, high_x, k, K,
    QUANT_TYPE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZEROS: tl.constexpr,
    dtype: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """What the inputs from `k` on add: float32 [BN, BM], with scales unless
    one covers all inputs.

    `packed` [BN, BK, or BK / 2 for nibbles], `scale_offset` [BN]: the first scale of each output.
    `low_x`, `high_x`: the inputs of the low and the high nibbles; of bytes, `low_x`.
    """
    PACKED: tl.constexpr = QUANT_TYPE == "int4" or QUANT_TYPE == "e2m1"
    WIDTH: tl.constexpr = BK // 2 if PACKED else BK  # columns of one MMA
    PER_TILE: tl.constexpr = GROUP_K == 0 or GROUP_K % BK == 0
    BLOCKS: tl.constexpr = BK // 32
    if PER_TILE:
        group = k // GROUP_K if GROUP_K > 0 else 0
        low_zero = load_zero(zeros, scale_offset + group, QUANT_TYPE, HAS_ZEROS, scale_offset >= 0)[:, None]
        high_zero = low_zero
    else:
        block = k + tl.arange(0, BLOCKS) * 32
        is_group = (block < K)[None, :]
        low_at = scale_offset[:, None] + (block // GROUP_K)[None, :]
        low_scale = repeat_blocks(tl.load(scales + low_at, mask=is_group, other=0.0).to(dtype), BN, BLOCKS, WIDTH // BLOCKS)
        low_zero = repeat_blocks(load_zero(zeros, low_at, QUANT_TYPE, HAS_ZEROS, is_group), BN, BLOCKS, WIDTH // BLOCKS)
        high_scale, high_zero = low_scale, low_zero
        if GROUP_K == 16 and PACKED:
            high_scale = repeat_blocks(tl.load(scales + low_at + 1, mask=is_group, other=0.0).to(dtype), BN, BLOCKS, WIDTH // BLOCKS)
            high_zero = repeat_blocks(load_zero(zeros, low_at + 1, QUANT_TYPE, HAS_ZEROS, is_group), BN, BLOCKS, WIDTH // BLOCKS)
    if PACKED:
        low, high = decode_nibbles(packed, low_zero, high_zero, QUANT_TYPE, dtype, PORTABLE)
        if not PER_TILE:
            low, high = apply_scales(low, low_scale, dtype, PORTABLE), apply_scales(high, high_scale, dtype, PORTABLE)
        sums = tl.dot(high, high_x, tl.dot(low, low_x))
    else:
        low = decode_quantized(packed, low_zero, QUANT_TYPE, dtype)
        if not PER_TILE:
            low = (low * low_scale).to(dtype)
        sums = tl.dot(low, low_x)
    if PER_TILE and GROUP_K > 0:
        sums *= tl.load(scales + scale_offset + group).to(tl.float32)[:, None]
    return sums


@triton.jit
def find_rows(ends, pid, EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, BM: tl.constexpr):
    """-> (expert, first row, row after the last) of a row tile; expert EXPERTS: nothing to do."""
    lanes = tl.arange(0, EXPERT_LANES)
    end = tl.load(ends + lanes, mask=lanes < EXPERTS, other=0)
    begin = tl.load(ends + lanes - 1, mask=(lanes > 0) & (lanes < EXPERTS), other=0)
    tiles = tl.where(lanes < EXPERTS, (end - begin + BM - 1) // BM, 0)
    before = tl.cumsum(tiles, 0) - tiles
    is_mine = (before <= pid) & (pid < before + tiles)
    expert = tl.where(tl.sum(is_mine.to(tl.int32), 0) > 0, tl.sum(tl.where(is_mine, lanes, 0), 0), EXPERTS)
    first = tl.sum(tl.where(is_mine, begin + (pid - before) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(is_mine, end, 0), 0)


@triton.jit(do_not_specialize=["M"])
def weight_only_kernel(
    x, quantized, scales, zeros, outer, bias, ends, out, partial, counter, M, N, K, x_stride, code_stride, scale_stride,
    QUANT_TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,  # outputs and inputs per scale; GROUP_K 0: all inputs
    HAS_ZEROS: tl.constexpr, OUTER: tl.constexpr,  # OUTER: 0 none, 1 multiplies, 2 divides
    HAS_BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr,
    dtype: tl.constexpr, PORTABLE: tl.constexpr, num_warps: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k x[m, k] * (quantized[n, k] - zeros[n, g]) * scales[n, g] (+
    bias[n]). Grid: (output tiles, SPLIT, row tiles).

    If a scale covers whole tiles, it multiplies the float32 sums of a tile; otherwise the weights.
    With EXPERTS, rows are sorted by expert. Split-K as in `fp8_linear`.
    """
    PACKED: tl.constexpr = QUANT_TYPE == "int4" or QUANT_TYPE == "e2m1"
    WIDTH: tl.constexpr = BK // 2 if PACKED else BK  # columns of one MMA
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if EXPERTS > 0:
        expert, first_row, last_row = find_rows(ends, row_tile, EXPERTS, EXPERT_LANES, BM)
        if expert == EXPERTS:
            return
        quantized += expert.to(tl.int64) * N * code_stride
        scale_rows = expert.to(tl.int64) * tl.cdiv(N, GROUP_N)
        outer += expert * N
    else:
        first_row, last_row = row_tile * BM, M
        scale_rows = 0
    rows = tile * BN + tl.arange(0, BN)
    row_of = rows if EVEN_N else tl.minimum(rows, N - 1)
    batch = first_row + tl.arange(0, BM)
    is_row = batch < last_row
    lanes = tl.arange(0, WIDTH)
    columns = lanes // _HALF * 32 + lanes % _HALF if PACKED else lanes  # inputs of the low nibbles
    steps = tl.cdiv(K, BK)
    start = steps * split // SPLIT * BK
    stop = steps * (split + 1) // SPLIT * BK
    code_pointers = quantized + row_of.to(tl.int64)[:, None] * code_stride + lanes[None, :]
    x_pointers = x + batch[None, :].to(tl.int64) * x_stride + columns[:, None]
    scale_offset = (scale_rows + row_of // GROUP_N) * scale_stride
    total = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(start, stop, BK, num_stages=num_stages):
        packed = load_quantized(code_pointers, k, K, QUANT_TYPE, BK, EVEN_K)
        if EVEN_K:
            low_x = tl.load(x_pointers + k, mask=is_row[None, :], other=0.0)
        else:
            low_x = tl.load(x_pointers + k, mask=(k + columns < K)[:, None] & is_row[None, :], other=0.0)
        high_x = low_x
        if PACKED:
            if EVEN_K:
                high_x = tl.load(x_pointers + k + 16, mask=is_row[None, :], other=0.0)
            else:
                high_x = tl.load(x_pointers + k + 16, mask=(k + 16 + columns < K)[:, None] & is_row[None, :], other=0.0)
        total += multiply_quantized(
            packed, scales, zeros, scale_offset, low_x, high_x, k, K, QUANT_TYPE, BN, BK, GROUP_K, HAS_ZEROS, dtype, PORTABLE
        )
    if GROUP_K == 0:
        total *= tl.load(scales + scale_offset).to(tl.float32)[:, None]
    if OUTER > 0:
        factor = tl.load(outer + row_of)[:, None]
        total = total * factor if OUTER == 1 else total / factor
    size = M.to(tl.int64) * N
    places = batch[None, :].to(tl.int64) * N + rows[:, None]
    mask = is_row[None, :] & (rows < N)[:, None]
    is_last = True
    if SPLIT > 1:
        work = row_tile * tl.num_programs(0) + tile
        tl.store(partial + split * size + places, total, mask=mask)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter + work, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        if SPLIT > 1:
            total = tl.zeros([BN, BM], tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(partial + other * size + places, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counter + work, 0)
        if HAS_BIAS:
            total += tl.load(bias + row_of).to(tl.float32)[:, None]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_scale(pointers, mask, factor, OUTER: tl.constexpr):
    """Scales with the second scale of their output, float32."""
    scale = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if OUTER == 1:
        scale = scale * factor
    elif OUTER == 2:
        scale = scale / factor
    return scale


@triton.jit
def dequantize_kernel(
    quantized, scales, zeros, outer, minima, out, N, K, code_stride, scale_stride,
    QUANT_TYPE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    HAS_ZEROS: tl.constexpr, OUTER: tl.constexpr, HAS_MINIMA: tl.constexpr, num_warps: tl.constexpr,
):  # fmt: skip
    """out[n, k] = (quantized[n, k] - zeros[n, g]) * scales[n, g] - minima[n, g], computed in
    float32. Grid: (tiles of outputs, tiles of inputs)."""
    PACKED: tl.constexpr = QUANT_TYPE == "int4" or QUANT_TYPE == "e2m1"
    BLOCKS: tl.constexpr = BK // 32
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)
    first = tl.program_id(1) * BK
    inputs = first + tl.arange(0, BK)
    lanes = tl.arange(0, BK // 2 if PACKED else BK)
    limit = (K + 31) // 32 * 16 if PACKED else K
    code_step = (first // 2 if PACKED else first) + lanes
    packed = tl.load(quantized + row_of[:, None] * code_stride + code_step[None, :], mask=(code_step < limit)[None, :], other=0.0)
    block = first + tl.arange(0, BLOCKS) * 32
    at = (row_of // GROUP_N * scale_stride)[:, None] + (block // GROUP_K if GROUP_K > 0 else block * 0)[None, :]
    is_block = (block < K)[None, :]
    HALF: tl.constexpr = 16 if PACKED else 32
    factor = tl.load(outer + row_of)[:, None] if OUTER > 0 else 1.0
    low_scale = _load_scale(scales + at, is_block, factor, OUTER)
    low_zero = load_zero(zeros, at, "int8" if HAS_MINIMA else QUANT_TYPE, HAS_ZEROS, is_block)
    if PACKED:
        high_scale, high_zero = low_scale, low_zero
        if GROUP_K == 16:
            is_half = (block + 16 < K)[None, :]
            high_scale = _load_scale(scales + at + 1, is_half, factor, OUTER)
            high_zero = load_zero(zeros, at + 1, QUANT_TYPE, HAS_ZEROS, is_half)
        low_zero, high_zero = repeat_blocks(low_zero, BN, BLOCKS, HALF), repeat_blocks(high_zero, BN, BLOCKS, HALF)
        low = decode_quantized(packed & 15, low_zero, QUANT_TYPE, tl.float32) * repeat_blocks(low_scale, BN, BLOCKS, HALF)
        high = decode_quantized(packed >> 4, high_zero, QUANT_TYPE, tl.float32) * repeat_blocks(high_scale, BN, BLOCKS, HALF)
        halves = tl.join(tl.reshape(low, (BN, BLOCKS, 16)), tl.reshape(high, (BN, BLOCKS, 16)))
        values = tl.reshape(tl.permute(halves, (0, 1, 3, 2)), (BN, BK))
    else:
        values = decode_quantized(packed, repeat_blocks(low_zero, BN, BLOCKS, HALF), QUANT_TYPE, tl.float32)
        values = values * repeat_blocks(low_scale, BN, BLOCKS, HALF)
    if HAS_MINIMA:
        values -= repeat_blocks(tl.load(minima + at, mask=is_block, other=0.0).to(tl.float32), BN, BLOCKS, 32)
    tl.store(out + row_of[:, None] * K + inputs[None, :], values.to(out.dtype.element_ty), mask=(rows < N)[:, None] & (inputs < K)[None, :])


@dataclass(frozen=True, slots=True)
class Plan:
    """Tile sizes of one GEMM: `rows`, `outputs` and `inputs` of a tile, pipelined loads
    `stages`, programs per output tile that share its inputs (`split`), and warps per program."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    split: int = 1
    warps: int = 4


MAX_FUSED_ROWS = 64  # above this, dequantizing the whole weight once costs less than in each tile of rows


def choose_plan(rows: int, weight: CanonicalWeight, processors: int) -> Plan:
    """The plan for `rows` rows of the weight, or of each expert, on a device with `processors`
    multiprocessors. Measured on an H200."""
    group = weight.scheme.group[1]
    step = 64 if group and group % 128 and group % 64 == 0 else 128
    if INTERPRETED:
        return Plan(16, 32, min(step, 64), 1, split=2 if weight.columns >= 256 else 1)
    if rows > 64:
        return Plan(128, 128, step if step == 64 else 64 if group % 64 == 0 else 128, 4, warps=8)
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64
    bn = 64 if rows <= 16 else 128
    tiles = -(-weight.outputs // bn)
    programs_aimed = (4 if bn == 64 else 1.5) * processors  # programs: many small tiles hide the latency of loads
    maximum = max(1, min(weight.columns // step // 2, weight.columns // (16 * rows), 8))
    split = 1
    while split * 2 <= maximum and split * tiles < programs_aimed:
        split *= 2
    return Plan(bm, bn, step, 3, split)


def choose_grouped_plan(rows: int, weight: CanonicalWeight) -> Plan:
    """The plan for experts with `rows` rows each on average. Experts fill the device without
    split-K."""
    plan = choose_plan(rows, weight, 1)
    return replace(plan, split=1)


def multiply(
    x: torch.Tensor, weight: CanonicalWeight, bias: torch.Tensor | None, plan: Plan, counter: torch.Tensor, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, columns], inputs contiguous and in the weight's order, times the weight -> [rows,
    outputs].

    `counter` int32 [output tiles * row tiles] is zero before and after the call; unused without
    split-K. `ends` int32 [experts]: the weight has experts, and the rows of expert e end before
    ends[e]; rows after the last end have no result.
    """
    rows, experts = len(x), 0 if ends is None else len(weight.quantized)
    outputs, inner = weight.outputs, weight.columns
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    scales = weight.scales
    assert scales is not None
    row_tiles = -(-rows // plan.rows) if ends is None else min(rows, -(-rows // plan.rows) + experts)
    partial = torch.empty(plan.split * rows * outputs, dtype=torch.float32, device=x.device) if plan.split > 1 else scales
    weight_only_kernel[(-(-outputs // plan.outputs), plan.split, row_tiles)](
        x, weight.quantized, scales, scales if weight.zeros is None else weight.zeros, scales if weight.outer is None else weight.outer,
        scales if bias is None else bias, scales if ends is None else ends, out, partial, counter, rows, outputs, inner,
        x.stride(0), weight.quantized.shape[-1], scales.shape[-1],
        QUANT_TYPE=weight.scheme.quant_type, BM=plan.rows, BN=plan.outputs, BK=plan.inputs, SPLIT=plan.split,
        GROUP_N=weight.scheme.group[0], GROUP_K=weight.scheme.group[1], HAS_ZEROS=weight.zeros is not None, OUTER=_outer(weight),
        HAS_BIAS=bias is not None, EVEN_N=outputs % plan.outputs == 0, EVEN_K=inner % plan.inputs == 0,
        EXPERTS=experts, EXPERT_LANES=triton.next_power_of_2(max(1, experts)), dtype=TYPES[x.dtype],
        PORTABLE=INTERPRETED, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out


def dequantize(weight: CanonicalWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [outputs, columns], in its order."""
    scales = weight.scales
    assert scales is not None
    out = torch.empty(weight.outputs, weight.columns, dtype=dtype, device=scales.device)
    bn, bk = 32, 128
    dequantize_kernel[(-(-weight.outputs // bn), -(-weight.columns // bk))](
        weight.quantized, scales, scales if weight.zeros is None else weight.zeros, scales if weight.outer is None else weight.outer,
        scales if weight.minima is None else weight.minima, out,
        weight.outputs, weight.columns, weight.quantized.shape[-1], scales.shape[-1], QUANT_TYPE=weight.scheme.quant_type, BN=bn, BK=bk,
        GROUP_N=weight.scheme.group[0], GROUP_K=weight.scheme.group[1], HAS_ZEROS=weight.zeros is not None, OUTER=_outer(weight),
        HAS_MINIMA=weight.minima is not None, num_warps=4,
    )  # fmt: skip
    return out


def find_obstacle(weight: CanonicalWeight) -> str | None:
    """Why the kernel does not multiply this weight; None: it does."""
    rows, group = weight.scheme.group
    if weight.quantized.dim() > 2 and len(weight.quantized) > _MAX_EXPERTS:
        return f"it takes at most {_MAX_EXPERTS} experts"
    if weight.minima is not None and (weight.quantized.dim() > 2 or group % 32 or rows != 1 or weight.order is not None):
        return "it takes minima for groups of multiples of 32 inputs of one matrix, in their order"
    is_packed = weight.scheme.quant_type in NIBBLES
    if not rows or (group and group % 32 and not (group == 16 and is_packed)):
        return f"it takes scales for all inputs or for multiples of 32, not for {group}"
    return None


def _outer(weight: CanonicalWeight) -> int:
    return 0 if weight.outer is None else 2 if weight.divides else 1


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
