"""Tile sizes of the expert kernels, by the number of rows per expert. Depends on no tensor.

The tables hold what was fastest on an H200; `frame bench moe` measures the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch of `experts_kernel`.

    `bm`, `bn`, `bk`: rows, outputs (of gates and of ups each) and inputs of a tile. `swap`: the
    weights are the left MMA operand. `tma`: weights are loaded by TMA. `half_blocks`: an expert's
    last block computes half of the rows if that suffices. `persistent`: persistent programs (second
    GEMM, with `tma`). `use_gluon`: use the kernels of `expert_prefill` or `expert_prefill_fp8`
    where they run; of these sizes they use only `bm`.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False
    half_blocks: bool = False
    persistent: bool = False
    use_gluon: bool = False

    def fit_shared_memory(self, outputs: int, inputs: int, itemsize: int, width: int, shared_memory: int, *, tma: bool) -> Tile:
        """The tile for a GEMM with `width` concatenated weight matrices: no larger than the
        matrices, and within `shared_memory` bytes."""
        bk = max(16, min(self.bk * 2 // max(2, itemsize), _power(inputs)))
        bn = max(16, min(self.bn, _power(outputs)))
        room = shared_memory - (4 << 10)
        stages = min(self.stages, room // ((self.bm + bn * width) * bk * itemsize))
        if stages < 2 and bk > 16:
            return replace(self, bk=self.bk // 2).fit_shared_memory(outputs, inputs, itemsize, width, shared_memory, tma=tma)
        return replace(self, bk=bk, bn=bn, stages=max(1, stages), tma=tma)


@dataclass(frozen=True, slots=True)
class Vector:
    """One launch of a `vector` kernel. `places`: experts of a token that the down kernel loads at a
    time."""

    bn: int
    bk: int
    warps: int
    places: int = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of gate and up (`first`) and of down (`second`), with equal `bm`."""

    first: Tile
    second: Tile


VECTORS = (  # (tokens at most, tile of gate and up, tile of down)
    (1, Vector(2, 2048, 8), Vector(8, 256, 8, 8)),
    (6, Vector(2, 1024, 4), Vector(8, 256, 4, 4)),
)
# of all experts: how many the other tokens select, about twice the share of pairs whose expert is
# already read
MAX_SHARED = 0.32
TILES = (  # (rows per expert on average, at most; tiles)
    (8.0, Tiles(Tile(16, 64, 256, 4, 3, swap=True, tma=True), Tile(16, 64, 128, 4, 3, swap=True, tma=True))),
    (24.0, Tiles(Tile(32, 128, 128, 4, 3, swap=True, tma=True), Tile(32, 64, 128, 4, 3, swap=True, tma=True))),
    (48.0, Tiles(Tile(64, 128, 64, 4, 4, tma=True), Tile(64, 128, 64, 4, 4, tma=True))),
    (
        float("inf"),
        Tiles(
            Tile(128, 128, 64, 8, 4, tma=True, half_blocks=True, use_gluon=True),
            Tile(128, 256, 64, 8, 4, tma=True, persistent=True, use_gluon=True),
        ),
    ),
)
# for any number of rows, under `RankContext.deterministic`
FIXED_TILES = Tiles(Tile(64, 128, 64, 4, 4, tma=True), Tile(64, 128, 64, 4, 4, tma=True))
FLOAT8_TILES = (  # BN and BK of the first GEMM are the block of the scales
    (10.0, Tiles(Tile(16, 128, 128, 4, 3, swap=True, tma=True), Tile(16, 128, 128, 4, 3, swap=True, tma=True))),
    (24.0, Tiles(Tile(32, 128, 128, 4, 4, swap=True, tma=True), Tile(32, 128, 128, 4, 4, swap=True, tma=True))),
    (200.0, Tiles(Tile(64, 128, 128, 8, 3, tma=True), Tile(64, 128, 128, 8, 3, tma=True))),
    (float("inf"), Tiles(Tile(128, 128, 128, 8, 3, tma=True, use_gluon=True), Tile(128, 128, 128, 8, 4, tma=True, use_gluon=True))),
)
FLOAT8_PREFILL_TILES = (*FLOAT8_TILES[:2], FLOAT8_TILES[-1])  # where `expert_prefill_fp8` runs
ROUNDED_ROWS = 64  # `bm` up to which the first GEMM quantizes its own result; larger tiles lack registers for that


def choose_vectors(tokens: int, top: int, experts: int) -> tuple[Vector, Vector] | None:
    """Tiles of the `vector` kernels for a few tokens that hardly share experts, where each pair
    reads its expert separately; otherwise None."""
    if (tokens - 1) * top > MAX_SHARED * experts:
        return None
    return next(((first, second) for limit, first, second in VECTORS if tokens <= limit), None)


def choose_tiles(pairs: int, experts: int, *, float8: bool = False, prefill_fp8: bool = False) -> Tiles:
    """Tiles for `pairs` (token, expert) pairs over `experts` experts. `prefill_fp8`: the kernels of
    `expert_prefill_fp8` run with these weights."""
    table = FLOAT8_PREFILL_TILES if prefill_fp8 else FLOAT8_TILES if float8 else TILES
    return next(tiles for limit, tiles in table if pairs / experts <= limit)


def list_token_thresholds(top: int, experts: int, chunks: tuple[int, ...], maximum: int) -> list[int]:
    """Token counts, up to `maximum`, that together use every kernel variant: each limit of the
    tables, and one token more. Used to compile all variants at start-up."""
    limits = [limit for limit, *_ in VECTORS]
    limits.append(1 + int(MAX_SHARED * experts) // top)
    limits += [int(rows * experts) // top for table in (TILES, FLOAT8_TILES) for rows, _ in table[:-1]]
    limits += [chunk // top for chunk in chunks]
    return sorted({min(maximum, count) for limit in limits for count in (limit, limit + 1) if limit > 0})


def _power(size: int) -> int:
    """`size` rounded up to a power of two."""
    return 1 << (size - 1).bit_length()
