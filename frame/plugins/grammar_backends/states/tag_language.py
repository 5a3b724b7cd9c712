"""Reads the structural tags of tool calls into `Language` nodes: fixed texts, JSON of schemas and
expressions, in sequence and as alternatives.

A special token stands as bytes that no text has. All else, such as free text, is
UnsupportedSyntaxError. Knows no vocabulary but the special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from frame.plugins.grammar_backends.closed_schema import close_schema
from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.regular_syntax import literal
from frame.plugins.grammar_backends.states.schema_language import read_schema

SEPARATORS = (", ", ": ")  # of JSON in structural tags


def write_special(token: int) -> bytes:
    """A special token as bytes, which begin with one that is not in UTF-8."""
    return b"\xff" + token.to_bytes(4, "big")


def read_tags(language: Language, form: Any, special_ids: Mapping[str, int]) -> Node:
    """The texts of a format, which llguidance has read too. Raises UnsupportedSyntaxError."""
    return _Reader(language, special_ids).read(form)


class _Reader:
    """Reads each format into a node."""

    def __init__(self, language: Language, special_ids: Mapping[str, int]) -> None:
        self._language, self._ids = language, special_ids
        self._special = re.compile("|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) or "(?!)")

    def read(self, form: Any) -> Node:
        methods: dict[str, Callable[[Any], Node]] = {
            "const_string": lambda form: self._text(form["value"]),
            "json_schema": self._json,
            "sequence": lambda form: self._language.cat_all([self.read(each) for each in form["elements"]]),
            "or": lambda form: self._language.alt([self.read(each) for each in form["elements"]]),
            "optional": lambda form: self._language.alt([self.read(form["content"]), self._language.empty]),
            "tag": lambda form: self._language.cat_all([self._text(form["begin"]), self.read(form["content"]), self._text(form["end"])]),
            "tags_with_separator": self._tags,
        }
        if form["type"] not in methods:
            raise UnsupportedSyntaxError(form["type"])
        return methods[form["type"]](form)

    def _json(self, form: Any) -> Node:
        if set(form) - {"type", "json_schema", "style"} or not isinstance(form["json_schema"], dict):
            raise UnsupportedSyntaxError("whitespace")
        return read_schema(self._language, close_schema(form["json_schema"]), 0, SEPARATORS)

    def _tags(self, form: Any) -> Node:
        language = self._language
        one = language.alt([self.read({"type": "tag", **each}) for each in form["tags"]])
        more = language.repeat(language.cat(self._text(form["separator"]), one), 0, None)
        some = one if form.get("stop_after_first") else language.cat(one, more)
        return some if form.get("at_least_one") else language.alt([some, language.empty])

    def _text(self, text: str) -> Node:
        parts, end = [], 0
        for match in self._special.finditer(text):
            parts += [literal(self._language, text[end : match.start()]), self._token(self._ids[match[0]])]
            end = match.end()
        return self._language.cat_all([*parts, literal(self._language, text[end:])])

    def _token(self, token: int) -> Node:
        return self._language.cat_all([self._language.one_byte(1 << byte) for byte in write_special(token)])
