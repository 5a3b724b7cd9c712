"""What wrong grammar backends leave out of their sources; the mutants of the kind are in
`grammar_backend`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any


def leave_out(*words: str) -> Callable[[Any, str, str], str]:
    """A function that leaves keywords out of a schema."""

    def clean(form: Any, is_names: bool = False) -> Any:
        if isinstance(form, dict):
            kept = {name: value for name, value in form.items() if is_names or name not in words}
            return {name: clean(value, name in ("properties", "patternProperties", "$defs")) for name, value in kept.items()}
        return [clean(value) for value in form] if isinstance(form, list) else form

    def change(_: Any, kind: str, source: str) -> str:
        try:
            return json.dumps(clean(json.loads(source))) if kind == "json_schema" else source
        except ValueError:
            return source

    return change


def drop_flags(_: Any, kind: str, source: str) -> str:
    return re.sub(r"\(\?[a-z]+([:)])", lambda flag: "(?:" if flag[1] == ":" else "", source) if kind == "regex" else source


BUGS = (
    ("IgnoresRequired", "Ignores which properties are required.", leave_out("required")),
    ("IgnoresBounds", "Ignores the largest number, length and count.", leave_out("maximum", "maxLength", "maxItems")),
    ("IgnoresExclusiveBounds", "Ignores bounds that exclude their own value.", leave_out("exclusiveMinimum", "exclusiveMaximum")),
    ("IgnoresFormats", "Takes any text for a date or a time.", leave_out("format")),
    ("IgnoresFurtherProperties", "Takes properties of other names and types.", leave_out("additionalProperties")),
    ("IgnoresFlags", "Takes small letters alone where a flag of the expression allows all.", drop_flags),
    ("StripsExpressions", "Leaves out spaces at the ends of an expression.", lambda _, kind, source: source.strip()),
)
