"""Checks of each byte of the blocks of KV cache tiers: blocks of other sizes than powers of two,
and large blocks of which one byte is changed. Used by the suite of the kind. Must not know a plugin
by name."""

from __future__ import annotations

import torch

from frame.testing.conformance import SkipCheck
from frame.testing.kv_tier.place_checks import find_files
from frame.testing.kv_tier.rig import Make, Rig, change_blocks, make_block, make_keys

SIZES = (8, 24, 104, 4104)  # multiples of 8, and of no larger power of two
LARGE = (1 << 16, 4104)  # bytes of a block


def check_blocks_of_other_sizes(make: Make) -> None:
    """Blocks are as long as the model's pages need them, and each of their bytes counts."""
    for size in SIZES:
        rig, keys = make(block_bytes=size, identity=f"blocks of {size}"), make_keys(6, f"{size}-")
        rig.store(keys)
        rig.load_all(keys)
        for key in keys[::-1]:
            rig.load_all([key])
        rig.tier.close()
        if rig.is_persistent and rig.has_quota:
            after = make(block_bytes=size, identity=f"blocks of {size}")
            after.wait_until(lambda after=after, keys=keys: after.tier.match(keys) == len(keys), "stored blocks are lost")  # type: ignore[misc]
            after.load_all(keys)
            after.tier.close()


def check_each_byte_of_a_file_counts(make: Make) -> None:
    """The first, a middle or the last byte of a stored block is changed in its file."""
    for size in LARGE:
        rig = make(block_bytes=size, identity=f"files of {size}")
        rig.require_persistence()
        for place in (0, size // 2, size - 1):
            keys = make_keys(2, f"{size} {place}-")
            rig.store(keys)
            if not (files := find_files(rig)):
                raise SkipCheck("the tier has no files in its folder")
            for path in files:
                data = bytearray(path.read_bytes())
                change_blocks(data, [make_block(key, size).tobytes() for key in keys], place)
                path.write_bytes(data)
            for key in keys:
                rig.load([key])  # compares what it returns


def check_each_byte_of_a_buffer_counts(make: Make) -> None:
    """Of a stored block the first, a middle or the last byte is changed in the buffer that was
    filled for its store, or in one of an earlier load."""
    for size in LARGE:
        rig = make(block_bytes=size, identity=f"buffers of {size}")
        for place in (0, size // 2, size - 1):
            keys = make_keys(2, f"{size} {place}-")
            job, buffers = rig.begin_store(keys)
            rig.tier.finish(job)
            rig.wait_for([job])
            load, loaded = rig.begin_load(keys[1:])
            rig.wait_for([load])
            rig.tier.finish(load)
            loaded[0][place] ^= 0x10
            if buffers[0] is not None:
                buffers[0][place] ^= 0x10
            for key in keys:
                rig.load([key])  # compares what it returns


def check_blocks_that_left_are_listed(make: Make) -> None:
    """Keys that were matched, and are not since their blocks were changed, are listed as removed,
    also those of which a load failed."""
    rig, keys = make(), make_keys(8)
    if rig.tier.list_removed() is None:
        raise SkipCheck("the tier does not list removed blocks")
    known: set[bytes] = set()
    for turn in range(6):
        job, buffers = rig.begin_store(keys)
        rig.tier.finish(job)
        rig.wait_for([job])
        known |= {*keys}
        _damage(rig, [buffer for buffer in buffers[turn % 2 :: 3] if buffer is not None], turn)
        rig.load(keys[turn:])
        for key in keys:
            rig.load([key])
        known -= {*(rig.tier.list_removed() or [])}
        held = {key for key in keys if rig.tier.match([key])}
        assert known >= held, f"{len(held - known)} blocks are listed as removed and held"
        assert known <= held, f"{len(known - held)} of 8 blocks failed, are not matched, and not listed as removed"


def _damage(rig: Rig, buffers: list[torch.Tensor], turn: int) -> None:
    """Change a byte of some blocks in the memory of their stores, and of one in its file."""
    for buffer in buffers:
        buffer[turn * 700] ^= 0x10
    files = find_files(rig) if rig.is_persistent and rig.has_quota else []
    for path in files[turn : turn + 1]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
