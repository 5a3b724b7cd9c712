"""Selects the kernel and tile sizes for GEMMs of up to 64 rows, by the size of the weight.

The tables hold what was fastest in `benchmarks/skinny_linear.py` on an NVIDIA H200 (132
multiprocessors; figures in docs/performance.md), and a rule for sizes that were not measured. The
rule: either all programs run in one wave, or the last wave is nearly full, with enough weight bytes
in flight on each multiprocessor. Depends on no tensor and does not import Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_ROWS = 64
WIDE = 64  # outputs per program from which the warps of `tile` share one tile
_SMALL = 12 << 20  # weights (elements); larger weights and more rows use the kernels that go through shared memory
_TINY = 4 << 20  # the same limit for nine rows and more
_STREAMED = 8 << 20  # weights (elements) that `stream` takes at least; of gate and up, more than _SMALL
_FLOAT8_STREAMED = 17 << 20  # the same limit for float8
_FLOAT8_ROWS = 16  # that `stream` takes at most of float8; the sums of more rows spill from registers
_FEW = 2304  # outputs of small projections
_SHORT = 1024  # inputs
_LONG = 4096
_VOCABULARY = 1 << 16  # outputs
PROCESSORS = 132
_SLICES = 128  # slices of outputs: nearly the number of multiprocessors, and a divisor of most output sizes
_MAX_ROUNDS = 4
# bytes in flight per multiprocessor; the rest of shared memory is left to small kernels that
# overlap by PDL
_UNDER_WAY = 200 << 10
_SHARED = 197 << 10  # bytes of shared memory that the largest tiles take


@dataclass(frozen=True, slots=True)
class Plan:
    """How one GEMM is launched.

    `kernel`: `vector`, `fragment` and `tile` are in `linear.py`, `stream` in `linear_stream.py`.
    """

    kernel: Literal["vector", "fragment", "tile", "stream"]
    warps: int
    depth: int  # weight tiles in flight per program
    outputs: int = 16  # outputs per program
    # chunks of 32 inputs per warp and step (per program if it has 64 outputs or more); unused by
    # `vector`
    chunks: int = 4


def choose_plans(
    outputs: int, inner: int, gated: bool = False, shared_memory: int = _SHARED, streams: bool = False
) -> tuple[Plan | None, ...]:
    """The plan for each number of rows, 0 … MAX_ROWS; None where PyTorch's GEMM is as fast, or
    where the plan needs more shared memory than a program may use. `streams`: whether the device
    runs the `stream` kernel (`frame.kernels.supports_tma_streaming`)."""
    plans = [None, *(choose_plan(rows, outputs, inner, gated, streams) for rows in range(1, MAX_ROWS + 1))]
    return tuple(None if some and some.kernel == "tile" and shared_memory < _SHARED else some for some in plans)


def choose_plan(rows: int, outputs: int, inner: int, gated: bool = False, streams: bool = False) -> Plan | None:
    """The plan for `rows` rows; `outputs` counts gate and up together."""
    weights = outputs * inner
    stream = _stream(rows, outputs // 2 if gated else outputs, inner, gated) if streams else None
    if stream is not None:
        return stream
    if rows == 1:
        return _one_row(outputs, inner, gated)
    if rows == 2 and (outputs <= _FEW or (weights > _SMALL and inner > _SHORT)):
        return _two_rows(outputs, gated)
    if rows <= 8 and weights <= _SMALL:
        return _eight_rows(outputs, inner, gated)
    if rows <= 16 and weights <= _TINY and not gated:
        return Plan("fragment", 8, 4, chunks=2) if outputs <= _FEW else Plan("fragment", 4, 4, chunks=2)
    return _many_rows(rows, outputs, inner, gated) if rows <= MAX_ROWS else None


def _one_row(outputs: int, inner: int, gated: bool) -> Plan:
    if gated:
        return Plan("vector", 8 if inner >= _LONG and inner % 2048 == 0 else 4, 1, outputs=4)
    if outputs <= _FEW:
        return Plan("vector", 8, 1, outputs=8 if inner >= _LONG else 4)
    if outputs <= 4096 and inner > 2048:
        return Plan("vector", 2, 2, outputs=4)
    if inner > 8192:
        return Plan("vector", 8, 1, outputs=8)
    # with eight outputs per program, one program per multiprocessor would wait for a second wave
    if 6400 < outputs <= 7168:
        return Plan("vector", 4, 1, outputs=4)
    return Plan("vector", 4, 1, outputs=4 if outputs >= _VOCABULARY and inner >= _LONG else 8)


def _two_rows(outputs: int, gated: bool) -> Plan:
    if outputs <= _FEW:
        return Plan("vector", 8, 1, outputs=4)
    if gated or outputs <= 4096 or 5120 < outputs <= 7168:
        return Plan("vector", 4, 1, outputs=4)
    if outputs <= 5120:
        return Plan("vector", 4, 1, outputs=8)
    return Plan("vector", 2, 2, outputs=4)


def _eight_rows(outputs: int, inner: int, gated: bool) -> Plan:
    if gated:
        return Plan("fragment", 4, 2, chunks=2)
    if outputs <= _FEW:
        return Plan("fragment", 8, 4, chunks=2)
    if outputs > 4608 and inner <= _SHORT:
        return Plan("fragment", 4, 4, chunks=2)
    return Plan("fragment", 4, 2, chunks=4)


def _many_rows(rows: int, outputs: int, inner: int, gated: bool) -> Plan | None:
    wide = Plan("tile", 4, 4 if rows <= 32 else 3, outputs=64)
    if outputs >= _VOCABULARY and not gated:
        return wide
    if inner <= _SHORT:  # for more rows, a separate activation is faster
        return Plan("tile", 4, 4, outputs=64) if outputs >= _LONG and not (gated and rows > 32) else None
    if gated:
        return wide if _fills(blocks=outputs // 128) else None
    if outputs <= 32 * PROCESSORS and inner >= _LONG:  # one wave, two programs per multiprocessor
        return Plan("tile", 4, 4, outputs=16) if rows <= 16 else None
    if (outputs, inner) == (7168, 5120):
        return wide if rows <= 8 else None
    return None


def _stream(rows: int, outputs: int, inner: int, gated: bool) -> Plan | None:
    """The `stream` plan of 16-bit weights. `outputs` counts those of the result."""
    pieces = 2 if gated else 1
    if outputs * inner * pieces < (_SMALL + 1 if gated else _STREAMED):
        return None
    # e.g. Qwen3-14B: the `vector` kernel already reaches the memory bandwidth for one row
    if rows == 1 and (outputs % _SLICES or inner % 2048 or (_share(outputs // _SLICES) or 0) < 24):
        return None
    return _slice(rows, outputs, pieces, 2)


def choose_float8_stream(rows: int, outputs: int, inner: int, gated: bool = False) -> Plan | None:
    """The `stream` plan of float8 weights with one scale per output; None where the kernel of
    `fp8_linear` is faster. `outputs` counts gate and up together."""
    pieces = 2 if gated else 1
    if rows > _FLOAT8_ROWS or outputs * inner < _FLOAT8_STREAMED or outputs // pieces % _SLICES:
        return None
    return _slice(rows, outputs // pieces, pieces, 1)


def _slice(rows: int, outputs: int, pieces: int, size: int) -> Plan | None:
    """Equal slices of the outputs of a result, in one wave or in whole waves; `size`: bytes of a
    weight."""
    share = _share_unevenly(outputs) if outputs % _SLICES else _share(outputs // _SLICES)
    if share is None:
        return None
    warps = 4 if share <= 64 else 8
    # by 64 bytes; the MMA sums float8 with 14 bits, so it sums no more than 256 inputs
    chunks = 4 if size == 1 else 2 if warps == 8 else 4 if rows > 32 or pieces == 2 else 8
    boxes = pieces * share + max(8, 1 << (rows - 1).bit_length())  # rows of all boxes of one pipeline item
    beyond = (1 << (share - 1).bit_length()) if share > 64 else 64
    depth = (_UNDER_WAY - 128 * (beyond - share)) // (boxes * 64 * chunks)
    return Plan("stream", warps, min(16, depth), share, chunks * 2 // size)


def _share(outputs: int) -> int | None:
    """Outputs per slice: 16 to 64, or at least 32 in two to four waves, or up to 136 if at most
    three power-of-two boxes of 8 rows or more make it up."""
    for rounds in range(-(-outputs // 64), _MAX_ROUNDS + 1):
        if outputs % (8 * rounds) == 0 and outputs // rounds >= (16 if rounds == 1 else 32):
            return outputs // rounds
    return outputs if 64 < outputs <= 136 and outputs % 8 == 0 and outputs.bit_count() <= 3 else None


def _share_unevenly(outputs: int) -> int | None:
    """Outputs per slice, 16 to 64, for slices that nearly fill one wave of the multiprocessors."""
    counts = {share: outputs // share for share in range(16, 65, 8) if outputs % share == 0}
    return next((share for share, count in counts.items() if count <= PROCESSORS and _fills(count)), None)


def _fills(blocks: int) -> bool:
    """Whether the last wave is at least 80 % full, with one program per multiprocessor."""
    rounds = -(-blocks // PROCESSORS)
    return blocks >= 0.8 * rounds * PROCESSORS
