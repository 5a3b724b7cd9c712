"""Sizes of the programs that multiply experts, by how many rows there are. Knows no tensor.

The tables were measured on an H200 with `benchmarks/moe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch of `experts_kernel`: BM rows, BN outputs (of gates and of ups each), BK inputs at a time. `swap`: the weights are the
    left side of the product; `tma`: they are read by the tensor memory accelerator."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False

    def fitted(self, outputs: int, inputs: int, itemsize: int, width: int, shared_memory: int, *, tma: bool) -> Tile:
        """The tile for these sizes of a product with `width` weights side by side: no larger than they are, and within the memory."""
        bk = max(16, min(self.bk * 2 // itemsize, _power(inputs)))
        bn = max(16, min(self.bn, _power(outputs)))
        room = shared_memory - (4 << 10)
        stages = min(self.stages, room // ((self.bm + bn * width) * bk * itemsize))
        if stages < 2 and bk > 16:
            return replace(self, bk=self.bk // 2).fitted(outputs, inputs, itemsize, width, shared_memory, tma=tma)
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
    """How a batch is multiplied: gate and up first, down second. `sorts`: pairs are sorted before."""

    first: Tile
    second: Tile
    sorts: bool = True


VECTORS = Vector(4, 1024, 4), Vector(4, 256, 4, 4)
VECTOR_TOKENS = 2  # up to here each pair reads its expert by itself
FEW_PAIRS = 128  # up to here programs find their rows without a sort
FEW = Tiles(Tile(16, 64, 128, 4, 3, swap=True, tma=True), Tile(16, 64, 128, 4, 4, swap=True, tma=True), sorts=False)
BY_ROWS = (  # rows of an expert on average, at most
    (8.0, Tiles(Tile(16, 64, 128, 4, 3, swap=True, tma=True), Tile(16, 64, 128, 4, 4, swap=True, tma=True))),
    (24.0, Tiles(Tile(32, 64, 128, 4, 3, swap=True, tma=True), Tile(32, 64, 128, 4, 4, swap=True, tma=True))),
    (96.0, Tiles(Tile(64, 128, 64, 4, 4, swap=True, tma=True), Tile(64, 128, 64, 4, 4, swap=True, tma=True))),
    (float("inf"), Tiles(Tile(128, 128, 64, 8, 4, tma=True), Tile(128, 256, 64, 8, 4, tma=True))),
)


def choose_tiles(pairs: int, experts: int) -> Tiles:
    """For that many (token, expert) pairs over that many experts."""
    if pairs <= FEW_PAIRS:
        return FEW
    return next(tiles for limit, tiles in BY_ROWS if pairs / experts <= limit)


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
