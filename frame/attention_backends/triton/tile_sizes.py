"""Tile sizes of the kernels: queries, keys and programs, by the shape of a layer and the limits of
a device.

The figures are the fastest measured on an H200 (`frame bench attention`). Depends on no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from frame.kernels import nvidia
from frame.kernels.launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one launch."""

    queries: int  # BLOCK_QUERIES
    keys: int  # BLOCK_KEYS
    warps: int
    stages: int
    registers: int | None = None  # registers per thread at most

    def make_constants(self, group: int) -> dict[str, Any]:
        """The constexpr arguments for this tile, except the number of warps. `group`: query heads
        per key head."""
        return {
            "HEADS": min(group, self.queries),
            "BLOCK_QUERIES": self.queries,
            "BLOCK_KEYS": self.keys,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


def pad_width(width: int) -> int:
    """The tile width for `width` columns: a power of two of at least 16, as `tl.dot` requires."""
    return max(16, next_power_of_2(width))


def split_width(width: int) -> tuple[int, int]:
    """A width as a power of two and a rest, so that 192 costs 128 + 64 instead of 256."""
    if pad_width(width) == width or width < 32:
        return width, 0
    largest = next_power_of_2(width) // 2
    return largest, width - largest


def choose_tile(queries: int, columns: tuple[int, int, int], itemsize: int, shared_memory: int) -> Tile:
    """The first of the tile sizes (fastest first, measured on an H200) that fits into the shared
    memory.

    `columns`: padded widths of both key pieces, and of values that are loaded separately (0: the
    values are the keys' first part).
    """
    key_bytes = sum(columns) * itemsize
    query_bytes = queries * (columns[0] + columns[1]) * itemsize
    warps = 8 if queries >= 64 and queries * max(columns) >= 128 * 128 else 4
    narrow = max(columns) <= 128
    for keys, stages in (*([(64, 3)] if narrow else []), (64, 2), (32, 2), (64, 1), (32, 1)):
        if query_bytes + stages * keys * key_bytes <= shared_memory:
            return Tile(queries, keys, warps, stages)
    return Tile(queries, 16, warps, 1)


def get_max_queries(columns: tuple[int, int, int], itemsize: int) -> int:
    """Queries per tile at most. float32 products are three TF32 products of split operands, which
    need registers for both halves."""
    if itemsize == 2:
        return 64
    return 32 if max(columns) <= 256 else 16


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a device on which tile and split sizes depend."""

    processors: int
    shared_memory: int  # bytes per program
    memory: int = 1 << 40  # bytes of the device

    @classmethod
    def from_device(cls, device: torch.device) -> DeviceLimits:
        if device.type != "cuda":
            return cls(processors=2, shared_memory=128 << 10)
        device_limits = triton.runtime.driver.active.utils.get_device_properties(nvidia.get_index(device))
        return cls(device_limits["multiprocessor_count"], device_limits["max_shared_mem"], nvidia.count_memory(device))


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """Sizes for the decodes of one layer shape."""

    tile: Tile  # its queries are the padded heads of one program
    tile_lanes: int  # rows times heads that read a shared prefix together
    tile_keys: int  # keys per step of a shared prefix
    programs: int  # programs per multiprocessor, about
    min_keys: int  # keys per program at least; shorter runs cost more in the merge than they gain
    merge_separately: bool = False  # merge in a separate kernel


def choose_extend(group: int, max_length: int, columns: tuple[int, int, int], itemsize: int, shared_memory: int, gathers: bool) -> Tile:
    """Sizes for rows of at most `max_length` queries. `gathers`: some keys are read from the cache,
    page by page."""
    queries_padded = next_power_of_2(max_length * group)
    if gathers and queries_padded >= 128 and itemsize == 2 and max(columns) <= 128 and shared_memory >= 160 << 10:
        return Tile(128, 64, 8, 2, registers=128)  # half of the registers, so that two programs share a multiprocessor
    if columns[1] and not gathers and queries_padded >= 128 and itemsize == 2 and max(columns) <= 128 and shared_memory >= 176 << 10:
        return Tile(128, 64, 8, 3)  # keys in two parts, as expanded latents have
    return choose_tile(max(16, min(get_max_queries(columns, itemsize), queries_padded)), columns, itemsize, shared_memory)


def choose_decode(group: int, columns: tuple[int, int, int], itemsize: int, shared_memory: int, cached_itemsize: int) -> DecodeSizes:
    """Sizes for `group` query heads per key head, with keys of these padded widths."""
    maximum = get_max_queries(columns, itemsize)
    queries = max(16, min(maximum, next_power_of_2(group)))
    tile = choose_tile(queries, columns, itemsize, shared_memory)
    value = columns[2] or columns[0]
    if value > 256:
        programs = 1
        if queries <= 32 and (queries + 3 * 32) * sum(columns) * itemsize <= shared_memory:
            tile, programs = Tile(queries, 32, 4, 3), 2
        return DecodeSizes(tile, 32, 32, programs, min_keys=128, merge_separately=True)
    programs = 3
    if queries == 16 and value <= 128 and itemsize == 2:  # registers of as many programs as shall share a multiprocessor
        programs = 4 if cached_itemsize == 1 else 3
        tile = replace(tile, registers=128 if cached_itemsize == 1 else 168)
    return DecodeSizes(tile, tile_lanes=maximum, tile_keys=min(32, tile.keys), programs=programs, min_keys=64)
