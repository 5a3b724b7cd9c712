"""The picture of the rooms: rows, arrows that are left out, imports against the order."""

from __future__ import annotations

from scripts.draw_rooms import assign_levels, draw_folder, reduce


def test_a_room_stands_above_all_that_it_imports() -> None:
    down = {("b", "a"), ("d", "b"), ("d", "a"), ("d", "c")}
    assert assign_levels(("a", "b", "c", "d"), down) == {"a": 0, "b": 1, "c": 0, "d": 2}
    assert reduce(down) == down - {("d", "a")}


def test_an_import_against_the_order_is_marked() -> None:
    text, (width, height) = draw_folder("frame.core", ("a", "b"), [("b", "a"), ("a", "b")])
    assert text.count("<path") == 2 and text.count('<path class="up"') == 1
    assert "frame/core/" in text and width > 0 and height > 0
