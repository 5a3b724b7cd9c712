"""Grammars for the conformance suite of grammar backends, with what is known of their languages,
and a vocabulary of which each token's bytes are known. Must not know a backend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.testing.conformance import SkipCheck
from frame.text.tokenizer import Tokenizer

PADDING = 29  # ids of the model past those of the tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The embedded tokenizer with two end tokens, in a model with more ids than it."""

    tokenizer: Any
    size: int  # of the model
    tokens: dict[int, bytes]  # of all tokens that are text
    single_bytes: dict[int, bytes]
    ends: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=1)
    def load() -> Vocabulary:
        tokenizer = Tokenizer.load(find_model(EMBEDDED), trust_remote_code=False)
        backend = tokenizer.backend
        special = backend.get_added_tokens_decoder()
        tokenizer.eos_token_ids = (*tokenizer.eos_token_ids, max(special))
        tokens = {i: text for i, text in enumerate(tokenizer.pieces or ()) if text and i not in special}
        single = {i: text for i, text in tokens.items() if len(text) == 1}
        return Vocabulary(tokenizer, backend.get_vocab_size() + PADDING, tokens, single, tuple(tokenizer.eos_token_ids))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, False))

    def allowed(self, rest: set[bytes]) -> np.ndarray:
        """bool [size]: the tokens that begin one of the texts `rest`; the end tokens if one is
        empty."""
        prefixes = {text[:size] for text in rest for size in range(1, len(text) + 1)}
        mask = np.zeros(self.size, np.bool_)
        mask[[token for token, text in self.tokens.items() if text in prefixes]] = True
        mask[list(self.ends)] = b"" in rest
        return mask

    def show(self, token: int) -> str:
        text = self.tokens.get(token)
        return repr(text.decode(errors="replace")) if text is not None else "an end token" if token in self.ends else "not a text"


@dataclass(frozen=True)
class Language:
    """A grammar, and what is known of its texts."""

    kind: str
    source: str
    texts: frozenset[bytes] = frozenset()  # all of them; empty: too many
    holds: Callable[[str], bool] = field(default=lambda text: False)  # whether a text is one of them
    valid: tuple[tuple[str, ...], ...] = ()  # texts that are; each in several ways to write it
    invalid: tuple[str, ...] = ()  # texts that are not

    @property
    def name(self) -> str:
        return f"{self.kind} {self.source[:60]!r}"

    def rest(self, done: bytes) -> set[bytes]:
        """What may follow a text."""
        return {text[len(done) :] for text in self.texts if text.startswith(done)}


def _finite(kind: str, source: str, texts: Sequence[str]) -> Language:
    return Language(kind, source, frozenset(text.encode() for text in texts))


CHOICES = ["plain", "plain text", 'a "quoted"\nline', "naïve 😀", "1+1=2 (a.b)*", "日本"]
_CONST = {"type": "tag", "begin": "<f>", "content": {"type": "const_string", "value": "é😀"}, "end": "</f>"}
FINITE = (
    _finite("choice", json.dumps(CHOICES), CHOICES),
    _finite("choice", json.dumps(["yes", "no"]), ["yes", "no"]),
    _finite("regex", "(yes|no|maybe)[0-2]{1,2}", [f"{a}{b}{c}" for a in ("yes", "no", "maybe") for b in "012" for c in ("", *"012")]),
    _finite("regex", r"a\.b|(ab){1,3}c?", ["a.b", *("ab" * n + c for n in (1, 2, 3) for c in ("", "c"))]),
    _finite("regex", "(naïve|日本(語)?|😀{1,2})!?", [a + b for a in ("naïve", "日本", "日本語", "😀", "😀😀") for b in ("", "!")]),
    _finite("regex", r"\d[^\x00-/:-\U0010ffff]", [f"{a}{b}" for a in range(10) for b in range(10)]),
    _finite(
        "ebnf",
        'root ::= greeting " " name\ngreeting ::= "hi" | "grüß"\nname ::= [a-c] [0-1]?',
        [f"{a} {b}{c}" for a in ("hi", "grüß") for b in "abc" for c in ("", "0", "1")],
    ),
    _finite("ebnf", 'root ::= "ab"{2,3} ([x-y]{2} | "-")', [f"{'ab' * n}{end}" for n in (2, 3) for end in ("xx", "xy", "yx", "yy", "-")]),
    _finite("structural_tag", json.dumps({"type": "structural_tag", "format": _CONST}), ["<f>é😀</f>"]),
)


def _is_balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, -99)
        if depth < 0:
            return False
    return not depth and bool(text)


SCHEMAS: tuple[tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]], ...] = (
    (
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        ({"name": "Köln 😀", "age": 7}, {"name": "", "age": 99}),
        ({"name": "x"}, {"age": 1}, {"name": "x", "age": 100}, {"name": "x", "age": -1}, {"name": "too long a name", "age": 1}, [], 7),
    ),
    (
        {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Köln"]}, "exact": {"type": "boolean"}, "note": {"type": ["string", "null"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        (
            {"city": "Rome"},
            {"city": "Köln", "exact": True},
            {"city": "Rome", "exact": False, "note": None},
            {"city": "Rome", "note": 'a"\\b'},
        ),
        ({"city": "Bonn"}, {"exact": True}, {"city": "Rome", "other": 1}, {"city": "Rome", "exact": "yes"}, {"city": "rome"}),
    ),
    (
        {
            "type": "array",
            "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/pair"}]},
            "minItems": 1,
            "maxItems": 3,
            "$defs": {"pair": {"type": "array", "prefixItems": [{"const": "x"}, {"type": "boolean"}], "items": False, "minItems": 2}},
        },
        ([1], [-20, 3], [["x", True], 5, ["x", False]]),
        ([], [1, 2, 3, 4], ["x"], [["y", True]], {"a": 1}),
    ),
)


