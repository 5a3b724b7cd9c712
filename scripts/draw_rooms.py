"""Draws the rooms of frame, its core and its entry points from their imports, as one SVG.

`scripts/generate_docs.py` writes it to docs/reference/rooms.svg and checks it. A room stands above
all that it imports. An arrow is left out where a longer path says the same; an import against the
order is red.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Pair = tuple[str, str]  # (room, room that it imports)

CHAR, HEIGHT, GAP, ROW = 7, 24, 16, 60  # pixels: width of a character, height of a box, between boxes, from row to row
STYLE = (
    "text{font:12px monospace;fill:#222}rect{fill:#eef3fb;stroke:#456}"
    "path{fill:none;stroke:#789;marker-end:url(#a)}path.up{stroke:#c22;stroke-dasharray:4}"
)


def draw_rooms() -> str:
    """The SVG of all folders of the test."""
    from tests.architecture.rooms import find_edges
    from tests.architecture.source import package
    from tests.architecture.test_rooms import ORDER

    parts, width, top = [], 0, 0
    for folder, order in ORDER.items():
        part, size = draw_folder(folder, order, list(find_edges(package(), folder)))
        parts.append(f'<g transform="translate(0 {top})">{part}</g>')
        width, top = max(width, size[0]), top + size[1]
    marker = (
        '<marker id="a" orient="auto" markerWidth="7" markerHeight="7" refX="6" refY="3">'
        '<path d="M0 0L6 3L0 6" style="marker-end:none"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}">'
    background = f'<rect width="{width}" height="{top}" style="fill:#fff;stroke:none"/>'
    return "\n".join([f"{head}<style>{STYLE}</style><defs>{marker}</defs>{background}", *parts, "</svg>"]) + "\n"


def draw_folder(folder: str, order: Sequence[str], edges: Sequence[Pair]) -> tuple[str, tuple[int, int]]:
    """The picture of one folder, with its width and height."""
    down = {pair for pair in edges if order.index(pair[0]) > order.index(pair[1])}
    levels = assign_levels(order, down)
    num_rows = max(levels.values()) + 1
    boxes: dict[str, tuple[int, int, int]] = {}  # left, top, width
    rows = [[room for room in order if levels[room] == level] for level in range(num_rows)]
    widths = [sum(_width(room) + GAP for room in row) + GAP for row in rows]
    for level, row in enumerate(rows):
        left = GAP + (max(widths) - widths[level]) // 2
        for room in row:
            boxes[room] = (left, 40 + (num_rows - 1 - level) * ROW, _width(room))
            left += _width(room) + GAP
    lines = [f'<text x="{GAP}" y="24" style="font-weight:bold">{folder.replace(".", "/")}/</text>']
    lines += [_arrow(boxes[room], boxes[other], "") for room, other in sorted(reduce(down))]
    lines += [_arrow(boxes[room], boxes[other], ' class="up"') for room, other in sorted(set(edges) - down)]
    for room, (left, top, width) in boxes.items():
        box = f'<rect x="{left}" y="{top}" width="{width}" height="{HEIGHT}" rx="4"/>'
        lines.append(f'{box}<text x="{left + CHAR}" y="{top + 16}">{room}</text>')
    return "\n".join(lines), (max(widths) + GAP, 40 + num_rows * ROW)


def assign_levels(order: Sequence[str], down: set[Pair]) -> Mapping[str, int]:
    """The row of each room, from the bottom: one above the highest room that it imports."""
    levels: dict[str, int] = {}
    for room in order:
        levels[room] = max((levels[other] + 1 for source, other in down if source == room), default=0)
    return levels


def reduce(down: set[Pair]) -> set[Pair]:
    """The pairs that no longer path implies."""

    def reachable(start: str, seen: set[str]) -> set[str]:
        for room, other in down:
            if room == start and other not in seen:
                seen.add(other)
                reachable(other, seen)
        return seen

    below = {room: reachable(room, set()) for room, _ in down}
    return {(room, other) for room, other in down if not any(other in below.get(middle, ()) for source, middle in down if source == room)}


def _width(room: str) -> int:
    return CHAR * (len(room) + 2)


def _arrow(start: tuple[int, int, int], end: tuple[int, int, int], attributes: str) -> str:
    """From the lower edge of a box to the upper edge of one below it, or from upper to lower."""
    goes_down = start[1] < end[1]
    first, last = (start[1] + HEIGHT, end[1]) if goes_down else (start[1], end[1] + HEIGHT)
    return f'<path{attributes} d="M{start[0] + start[2] // 2} {first}L{end[0] + end[2] // 2} {last}"/>'
