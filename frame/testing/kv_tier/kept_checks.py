"""Checks of KV cache tiers whose blocks outlive the engine in memory of its context. Used by the
suite of the kind, for tiers whose record says `keeps`. Must not know a plugin by name."""

from __future__ import annotations

from frame.testing.kv_tier.rig import KeptBytes, Make, Rig, change_blocks, make_block, make_keys

NUM_CHANGES = 64  # bytes of the kept memory that are changed, one at a time


def _begin(make: Make, keys: list[bytes], num_blocks: int = 8) -> tuple[Rig, KeptBytes]:
    """A tier with kept memory that holds some blocks."""
    memory = KeptBytes()
    rig = make(num_blocks=num_blocks, kept=memory)
    rig.require_quota()
    if keys:
        rig.store(keys)
    return rig, memory


def check_kept_blocks_outlive_the_engine(make: Make) -> None:
    """An engine that is killed leaves the blocks that `poll` has returned, and no others."""
    keys = make_keys(6)
    first, memory = _begin(make, keys[:4])
    first.begin_store(keys[4:])  # filled, and not committed
    second = make(num_blocks=8, kept=memory.copy())
    assert second.count_held(keys) == 4, f"of 4 blocks that were stored, the next engine has {second.count_held(keys)}"
    second.load_all(keys[:4])
    second.store(more := make_keys(8, "more"))  # the room of the unfinished store too
    third = make(num_blocks=8, kept=second.kept.copy())
    assert not third.count_held(keys), "blocks that were evicted are there after a restart"
    third.load_all(more)
    third.store(keys[:4])
    assert third.tier.match(more[:4]) == 4 and not third.count_held(more[4:]), "after a restart others than the least recent are evicted"


def check_kept_memory_is_that_of_the_context(make: Make) -> None:
    first, _ = _begin(make, make_keys(8))
    first.load_all(make_keys(8))
    assert not first.num_bytes, f"the tier keeps its blocks in kept memory, and allocates {first.num_bytes} bytes for them as well"


def check_kept_blocks_are_served_to_their_model(make: Make) -> None:
    keys = make_keys(4)
    _, memory = _begin(make, keys)
    other = make(num_blocks=8, kept=memory.copy(), identity="other")
    assert not other.count_held(keys) or not other.load(keys), "blocks of another identity are served"
    other.store(keys)
    other.load_all(keys)
    again = make(num_blocks=8, kept=other.kept.copy(), identity="other")
    again.load_all(keys)


def check_kept_blocks_are_dropped_by_clear(make: Make) -> None:
    """They were computed by weights that the next engine has not."""
    keys = make_keys(6)
    first, _ = _begin(make, keys[:3])
    first.tier.clear()
    first.store(keys[3:])
    first.load_all(keys[3:])
    after = make(num_blocks=8, kept=first.kept.copy())
    assert not after.count_held(keys[:3]), "blocks that `clear` dropped are there after a restart"
    after.store(keys)
    after.load_all(keys)


def check_kept_memory_that_has_changed(make: Make) -> None:
    """A byte of it is changed: the tier starts, serves each block as it was stored or not at all,
    and stores new ones."""
    keys = make_keys(4)
    _, memory = _begin(make, keys, num_blocks=4)
    assert memory.bytes is not None, "the tier says that it keeps blocks, and does not ask for kept memory"
    size = len(memory.bytes)
    for number in range(NUM_CHANGES):
        changed = memory.copy()
        assert changed.bytes is not None
        changed.bytes[number * size // NUM_CHANGES + number % 7] ^= 0xFF
        if number >= NUM_CHANGES // 2:  # in the first bytes, where records may be
            changed.bytes[number] ^= 0xFF
        rig = make(num_blocks=4, kept=changed)
        for key in keys:
            if rig.tier.match([key]):
                rig.load([key])  # compares what it returns
        rig.store(more := make_keys(4, "more"))
        rig.load_all(more)
        rig.tier.close()


def check_each_byte_of_a_kept_block_counts(make: Make) -> None:
    """The first, a middle or the last byte of large blocks is changed in the kept memory."""
    size, keys = 1 << 16, make_keys(2)
    memory = KeptBytes()
    make(num_blocks=2, block_bytes=size, kept=memory).store(keys)
    for place in (0, size // 2, size - 1):
        changed = memory.copy()
        assert changed.bytes is not None, "the tier says that it keeps blocks, and does not ask for kept memory"
        change_blocks(changed.bytes, [make_block(key, size).tobytes() for key in keys], place)
        rig = make(num_blocks=2, block_bytes=size, kept=changed)
        for key in keys:
            if rig.tier.match([key]):
                rig.load([key])  # compares what it returns
        rig.tier.close()