def _written(value: Any) -> tuple[str, ...]:
    """Ways to write a value: without whitespace, with a space after separators, both with non-ASCII
    characters as they are."""
    return tuple(json.dumps(value, ensure_ascii=False, separators=pair) for pair in ((",", ":"), (", ", ": ")))


def _validates(schema: dict[str, Any]) -> Callable[[str], bool]:
    def holds(text: str) -> bool:
        try:
            import jsonschema  # type: ignore[import-untyped]
        except ImportError as error:
            raise SkipCheck("jsonschema, which validates random texts, is not installed") from error
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            return False
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))

    return holds


def _schema(schema: dict[str, Any], valid: Sequence[Any], invalid: Sequence[Any], kind: str = "json_schema") -> Language:
    outside = (*(text for value in invalid for text in _written(value)), _written(valid[0])[0] + ",", _written(valid[0])[0][:-1])
    return Language(
        kind,
        json.dumps(schema) if kind == "json_schema" else "",
        holds=_validates(schema),
        valid=tuple(map(_written, valid)),
        invalid=outside,
    )


_NAMES = [f"{name} {number}" for name in ("Köln", "Kö", "日本", "Rome") for number in range(300)]
OPEN = (
    Language(
        "choice",
        json.dumps(_NAMES),
        holds=frozenset(_NAMES).__contains__,
        valid=(("Köln 7",), ("Köln 77",), ("Kö 299",), ("日本 0",)),
        invalid=("", "Köln", "Köln 300", "Köln 07", "K", "Rome 1 ", " Rome 1", "rome 1", "日本 1\n"),
    ),
    *(_schema(*each) for each in SCHEMAS),
    _schema({"type": "object"}, ({}, {"a": 1}, {"ü": [None, {"b": "😀"}]}), ([1], 1, "a", None), "json_object"),
    Language(
        "regex",
        r"[a-z]{1,9}@[a-z]{1,9}\.(com|org)",
        holds=lambda text: re.fullmatch(r"[a-z]{1,9}@[a-z]{1,9}\.(com|org)", text) is not None,
        valid=(("me@home.org",), ("a@b.com",)),
        invalid=("me@home.net", "@home.org", "me@home.org ", " me@home.org", "Me@home.org"),
    ),
    Language(
        "ebnf",
        'root ::= item+\nitem ::= "(" item* ")"',
        holds=_is_balanced,
        valid=(("()",), ("(()())()",), ("((((()))))",)),
        invalid=("", "(", "())", ")("),
    ),
)
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": SCHEMAS[1][0]},
    "end": "</f>",
}
_WIDE = {"type": "object", "properties": {f"name_{n}": {"type": "integer"} for n in range(300)}, "additionalProperties": False}
JSON_CASES = (
    _schema(_WIDE, ({"name_299": 1}, {"name_0": 5, "name_150": 7}), ({"name_300": 1}, {"name_7": "x"})),
    Language(
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {**TAG, "content": {"type": "json_schema", "json_schema": _WIDE}}}),
        valid=(tuple(f"<f>{text}</f>" for text in _written({"name_1": 1, "name_299": 1})),),
        invalid=('<f>{"name_300": 1}</f>', '<f>{"name_300":1}</f>'),
    ),
    Language(
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}}),
        valid=(("free text",), tuple(f"so: <f>{text}</f> done" for text in _written({"city": "Rome"}))),
        invalid=("so: <f>nothing</f>", '<f>{"city": "Bonn"}</f>', "<f>"),
    ),
)
# Grammars that say less than those above: what the backend adds to them, it adds for all requests.
_INNER = {"type": "object", "properties": {"c": {"type": "boolean"}}, "required": ["c"]}
_LOOSE = {"type": "object", "properties": {"a": {"type": "integer"}, "b": _INNER}, "required": ["a", "b"]}
_TAGS = {"type": "tags_with_separator", "tags": [{**TAG, "begin": f"<{name}>"} for name in ("f", "fg")], "separator": ","}
LOOSE = (
    Language("json_schema", json.dumps(_LOOSE)),
    Language("json_schema", json.dumps({"type": "array", "items": _INNER, "minItems": 1, "maxItems": 4})),
    *(
        Language("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
        for form in (TAG, {**TAG, "content": {"type": "json_schema", "json_schema": _LOOSE}}, _TAGS)
    ),
)
# (kind, source) that no backend may compile.
INVALID = (
    ("json_schema", "{"),
    ("json_schema", "[1]"),
    ("json_schema", '{"type": "nonsense"}'),
    ("json_schema", '{"$ref": "#/$defs/missing"}'),
    ("regex", "((("),
    ("regex", "[z-a]"),
    ("ebnf", "root ::= undefined_rule"),
    ("ebnf", "nothing"),
    ("ebnf", "root ::= root"),  # no text at all
    ("choice", "not JSON"),
    ("choice", '["a", 1]'),
    ("choice", '["a", ["b"]]'),
    ("choice", '{"a": "b"}'),
    ("choice", "[]"),
    ("choice", '["a", "\\ud800"]'),  # half of a character, which no text of tokens has
    ("structural_tag", "{"),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "nope"}}'),
)
