"""Checks the source of a grammar, which comes from a client, before a library reads it. Knows no
library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from frame.plugins.grammar_backends.references import check_references

JSON_KINDS = ("json_schema", "structural_tag")
# Expressions and grammars of EBNF in schemas and tags: names whose values are texts
_TEXTS = {"pattern": "regex", "whitespace_pattern": "regex", "grammar": "ebnf"}


class SourceError(ValueError):
    """No library needs to read this source."""


def check_source(kind: str, source: str, max_chars: int, max_depth: int, pointers_only: bool = False) -> None:
    """Raise SourceError, one sentence, for a source that is too long or too deep, that is not JSON
    where it must be, or whose references cannot be resolved. `pointers_only`: see
    `check_references`."""
    try:
        _check_source(kind, source, max_chars, max_depth, pointers_only)
    except ValueError as error:
        raise SourceError(str(error)) from None


def _check_source(kind: str, source: str, max_chars: int, max_depth: int, pointers_only: bool) -> None:
    if len(source) > max_chars:
        raise ValueError(f"{kind} has {len(source)} characters; the limit is {max_chars}")
    if "\0" in source:
        raise ValueError(f"{kind} contains a NUL character; remove it")
    if kind not in JSON_KINDS:
        if kind in ("regex", "ebnf"):
            _check_groups(kind, source, kind == "ebnf", max_depth)
        return
    _check_depth(kind, source, max_depth)
    try:
        parsed = json.loads(source)
    except ValueError as error:
        raise ValueError(f"{kind} is not JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise ValueError(f"{kind} must be a JSON object")
    for text, is_ebnf in _list_texts(parsed):
        _check_groups(kind, text, is_ebnf, max_depth)
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


def _list_texts(parsed: Any) -> Iterator[tuple[str, bool]]:
    """The expressions in a schema or tag, and its grammars of EBNF."""
    if isinstance(parsed, list):
        for each in parsed:
            yield from _list_texts(each)
    elif isinstance(parsed, dict):
        for name, value in parsed.items():
            if name in _TEXTS and isinstance(value, str):
                yield value, _TEXTS[name] == "ebnf"
            elif name == "patternProperties" and isinstance(value, dict):
                yield from ((pattern, False) for pattern in value)
            yield from _list_texts(value)


def _check_groups(kind: str, text: str, is_ebnf: bool, limit: int) -> None:
    """Libraries take time that grows fast with the depth of groups. A text, class or comment ends
    here no later than in a library, so that no group is missed."""
    depth, end, is_escaped = 0, "", False  # end: of the text, class or comment; empty outside
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\" and end != "\n":
            is_escaped = True
        elif end:
            if char == end or (char == "\n" and is_ebnf):
                end = ""
        elif char == "[":
            end = "]"
        elif is_ebnf and char in '"#':
            end = '"' if char == '"' else "\n"
        elif char == "(":
            depth += 1
            if depth > limit:
                raise ValueError(f"{kind} has groups nested deeper than {limit} levels; simplify it")
        elif char == ")":
            depth -= 1


def one_sentence(kind: str, reason: str, max_length: int = 200) -> str:
    """The library's own message about a grammar, on one line."""
    return f"{kind} does not compile: {' '.join(reason.split())[:max_length]}"
