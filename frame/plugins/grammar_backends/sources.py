"""Checks the source of a grammar, which comes from a client, before a library reads it. Knows no
library."""

from __future__ import annotations

import json

from frame.plugins.grammar_backends.references import check_references

JSON_KINDS = ("json_schema", "structural_tag")


def check_source(kind: str, source: str, max_chars: int, max_depth: int, pointers_only: bool = False) -> None:
    """Raise ValueError, one sentence, for a source that is too long or too deep, that is not JSON
    where it must be, or whose references cannot be resolved. `pointers_only`: see
    `check_references`."""
    if len(source) > max_chars:
        raise ValueError(f"{kind} has {len(source)} characters; the limit is {max_chars}")
    if "\0" in source:
        raise ValueError(f"{kind} contains a NUL character; remove it")
    if kind not in JSON_KINDS:
        return
    _check_depth(kind, source, max_depth)
    try:
        parsed = json.loads(source)
    except ValueError as error:
        raise ValueError(f"{kind} is not JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise ValueError(f"{kind} must be a JSON object")
    check_references(kind, parsed, pointers_only)


def _check_depth(kind: str, source: str, limit: int) -> None:
    depth, is_string, is_escaped = 0, False, False
    for char in source:
        if is_escaped:
            is_escaped = False
        elif is_string:
            is_escaped, is_string = char == "\\", char != '"'
        elif char in "{[":
            depth += 1
            if depth > limit:
                raise ValueError(f"{kind} is nested deeper than {limit} levels")
        else:
            is_string = char == '"'
            depth -= char in "}]"


def one_sentence(kind: str, reason: str, max_length: int = 200) -> str:
    """The library's own message about a grammar, on one line."""
    return f"{kind} does not compile: {' '.join(reason.split())[:max_length]}"
