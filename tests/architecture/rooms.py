"""The graph of rooms: folders and single modules directly below a folder of frame, and the imports
between them. Imports inside functions and for the type checker count.

Used by test_rooms.py and by scripts/draw_rooms.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

import frame
from tests.architecture.source import Module

Edges = dict[tuple[str, str], list[str]]  # (room, room that it imports) -> the imports, as `path:line: target`

PUBLIC = {f"frame.{name}": f"{module}.{name}" for name, module in vars(frame)["_MODULES"].items()}


def room_of(name: str, folder: str) -> str | None:
    """The room of `folder` that a module or a name in it belongs to; None for the folder itself and
    for modules outside of it. `from frame import X` belongs to the room that defines X."""
    name = PUBLIC.get(name, name)
    return name[len(folder) + 1 :].partition(".")[0] if name.startswith(f"{folder}.") else None


def find_rooms(modules: Iterable[Module], folder: str) -> set[str]:
    return {room for found in modules if (room := room_of(found.name, folder)) is not None}


def find_edges(modules: Collection[Module], folder: str) -> Edges:
    """The imports between the rooms of `folder`."""
    rooms, edges = find_rooms(modules, folder), Edges()
    for each in modules:
        room = room_of(each.name, folder)
        for use in each.imports if room is not None else ():
            other = room_of(use.target, folder)
            if room is not None and other in rooms and other != room:
                edges.setdefault((room, other), []).append(f"{each.at(use.line)}: {use.target}")
    return edges


def find_cycles(edges: Edges) -> list[list[str]]:
    """The shortest cycle through each room that is part of one, each cycle once; it ends with the
    room that it starts with."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted({room for room, _ in edges}):
        cycle = _shortest_cycle(start, edges)
        if cycle:
            found.setdefault(frozenset(cycle), cycle)
    return list(found.values())


def _shortest_cycle(start: str, edges: Edges) -> list[str]:
    paths, seen = [[start]], {start}
    while paths:
        path = paths.pop(0)
        for other in sorted(target for room, target in edges if room == path[-1]):
            if other == start:
                return [*path, start]
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return []


def describe(cycle: list[str], edges: Edges) -> str:
    """The cycle with the imports that make it."""
    lines = [" -> ".join(cycle)]
    for pair in pairwise(cycle):
        lines += [f"  {pair[0]} -> {pair[1]}  {where}" for where in edges[pair]]
    return "\n".join(lines)
