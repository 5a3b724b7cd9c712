"""Keywords of JSON schemas, and the syntax of regular expressions, for the conformance suite of
grammar backends: a backend enforces them, or refuses the grammar. Must not know a backend.

Keywords that no backend enforces in all places, such as `uniqueItems` and `not`, are left out.
"""

from __future__ import annotations

import json
from typing import Any

from frame.testing.sampling.grammar_cases import Language
from frame.testing.sampling.grammar_run import Run, takes_text

_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
_NAMES, _PATTERNS = {"type": "object", "additionalProperties": _INTEGER}, {"type": "object", "patternProperties": {"^x[0-9]$": _INTEGER}}
CASES: tuple[tuple[str, str | dict[str, Any], tuple[Any, ...], tuple[Any, ...]], ...] = (  # name, source, allowed, forbidden
    ("bounds", {"type": "number", "minimum": 0.5, "maximum": 2.5}, (0.5, 1, 2.5), (0.25, 3, -1)),
    ("bounds", _INTEGER | {"minimum": -3, "maximum": 120}, (-3, 0, 7, 120), (-4, 121, 700)),
    ("exclusive bounds", _INTEGER | {"exclusiveMinimum": 3, "exclusiveMaximum": 7}, (4, 6), (3, 7, 2, 40)),
    ("multipleOf", _INTEGER | {"multipleOf": 5}, (0, 10, -5), (3, 12)),
    ("bounds of a length", _TEXT | {"minLength": 3, "maxLength": 4}, ("abc", "ab日本"), ("ab", "abcde", "日本", "")),
    ("pattern", _TEXT | {"pattern": "^[a-c]{2}-[0-9]$"}, ("ab-1", "cc-0"), ("ab-x", "abc-1", "xab-1", "")),
    ("the format date", _TEXT | {"format": "date"}, ("2024-02-28",), ("yesterday", "28.02.2024", "")),
    ("the format date-time", _TEXT | {"format": "date-time"}, ("2024-02-28T12:30:00Z",), ("yesterday at noon", "2024-02-28")),
    ("the format uuid", _TEXT | {"format": "uuid"}, ("123e4567-e89b-12d3-a456-426614174000",), ("123", "")),
    ("the format ipv4", _TEXT | {"format": "ipv4"}, ("10.0.0.1",), ("localhost", "")),
    ("patternProperties", _PATTERNS | {"additionalProperties": False}, ({"x1": 1}, {}), ({"y1": 1}, {"x1": "a"})),
    ("additionalProperties", _NAMES, ({"a": 1}, {}), ({"a": "b"}, {"a": 1, "b": None})),
    ("bounds of a number", _NAMES | {"minProperties": 1, "maxProperties": 2}, ({"a": 1}, {"a": 1, "b": 2}), ({}, {"a": 1, "b": 2, "c": 3})),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, ({"a": 1},), ({"A": 1}, {"ab": 1})),
    ("a flag", "(?i)yes", ("yes", "YES", "Yes"), ("no",)),
    ("a flag of a group", "(?i:y)es", ("yes", "Yes"), ("YES",)),
    ("spaces at the ends", " a ", (" a ",), ("a", " a", "a ")),
    ("anchors", "^ab$", ("ab",), ("abc", "xab")),
    ("escapes", r"\x41\u00e9\.[\d\-]+", ("Aé.1-2",), ("Aé.", "Aéx1", "Aé.a")),
)  # fmt: skip


def check_keywords_are_enforced_or_refused(run: Run) -> None:
    """Where a part of a grammar cannot be enforced, `compile` raises ValueError: a client that gets
    texts which it has excluded cannot know why."""
    for what, source, allowed, forbidden in CASES:
        is_schema = isinstance(source, dict)
        case = Language("json_schema" if is_schema else "regex", json.dumps(source) if is_schema else str(source))
        if case.kind not in run.kinds:
            continue
        try:
            run.backend.compile(case.kind, case.source)
        except ValueError:
            continue
        for value in (*allowed, *forbidden):
            pairs = ((",", ":"), (", ", ": ")) if is_schema else ()
            texts = [json.dumps(value, ensure_ascii=False, separators=pair) for pair in pairs] or [value]
            is_taken = any(takes_text(run, case, text) for text in texts)
            assert is_taken or value in forbidden, f"{case.name}: {value!r} is valid by {what}, and is refused"
            assert value in allowed or not is_taken, f"{case.name}: {value!r} is invalid by {what}, and is taken: enforce it, or refuse it"
