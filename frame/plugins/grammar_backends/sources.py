"""Checks the source of a grammar, which comes from a client, before a library reads it. Knows no
library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from frame.plugins.grammar_backends.references import check_references

JSON_KINDS = ("json_schema", "structural_tag")
_ENDS = {"[": "]", '"': '"', "#": "\n"}  # of EBNF
# Of an expression: the minimum of a quantifier, or an escape, a class, another character. With the
# flag x, a comment may hold a part of a class.
_COUNT, _ESCAPE, _CLASS = r"\{\s*(\d+)\s*(?:,\s*\d*\s*)?\}", r"\\[xuUpP]\{[^}]{0,64}\}|\\.", r"\[(?:\\.|[^\]\\])*+\]"
_PART, _VERBOSE_PART = (re.compile(rf"{_COUNT}|{_ESCAPE}|{classes}.", re.DOTALL) for classes in (f"{_CLASS}|", ""))
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
MAX_DEMANDED = 50_000  # characters of every text that matches an expression
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
            _check_text(kind, source, kind == "ebnf", max_depth)
        if kind == "choice":
            _check_texts(source, max_depth)
        return
    _check_depth(kind, source, max_depth)
    try:
        parsed = json.loads(source)
    except ValueError as error:
        raise ValueError(f"{kind} is not JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise ValueError(f"{kind} must be a JSON object")
    for text, is_ebnf in _list_texts(parsed):
        _check_text(kind, text, is_ebnf, max_depth)
    check_references(kind, parsed, pointers_only)


def _check_texts(source: str, max_depth: int) -> None:
    """Raise ValueError for choices that are no JSON list of texts."""
    _check_depth("choice", source, max_depth)
    try:
        texts = json.loads(source)
    except ValueError as error:
        raise ValueError(f"choice is not JSON: {error}") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("choice must be a list of texts, of which there is at least one")


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


def _check_text(kind: str, text: str, is_ebnf: bool, max_depth: int) -> None:
    (_check_ebnf if is_ebnf else _check_expression)(kind, text, max_depth)


def _check_expression(kind: str, text: str, max_depth: int) -> None:
    """Libraries take time that grows fast with the depth of groups, and with the number of
    characters that an expression demands. What is no plain syntax may count as more."""
    groups = [[0, 0]]  # of each open group, the characters of this alternative, and of the longest one before
    last, was_count, at = 0, False, 0  # characters of the last item; whether a quantifier ends here
    pattern = _PART if _VERBOSE.search(text) is None else _VERBOSE_PART
    while (match := pattern.match(text, at)) is not None:
        part, at = match[0], match.end()
        count = match[1]
        if part == "[" and pattern is _PART:
            return  # a class without an end, which libraries refuse at once
        if part == "(":
            groups.append([0, 0])
            if len(groups) > max_depth + 1:
                raise _too_deep(kind, max_depth)
        elif part == "|":
            groups[-1][:] = 0, max(groups[-1])
            last = 0
        elif count is not None or part == "*" or (part == "?" and not was_count):
            times = min(int(count[:9]), 10**9) if count else 0
            groups[-1][0] += last * (times - 1)
            last *= times
        elif part not in "+?":
            last = 1 if part != ")" or len(groups) < 2 else max(groups.pop())
            groups[-1][0] += last
        was_count = count is not None or part in "*+?"
        if groups[-1][0] > max(MAX_DEMANDED, len(text)):
            raise ValueError(f"{kind} demands more than {MAX_DEMANDED} characters; use smaller counts")


def _check_ebnf(kind: str, text: str, max_depth: int) -> None:
    """As `_check_expression`, the depth alone. A text, class or comment ends here no later than in
    a library, so that no group is missed."""
    depth, end, is_escaped = 0, "", False  # end: of the text, class or comment; empty outside
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\" and end != "\n":
            is_escaped = True
        elif end:
            end = "" if char in (end, "\n") else end
        elif char in _ENDS:
            end = _ENDS[char]
        elif char == "(":
            depth += 1
            if depth > max_depth:
                raise _too_deep(kind, max_depth)
        elif char == ")":
            depth -= 1


def _too_deep(kind: str, limit: int) -> ValueError:
    return ValueError(f"{kind} has groups nested deeper than {limit} levels; simplify it")


def one_sentence(kind: str, reason: str, max_length: int = 200) -> str:
    """The library's own message about a grammar, on one line."""
    return f"{kind} does not compile: {' '.join(reason.split())[:max_length]}"
