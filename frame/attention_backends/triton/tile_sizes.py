"""Sizes of launches: how many queries, keys and programs a kernel takes, from the shapes of a layer and the facts of a device.

The figures are what was fastest on an H200 (`frame bench attention`). Knows no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from frame.kernels.launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one launch."""

    queries: int  # BLOCK_QUERIES
    keys: int  # BLOCK_KEYS
    warps: int
    stages: int
    registers: int | None = None  # most of a thread

    def make_constants(self, group: int) -> dict[str, Any]:
        """What a kernel is compiled with for it, but for the warps; `group`: query heads that share keys."""
        return {
            "HEADS": min(group, self.queries),
            "BLOCK_QUERIES": self.queries,
            "BLOCK_KEYS": self.keys,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


def padded(width: int) -> int:
    """The tile width of `width` columns: a power of two that `tl.dot` takes."""
    return max(16, next_power_of_2(width))


def split_width(width: int) -> tuple[int, int]:
    """A width as a power of two and a rest, so that 192 costs 128 + 64 instead of 256."""
    if padded(width) == width or width < 32:
        return width, 0
    largest = next_power_of_2(width) // 2
    return largest, width - largest


def choose_tile(queries: int, columns: tuple[int, int, int], itemsize: int, shared_memory: int) -> Tile:
    """The first of the tile sizes, fastest first as measured on an H200, that fits the device's shared memory.

    `columns` are the padded widths of both key parts and of values that are loaded besides (0: they are the keys' first part).
    """
    key_bytes = sum(columns) * itemsize
    query_bytes = queries * (columns[0] + columns[1]) * itemsize
    warps = 8 if queries >= 64 and queries * max(columns) >= 128 * 128 else 4
    narrow = max(columns) <= 128
    for keys, stages in (*([(64, 3)] if narrow else []), (64, 2), (32, 2), (64, 1), (32, 1)):
        if query_bytes + stages * keys * key_bytes <= shared_memory:
            return Tile(queries, keys, warps, stages)
    return Tile(queries, 16, warps, 1)


def most_queries(columns: tuple[int, int, int], itemsize: int) -> int:
    """Of one tile. In float32 a product is three, of numbers split in two, and what is held for them is as much more."""
    if itemsize == 2:
        return 64
    return 32 if max(columns) <= 256 else 16


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What tile and split sizes depend on."""

    processors: int
    shared_memory: int  # bytes that one program may use

    @classmethod
    def of(cls, device: torch.device) -> DeviceLimits:
        if device.type != "cuda":
            return cls(processors=2, shared_memory=128 << 10)
        index = device.index if device.index is not None else torch.cuda.current_device()
        device_limits = triton.runtime.driver.active.utils.get_device_properties(index)
        return cls(processors=device_limits["multiprocessor_count"], shared_memory=device_limits["max_shared_mem"])


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """Sizes of one layer shape's decodes."""

    tile: Tile  # its queries are the heads that one program takes, padded
    tile_lanes: int  # rows times heads that read a shared prefix together
    tile_keys: int  # keys at once that they read
    programs: int  # a processor, about
    min_keys: int  # of one program; shorter runs spend more on their merge than they gain
    merge_separately: bool = False  # in a kernel of their own


def choose_extend(group: int, longest: int, columns: tuple[int, int, int], itemsize: int, shared_memory: int, gathers: bool) -> Tile:
    """Sizes for rows of at most `longest` queries; `gathers`: some keys are read from the cache, page by page."""
    wanted = next_power_of_2(longest * group)
    if gathers and wanted >= 128 and itemsize == 2 and max(columns) <= 128 and shared_memory >= 160 << 10:
        return Tile(128, 64, 8, 2, registers=128)  # half of the registers, so that two programs share a processor
    if columns[1] and not gathers and wanted >= 128 and itemsize == 2 and max(columns) <= 128 and shared_memory >= 176 << 10:
        return Tile(128, 64, 8, 3)  # keys in two parts, as those made of latents
    return choose_tile(max(16, min(most_queries(columns, itemsize), wanted)), columns, itemsize, shared_memory)


def choose_decode(group: int, columns: tuple[int, int, int], itemsize: int, shared_memory: int) -> DecodeSizes:
    """Sizes for `group` heads that share keys of these padded widths."""
    most = most_queries(columns, itemsize)
    queries = max(16, min(most, next_power_of_2(group)))
    tile = choose_tile(queries, columns, itemsize, shared_memory)
    value = columns[2] or columns[0]
    if value > 256:
        programs = 1
        if queries <= 32 and (queries + 3 * 32) * sum(columns) * itemsize <= shared_memory:
            tile, programs = Tile(queries, 32, 4, 3), 2
        return DecodeSizes(tile, 32, 32, programs, min_keys=128, merge_separately=True)
    return DecodeSizes(
        tile,
        tile_lanes=most,
        tile_keys=min(32, tile.keys),
        programs=3,
        min_keys=64,
    )
