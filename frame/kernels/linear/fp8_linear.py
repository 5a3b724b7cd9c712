# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Skinny fp8 and int8 GEMM: up to 64 quantized rows times weights, bound by reading the weights.

Weights are e4m3 [N, K] with one scale per output ([N]) or per block ([N / rows, K / columns]), or
int8 with one scale per output; rows are quantized by `fp8_quantize`. int8 GEMMs are summed in
int32. Depends on no layer and no checkpoint format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from frame.kernels import INTERPRETED

MAX_ROWS = 64
_OTHER_SHARED = 2048  # bytes of shared memory per program besides the tiles


@triton.jit
def prefetch_weights(w, first, stride, K, ROWS: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr):
    """Prefetch the first PREFETCH weights of ROWS outputs into L2 (cp.async.bulk.prefetch)."""
    CHUNK: tl.constexpr = ROWS * PREFETCH // THREADS
    PER_ROW: tl.constexpr = PREFETCH // CHUNK
    places = tl.arange(0, THREADS)
    columns = tl.minimum((places % PER_ROW) * CHUNK, K - CHUNK)
    pointers = w + (first + places // PER_ROW).to(tl.int64) * stride + columns
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full([THREADS], CHUNK, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_weights(pointers, columns, K, EVEN_K: tl.constexpr, UPCAST: tl.constexpr):
    """[BN, BK] of the weights, marked to leave the caches first: each weight is read once."""
    if EVEN_K:
        weights = tl.load(pointers, eviction_policy="evict_first")
    else:
        weights = tl.load(pointers, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    if UPCAST:
        weights = weights.to(tl.float32)
    return weights


@triton.jit
def load_weight_scale(w_scale, first, rows, stride, k, BN: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr):
    """The scale of a tile of weights: one number, or one per output as a column."""
    if GROUP_N % BN == 0:
        return tl.load(w_scale + (first // GROUP_N) * stride + k // GROUP_K)
    else:  # an else branch: Triton compiles one of both, and each has its own type
        return tl.load(w_scale + (rows // GROUP_N) * stride + k // GROUP_K)[:, None]


@triton.jit
def silu_mul_rounded(gate, up, dtype: tl.constexpr):
    """SiLU(gate) * up, rounded where separate layers would round."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["M", "x_scale_stride"])
def skinny_fp8_kernel(
    x, x_scale, w, w_scale, bias, out, partial, counter, M, N, K, x_scale_stride, w_scale_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PREFETCH: tl.constexpr,
    GATED: tl.constexpr,  # the weight has 2 * N outputs, gate then up; the result is SiLU(gate) * up
    # outputs and inputs per weight scale; GROUP_K 0: all inputs, and one scale per row of x
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, UPCAST: tl.constexpr,
    num_warps: tl.constexpr, num_stages: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k x[m, k] * x_scale[m, k] * w[n, k] * w_scale[n, k] (+ bias[n]). Grid:
    (output tiles, SPLIT).

    The weights are the left MMA operand, so that few rows fill the short side. Where output tiles
    do not fill the device, K is split over SPLIT programs (split-K), and the last one to arrive
    sums the partial results in a fixed order. Weights, which no step writes, are prefetched to L2
    before the PDL wait.
    """
    PIECES: tl.constexpr = 2 if GATED else 1
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = tile * BN
    rows = first + tl.arange(0, BN)
    row_of = rows if EVEN_N else tl.minimum(rows, N - 1)
    batch = tl.arange(0, BM)
    is_row = batch < M  # rows past M are masked: all programs would request the same bytes at once
    columns = tl.arange(0, BK)
    steps = tl.cdiv(K, BK)
    start = (steps * split // SPLIT) * BK
    stop = (steps * (split + 1) // SPLIT) * BK
    w_pointers = w + row_of.to(tl.int64)[:, None] * K + columns[None, :]
    up_pointers = w_pointers + N.to(tl.int64) * K
    x_pointers = x + batch[None, :] * K + columns[:, None]
    IS_INTEGER: tl.constexpr = w.dtype.element_ty == tl.int8
    total = tl.zeros([BN, BM], tl.int32 if IS_INTEGER else tl.float32)
    total_up = total
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch_weights(w + start, first, K, K - start, BN, PREFETCH, num_warps * 32)
        tl.extra.cuda.gdc_wait()
    for k in tl.range(start, stop, BK, num_stages=num_stages):
        weights = load_weights(w_pointers + k, k + columns, K, EVEN_K, UPCAST)
        if EVEN_K:
            inputs = tl.load(x_pointers + k, mask=is_row[None, :], other=0.0)
        else:
            inputs = tl.load(x_pointers + k, mask=(k + columns < K)[:, None] & is_row[None, :], other=0.0)
        if UPCAST:
            inputs = inputs.to(tl.float32)
        # summed outside the MMA: the fp8 accumulator of the tensor cores has too few bits
        dots = tl.dot(weights, inputs)
        if GATED:
            up_dots = tl.dot(load_weights(up_pointers + k, k + columns, K, EVEN_K, UPCAST), inputs)
        if GROUP_K > 0:
            factors = tl.load(x_scale + (k // GROUP_K) * x_scale_stride + batch, mask=is_row, other=0.0)[None, :]
            dots *= factors * load_weight_scale(w_scale, first, row_of, w_scale_stride, k, BN, GROUP_N, GROUP_K)
            if GATED:
                up_dots *= factors * load_weight_scale(w_scale, first + N, row_of + N, w_scale_stride, k, BN, GROUP_N, GROUP_K)
        total += dots
        if GATED:
            total_up += up_dots
    if GROUP_K == 0:
        factors = tl.load(x_scale + batch, mask=is_row, other=0.0)[None, :]
        total = total.to(tl.float32) * (tl.load(w_scale + row_of)[:, None] * factors)
        if GATED:
            total_up = total_up.to(tl.float32) * (tl.load(w_scale + N + row_of)[:, None] * factors)
        else:
            total_up = total  # of one type in both branches below
    size = M.to(tl.int64) * N
    places = batch[None, :].to(tl.int64) * N + rows[:, None]
    mask = is_row[None, :] & (rows < N)[:, None]
    is_last = True
    if SPLIT > 1:
        tl.store(partial + split * PIECES * size + places, total, mask=mask)
        if GATED:
            tl.store(partial + (split * PIECES + 1) * size + places, total_up, mask=mask)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter + tile, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        if SPLIT > 1:
            total = tl.zeros([BN, BM], tl.float32)
            total_up = total
            for other in tl.static_range(SPLIT):
                total += tl.load(partial + other * PIECES * size + places, mask=mask, other=0.0, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(partial + (other * PIECES + 1) * size + places, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counter + tile, 0)
        if HAS_BIAS:
            total += tl.load(bias + row_of).to(tl.float32)[:, None]
            if GATED:
                total_up += tl.load(bias + N + row_of).to(tl.float32)[:, None]
        if GATED:
            total = silu_mul_rounded(total, total_up, out.dtype.element_ty)
        tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Plan:
    """Tile sizes of one GEMM of few rows.

    `outputs`, `inputs`: sizes of a weight tile. `stages`: pipelined tile loads. `split`: programs
    that share the inputs of an output tile (split-K). `prefetch`: weights of each output that are
    prefetched to L2 before the PDL wait. `warps`: warps per program.
    """

    outputs: int
    inputs: int
    stages: int
    split: int = 1
    prefetch: int = 512
    warps: int = 4

    def fit_shared_memory(self, shared_memory: int, pieces: int = 1) -> Plan:
        """The plan with as many stages as fit into `shared_memory` bytes. `pieces`: weight tiles
        that a program holds."""
        stage = (self.outputs * pieces + MAX_ROWS) * self.inputs
        return replace(self, stages=max(1, min(self.stages, (shared_memory - _OTHER_SHARED) // stage)))


def choose_plan(rows: int, outputs: int, inputs: int, columns: int) -> Plan:
    """The plan for `rows` (1 … 64) times weights [outputs, inputs] with one scale per `columns`
    inputs (0: one scale per output).

    The thresholds are the fastest measured on an H200 for the GEMMs of Llama 3.1 8B and, up to
    16 rows, of Qwen3 14B (docs/performance.md).
    """
    if INTERPRETED:
        return Plan(32, 64, 1, split=2 if inputs >= 256 else 1)
    step = 128 if columns or inputs % 256 else 256
    tiles, maximum = -(-outputs // 64), _max_split(rows, inputs, step)
    if tiles >= 256:  # enough tiles to fill the device without split-K
        if rows <= 16:
            return Plan(64, step, 8 if step == 128 else 4, prefetch=512 if step == 128 else 0)
        if columns:
            return Plan(128, step, 4, prefetch=256)
        return Plan(64, 256, 4) if rows <= 32 and step == 256 else Plan(64, 128, 6)
    if rows > 32 and not columns:
        return Plan(64, step, 4, split=min(maximum, max(1, 128 // tiles)))
    split = min(maximum, 8 if tiles <= 32 else 4 if tiles <= 128 else 2)
    if step == 128:
        return Plan(64, step, 8 if rows <= 16 and tiles <= 64 else 6, split)
    if rows <= 16 and 96 < tiles <= 128:
        return Plan(64, step, 4, min(maximum, 2))
    if rows <= 16 and 64 < tiles <= 96 and inputs >= 8192:
        return Plan(64, step, 4, min(maximum, 3))
    return Plan(64, step, 4 if tiles <= 64 else 3, split)


def choose_gated_plan(rows: int, outputs: int, inputs: int, columns: int) -> Plan:
    """The plan for a gated GEMM, in which a program multiplies two weight tiles (gate and up).
    Measured on an H200 for Llama 3.1 8B and Qwen3 0.6B and 14B."""
    if INTERPRETED:
        return choose_plan(rows, outputs, inputs, columns)
    tiles = -(-outputs // 128)
    split = 1 if tiles > 32 else min(_max_split(rows, inputs, 128), 4)
    if columns or inputs % 256 or rows > 32:
        return Plan(64, 128, 5 if rows <= 16 else 4, split)
    return Plan(64, 256, 4, split, prefetch=0 if tiles >= 128 else 512)


def _max_split(rows: int, inputs: int, step: int) -> int:
    """The most programs that may share an output tile: each has two steps or more, and the partial
    sums cost at most half of the bytes of the weights."""
    return max(1, min(inputs // step // 2, inputs // (16 * rows)))


def skinny_fp8_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None,
    plan: Plan,
    counter: torch.Tensor,
    *,
    rows: int,
    dtype: torch.dtype,
    gated: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """The first `rows` (at most 64) rows of x, e4m3 [P, K], times e4m3 weights [N, K], plus bias
    [N] -> [rows, N] in `dtype`; or both int8 with scales per row and output.

    `block`: outputs and inputs per weight scale. With 0 inputs, w_scale is float32 [N] and x_scale
    [P, 1]; otherwise w_scale is [N / outputs, K / inputs] and x_scale [P, K / inputs] with
    stride(0) 1, and `plan.inputs` divides the block's inputs. `gated`: SiLU(first half) * second
    half, [rows, N / 2]; a half is whole blocks. `counter` int32 [output tiles] is zero before and
    after the call. `pdl`: launch with PDL (`frame.kernels.supports_pdl`).
    """
    outputs, inner = weight.shape
    pieces = 2 if gated else 1
    outputs //= pieces
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    partial = torch.empty(plan.split * pieces * rows * outputs, dtype=torch.float32, device=x.device) if plan.split > 1 else x_scale
    is_even = outputs % plan.outputs == 0
    skinny_fp8_kernel[(-(-outputs // plan.outputs), plan.split)](
        x, x_scale, weight, w_scale, w_scale if bias is None else bias, out, partial, counter, rows, outputs, inner,
        x_scale.stride(1), w_scale.stride(0),
        BM=16 if rows <= 16 else 32 if rows <= 32 else 64, BN=plan.outputs, BK=plan.inputs, SPLIT=plan.split,
        PREFETCH=plan.prefetch if is_even and inner % plan.inputs == 0 and inner // plan.split >= 2 * plan.prefetch else 0, GATED=gated,
        GROUP_N=block[0], GROUP_K=block[1], HAS_BIAS=bias is not None, EVEN_N=is_even, EVEN_K=inner % plan.inputs == 0,
        PDL=pdl, UPCAST=INTERPRETED and x.dtype != torch.int8, num_warps=plan.warps, num_stages=plan.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
