"""Sizes of the programs that multiply experts, by how many rows there are. Knows no tensor.

The tables were measured on an H200; `frame bench moe` measures what comes of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch of `experts_kernel`: BM rows, BN outputs (of gates and of ups each), BK inputs at a time. `swap`: the weights are the
    left side of the product; `tma`: they are read by the tensor memory accelerator; `half_blocks`: an expert's last block has half the
    rows if
    that is enough; `persistent`: programs stay for one block after the other (the second product, with `tma`); `use_gluon`: the kernels of
    `expert_prefill` instead, where they run, whose tiles are their own but for BM."""

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
        """The tile for these sizes of a product with `width` weights side by side: no larger than they are, and within the memory."""
        bk = max(16, min(self.bk * 2 // max(2, itemsize), _power(inputs)))
        bn = max(16, min(self.bn, _power(outputs)))
        room = shared_memory - (4 << 10)
        stages = min(self.stages, room // ((self.bm + bn * width) * bk * itemsize))
        if stages < 2 and bk > 16:
            return replace(self, bk=self.bk // 2).fit_shared_memory(outputs, inputs, itemsize, width, shared_memory, tma=tma)
        return replace(self, bk=bk, bn=bn, stages=max(1, stages), tma=tma)


@dataclass(frozen=True, slots=True)
class Vector:
    """One launch of a `vector` kernel; `places`: experts of a token at a time, on the way down."""

    bn: int
    bk: int
    warps: int
    places: int = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a batch is multiplied: gate and up first, down second, with the same BM."""

    first: Tile
    second: Tile


VECTORS = (  # tokens, at most
    (1, Vector(2, 2048, 8), Vector(8, 256, 8, 8)),
    (6, Vector(2, 1024, 4), Vector(8, 256, 4, 4)),
)
MOST_SHARED = 0.32  # experts of the other tokens, of all: about twice the part of pairs whose expert is read already
TILES = (  # rows of an expert on average, at most
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
FLOAT8_TILES = (  # BN and BK of the first are those of the scales
    (10.0, Tiles(Tile(16, 128, 128, 4, 4, swap=True, tma=True), Tile(16, 128, 128, 4, 4, swap=True, tma=True))),
    (24.0, Tiles(Tile(32, 128, 128, 4, 4, swap=True, tma=True), Tile(32, 128, 128, 4, 4, swap=True, tma=True))),
    (200.0, Tiles(Tile(64, 128, 128, 8, 3, tma=True), Tile(64, 128, 128, 8, 3, tma=True))),
    (float("inf"), Tiles(Tile(128, 128, 128, 8, 3, tma=True), Tile(128, 128, 128, 8, 4, tma=True))),
)
ROUNDED_ROWS = 64  # BM up to which the first product rounds its own result; with more, that needs registers that the product is short of


def choose_vectors(tokens: int, top: int, experts: int) -> tuple[Vector, Vector] | None:
    """For a few tokens that hardly share experts, as each pair reads its expert by itself; None for others."""
    if (tokens - 1) * top > MOST_SHARED * experts:
        return None
    return next(((first, second) for limit, first, second in VECTORS if tokens <= limit), None)


def choose_tiles(pairs: int, experts: int, *, float8: bool = False) -> Tiles:
    """For that many (token, expert) pairs over that many experts."""
    return next(tiles for limit, tiles in (FLOAT8_TILES if float8 else TILES) if pairs / experts <= limit)


def list_token_thresholds(top: int, experts: int, chunks: tuple[int, ...], most: int) -> list[int]:
    """Numbers of tokens, up to `most`, that together take every form of every kernel: each limit of the tables, and one more."""
    limits = [limit for limit, *_ in VECTORS]
    limits.append(1 + int(MOST_SHARED * experts) // top)
    limits += [int(rows * experts) // top for table in (TILES, FLOAT8_TILES) for rows, _ in table[:-1]]
    limits += [chunk // top for chunk in chunks]
    return sorted({min(most, count) for limit in limits for count in (limit, limit + 1) if limit > 0})


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
