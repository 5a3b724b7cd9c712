"""Rows of the table: allotted in blocks, kept without readers, evicted in order of use."""

from __future__ import annotations

import pytest

from frame.media.row_table import RowTable


def test_an_item_keeps_its_rows_until_others_need_them() -> None:
    table = RowTable(40, block=8)
    first, second = (table.acquire(("", "image", name), 9) for name in (b"1", b"2"))
    assert not set(first.rows[:-1].tolist()) & set(second.rows[:-1].tolist())
    assert first.rows[-1] == -1
    assert table.num_available == 1
    for item in (first, second):
        item.is_encoded = True
        table.release(item)
    assert table.num_available == 5
    assert table.num_used_rows == 32
    assert table.acquire(("", "image", b"1"), 9) is first  # used again: the second one is older now
    table.release(first)
    table.acquire(("", "image", b"3"), 10)
    assert table.find_item(("", "image", b"1")) is first
    assert table.find_item(("", "image", b"2")) is None


def test_items_with_readers_are_not_evicted() -> None:
    table = RowTable(16, block=8)
    table.acquire(("", "image", b"1"), 8)
    table.acquire(("", "image", b"1"), 8)
    with pytest.raises(RuntimeError, match="2 blocks"):
        table.acquire(("", "image", b"2"), 16)


def test_nothing_is_valid_after_a_failed_step() -> None:
    table = RowTable(32, block=8)
    idle, read = table.acquire(("", "image", b"1"), 8), table.acquire(("", "image", b"2"), 8)
    idle.is_encoded = read.is_encoded = True
    table.release(idle)
    table.invalidate()
    assert table.find_item(idle.name) is None
    assert table.find_item(read.name) is read
    assert not read.is_encoded
    table.release(read)  # it was not encoded again: nothing to keep
    assert table.find_item(read.name) is None
    assert table.num_available == table.num_blocks == 4
    assert table.num_used_rows == 0
