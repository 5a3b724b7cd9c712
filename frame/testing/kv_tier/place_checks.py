"""Checks of KV cache tiers with a place that outlives them: changed files, restarts, identities.
Used by the suite of the kind. Must not know a plugin by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from frame.testing.conformance import SkipCheck
from frame.testing.kv_tier.rig import NUM_BLOCKS, Make, Rig, make_keys


def check_files_that_have_changed_are_not_served(make: Make) -> None:
    """Bytes, lengths and names of the place's files are changed; a load compares contents."""
    rig, keys = make(), make_keys(6)
    rig.require_persistence()
    rig.store(keys)
    files = find_files(rig)
    if not files:
        raise SkipCheck("the tier has no files in its folder")
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[len(data) // 2] ^= 0x10
        elif number % 3 == 1:
            del data[len(data) // 2 :]
        else:
            data += bytes(8)
        path.write_bytes(data)
    assert sum(rig.load([key]) for key in keys) in (0, len(keys)), "files that have changed are served"
    rig.store(keys)
    rig.load_all(keys)
    files = find_files(rig)
    contents = [path.read_bytes() for path in files]
    for path, other in zip(files, (*contents[1:], contents[0]), strict=True):
        path.write_bytes(other)
    for key in keys:
        rig.load([key])
    rig.store(keys)
    rig.load_all(keys)


def find_files(rig: Rig) -> list[Path]:
    """Files of the tier's folder that may hold a block."""
    return [path for path in sorted(rig.folder.rglob("*")) if _count_bytes_of(path) >= rig.block_bytes]


def _count_bytes_of(path: Path) -> int:
    """0 for what is no file, or was deleted meanwhile by a thread of the tier."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def check_files_that_cannot_be_read(make: Make) -> None:
    """A file became a link to itself, or a folder: its load fails, and all other jobs end."""
    damages: tuple[Callable[[Path], None], ...] = (_make_loop, Path.mkdir)
    for number, damage in enumerate(damages):
        rig, keys = make(), make_keys(4, f"unreadable {number}-")
        rig.require_persistence()
        rig.store(keys)
        for path in find_files(rig):
            path.unlink()
            damage(path)
        for key in keys:  # more jobs than a tier has threads
            rig.load([key])
        more = make_keys(4, f"more {number}-")
        rig.store(more)
        rig.load_all(more)
        rig.tier.close()


def _make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def check_blocks_that_fail_are_listed_as_removed(make: Make) -> None:
    """A block that is not held any more since its load failed has left the tier."""
    rig, keys = make(), make_keys(8)
    rig.require_persistence()
    if rig.tier.list_removed() is None:
        raise SkipCheck("the tier does not list removed blocks")
    rig.store(keys)
    for number, path in enumerate(find_files(rig)[:6]):
        if number % 2:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: 40 * number])
    for key in keys:
        rig.load([key])
    removed, held = rig.tier.list_removed() or [], [key for key in keys if rig.tier.match([key])]
    assert sorted([*removed, *held]) == sorted(keys), f"of 8 blocks {len(held)} are held after failed loads, {len(removed)} are listed"


def check_clear_empties_the_folder(make: Make) -> None:
    """What is dropped takes no room any more: the quota is that of the folder."""
    rig = make()
    rig.require_persistence()
    for turn in range(3):
        keys = make_keys(NUM_BLOCKS // 2, f"weights {turn}-")
        rig.store(keys)
        rig.tier.clear()
    rig.wait_until(lambda: _count_bytes(rig) <= NUM_BLOCKS // 4 * rig.block_bytes, "`clear` leaves the files of blocks in the folder")


def _count_bytes(rig: Rig) -> int:
    return sum(map(_count_bytes_of, find_files(rig)))


def check_blocks_survive_a_restart(make: Make) -> None:
    rig, keys = make(), make_keys(6)
    rig.require_persistence()
    rig.store(keys)
    rig.tier.close()
    after = make()
    after.wait_until(lambda: after.tier.match(keys) == len(keys), "a persistent tier has lost its blocks")
    after.load_all(keys)


def check_the_quota_is_kept_over_restarts(make: Make) -> None:
    keys = make_keys(3 * NUM_BLOCKS)
    for start in range(0, len(keys), NUM_BLOCKS // 2):
        rig = make()
        rig.require_persistence()
        expected = min(start, NUM_BLOCKS)
        rig.wait_until(lambda rig=rig, expected=expected: rig.count_held(keys) == expected, f"{expected} blocks are not held")  # type: ignore[misc]
        for key in keys[start : start + NUM_BLOCKS // 2]:
            rig.store([key])
        assert rig.count_held(keys) <= NUM_BLOCKS, "the quota is forgotten at a restart"
        assert rig.tier.match(keys[start : start + NUM_BLOCKS // 2]) == NUM_BLOCKS // 2, "new blocks are evicted before old ones"
        rig.tier.close()


def check_other_identities_are_not_served(make: Make) -> None:
    one, keys = make(identity="one"), make_keys(4)
    one.require_persistence()
    one.store(keys)
    other = make(identity="other")
    other.store(make_keys(2, "other"))
    time.sleep(0.1)  # for an index that is read in the background
    job = other.next_job()
    buffers = other.tier.load(job, keys)
    if buffers is not None:
        assert other.wait_for([job])[job].num_blocks == 0, "blocks of another identity are served"
        other.tier.finish(job)
    one.load_all(keys)
