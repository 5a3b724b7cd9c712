"""The policy of `fields` for the objects inside a body: unknown names are reported by their path,
and refused where they are close to a known name. `parse_body` applies it.

A name is compared once for each kind of object, so a long conversation costs one check of its keys
for each object. Must not know a route.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.fields import CLOSENESS, MAX_NAME, MAX_UNKNOWN, NEUTRAL


class Shape:
    """The fields of one kind of object. `names`: those that are known, in words. `nested`: field ->
    the shape of its value, an object or a list of objects. `unused`: known fields whose effect the
    server does not have; they are reported, and never taken for a spelling mistake."""

    __slots__ = ("names", "nested", "unused")

    def __init__(self, names: str, nested: Mapping[str, Shape] | None = None, unused: str = "") -> None:
        self.nested: dict[str, Shape] = dict(nested or {})
        self.names = frozenset([*names.split(), *self.nested])
        self.unused = frozenset(unused.split())


Place: TypeAlias = "tuple[Place | None, str | int]"  # (the object or list around it, the name or index in that)
Unknown = dict[tuple[int, str], tuple[Place, Shape]]  # (id of the shape, name) -> (the first place, the shape)


def check_nested(shapes: Mapping[str, Shape], body: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths of fields inside a body that are ignored, the first place of each. Raises ApiError
    400 for one that may not be ignored."""
    found: Unknown = {}
    for name, shape in shapes.items():
        if isinstance(value := body.get(name), dict | list):
            _search(shape, value, (None, name), found)
    if not found:
        return ()
    for (_, name), (place, shape) in found.items():
        if name in shape.unused or len(name) > MAX_NAME:
            continue
        if close := get_close_matches(name.lower(), shape.names, n=1, cutoff=CLOSENESS):
            path = f"{_write(place)}.{name}"
            raise ApiError(400, f"{path} is not a known field; did you mean {close[0]}?", path)
    return tuple(f"{_write(place)}.{name[:MAX_NAME]}" for (_, name), (place, _) in found.items())


def _search(shape: Shape, value: Any, place: Place, found: Unknown) -> None:
    """Add the unknown names in an object, or in the objects of a list. Raises ApiError 400 for too
    many."""
    if isinstance(value, list):
        for i, each in enumerate(value):
            if isinstance(each, dict | list) and each:
                _search(shape, each, (place, i), found)
        return
    for name, each in value.items():
        if name not in shape.names:
            if (id(shape), name) not in found and not _asks_for_nothing(shape, name, each):
                found[id(shape), name] = (place, shape)
                if len(found) > MAX_UNKNOWN:
                    _refuse_count(found.values(), name)
        elif each and isinstance(each, dict | list) and (inner := shape.nested.get(name)) is not None:
            _search(inner, each, (place, name), found)


def _asks_for_nothing(shape: Shape, name: str, value: Any) -> bool:
    return value is None or (name in shape.unused and (value in ("", False) or value in NEUTRAL.get(name, ())))


def _write(place: Place) -> str:
    around, part = place
    if around is None:
        return str(part)
    return _write(around) + (f"[{part}]" if isinstance(part, int) else f".{part}")


def _refuse_count(places: Iterable[tuple[Place, Shape]], name: str) -> None:
    place = _write(next(iter(places))[0])
    sentence = f"the objects in the body have more than {MAX_UNKNOWN} unknown fields, such as {name[:MAX_NAME]}; leave them out"
    raise ApiError(400, sentence, place)
