"""Reads regular JSON schemas into `Language` nodes: no recursion, objects with their named
properties only, in declared order.

What is read: objects, arrays, strings with lengths or a pattern, numbers, whole numbers of a range,
enumerations, `anyOf`, references. All else is `UnsupportedSyntaxError`, as it is where a keyword is
not known, so that nothing that a schema demands is ever passed over. Knows no vocabulary and no
backend.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError
from frame.plugins.grammar_backends.states import json_texts
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.regular_syntax import literal, literals, read

MAX_SCHEMAS = 2000  # after expanding references
MAX_NODES = 40_000
LARGEST = 10**18  # of bounds
WHITESPACE = sum(1 << byte for byte in b" \n\r\t")
NOTES = frozenset(
    ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated", "readOnly",
     "writeOnly")
)  # fmt: skip
KEYWORDS = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
NEGATED_SHORTHAND = re.compile(r"\[\^[^\]]*\\[dws]")  # dialects differ on its complement: ASCII or Unicode


def read_schema(language: Language, schema: Any, max_whitespace: int, separators: tuple[str, str] = (",", ":")) -> Node:
    """Return the texts of a schema, with up to `max_whitespace` whitespace characters between
    parts and none around the whole. separators: after items and after names. Raises
    UnsupportedSyntaxError."""
    node = _Reader(language, schema, max_whitespace, separators).value(schema)
    if language.num_nodes > MAX_NODES:
        raise UnsupportedSyntaxError("a large schema")
    if node is language.none:
        raise UnsupportedSyntaxError("a schema that allows nothing")
    return node


class _Reader:
    """Reads one schema. No method's result has whitespace around it."""

    def __init__(self, language: Language, root: Any, max_whitespace: int, separators: tuple[str, str]) -> None:
        self._comma, self._colon = (literal(language, each) for each in separators)
        self._language = language
        self._root = root
        self._blank = language.repeat(language.one_byte(WHITESPACE), 0, max_whitespace)
        self._open: list[str] = []  # references being followed
        self._count = 0

    def value(self, schema: Any) -> Node:
        self._count += 1
        if self._count > MAX_SCHEMAS or self._language.num_nodes > MAX_NODES:
            raise UnsupportedSyntaxError("a large schema")
        if not isinstance(schema, dict):
            raise UnsupportedSyntaxError("a schema that is no object")
        keys = schema.keys() - NOTES
        for keyword, method in (("$ref", self._reference), ("anyOf", self._any_of)):
            if keyword in keys:
                self._expect_only(keys, frozenset((keyword,)))
                return method(schema[keyword])
        if "enum" in keys or "const" in keys:
            return self._enumeration(schema, keys)
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not all(isinstance(each, str) and each in KEYWORDS for each in types):
            raise UnsupportedSyntaxError("a schema without a type")
        self._expect_only(keys, frozenset(("type",)).union(*KEYWORDS.values()))
        return self._language.alt([self._of_type(each, schema) for each in types])

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> Node:
        if name == "boolean":
            return self._language.alt([self._text("true"), self._text("false")])
        if name == "null":
            return self._text("null")
        methods: dict[str, Callable[[Mapping[str, Any]], Node]] = {
            "object": self._object, "array": self._array, "string": self._string, "number": self._number, "integer": self._integer
        }  # fmt: skip
        return methods[name](schema)

    def _expect_only(self, keys: set[str], known: frozenset[str]) -> None:
        if keys - known:
            raise UnsupportedSyntaxError(f"the keyword {min(keys - known)!r}")

    # ---- objects, arrays, alternatives ----

    def _object(self, schema: Mapping[str, Any]) -> Node:
        properties, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(properties, dict) or schema.get("additionalProperties") is not False:
            raise UnsupportedSyntaxError("an object that may have other properties")
        if not isinstance(required, list) or any(name not in properties for name in required):
            raise UnsupportedSyntaxError("a property that is required and not named")
        members = [(self._member(name, each), name in required) for name, each in properties.items()]
        rest, more = self._language.none, self._language.empty  # a property and what follows it; what follows the previous one
        may_end = True
        for member, is_required in reversed(members):
            here = self._sequence(member, self._blank, more)
            rest = here if is_required else self._language.alt([here, rest])
            may_end = may_end and not is_required
            more = self._optional(self._sequence(self._comma, self._blank, rest), may_end)
        return self._sequence(self._text("{"), self._blank, self._optional(rest, may_end), self._text("}"))

    def _optional(self, node: Node, is_optional: bool) -> Node:
        return self._language.alt([node, self._language.empty]) if is_optional else node

    def _member(self, name: str, schema: Any) -> Node:
        return self._sequence(self._text(_json(name)), self._blank, self._colon, self._blank, self.value(schema))

    def _array(self, schema: Mapping[str, Any]) -> Node:
        fixed, rest = schema.get("prefixItems", []), schema.get("items")
        minimum, maximum = self._bounds(schema, "minItems", "maxItems")
        if not isinstance(fixed, list) or (rest is None and (maximum is None or maximum > len(fixed))):
            raise UnsupportedSyntaxError("an array of anything")
        item = self._language.none if rest is False or rest is None else self._sequence(self.value(rest), self._blank)
        max_more = None if maximum is None else max(0, maximum - max(1, len(fixed)))
        comma = self._sequence(self._comma, self._blank)
        more = self._language.repeat(self._sequence(comma, item), max(0, minimum - max(1, len(fixed))), max_more)
        first = self._sequence(item, more)
        for i in reversed(range(len(fixed))):
            if maximum is not None and i >= maximum:
                continue
            first = self._sequence(self.value(fixed[i]), self._blank, more)
            more = self._optional(self._sequence(comma, first), i >= minimum)
        if maximum == 0:
            first = self._language.none
        return self._sequence(self._text("["), self._blank, self._optional(first, minimum == 0), self._text("]"))

    def _any_of(self, schemas: Any) -> Node:
        if not isinstance(schemas, list) or not schemas:
            raise UnsupportedSyntaxError("anyOf without a list")
        return self._language.alt([self.value(each) for each in schemas])

    def _reference(self, pointer: Any) -> Node:
        if not isinstance(pointer, str) or not pointer.startswith("#/") or "%" in pointer or pointer in self._open:
            raise UnsupportedSyntaxError(f"the reference {pointer!r}")
        target = self._root
        for name in pointer[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise UnsupportedSyntaxError(f"the reference {pointer!r}")
            target = target[name]
        self._open.append(pointer)
        node = self.value(target)
        self._open.pop()
        return node

    # ---- scalars ----

    def _enumeration(self, schema: Mapping[str, Any], keys: set[str]) -> Node:
        self._expect_only(keys, frozenset(("enum", "const", "type")))
        values = schema.get("enum", [schema.get("const")])
        types = schema.get("type", list(KEYWORDS))
        if not isinstance(values, list) or keys >= {"enum", "const"}:
            raise UnsupportedSyntaxError("an enumeration that is no list")
        if any(isinstance(value, dict | list) for value in values):
            raise UnsupportedSyntaxError("an enumeration of what has parts")
        names = [types] if isinstance(types, str) else types
        if not isinstance(names, list):
            raise UnsupportedSyntaxError("a type that is no name")
        return literals(self._language, [_json(value) for value in values if any(_is_of(value, name) for name in names)])

    def _string(self, schema: Mapping[str, Any]) -> Node:
        quote = self._text('"')
        minimum, maximum = self._bounds(schema, "minLength", "maxLength")
        pattern = schema.get("pattern")
        if pattern is None:
            any_text = self._language.repeat(json_texts.character(self._language, json_texts.ANY), minimum, maximum)
            return self._sequence(quote, any_text, quote)
        if not isinstance(pattern, str) or minimum or maximum is not None or NEGATED_SHORTHAND.search(pattern):
            raise UnsupportedSyntaxError("a pattern with a length")
        return self._sequence(quote, self._pattern(pattern), quote)

    def _pattern(self, pattern: str) -> Node:
        """A pattern matches anywhere in a text unless it is anchored."""
        anything = self._language.repeat(json_texts.character(self._language, json_texts.ANY), 0, None)
        before = self._language.empty if pattern.startswith("^") else anything
        is_open = not pattern.endswith("$") or (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 0  # an escaped `$` is no anchor
        return self._sequence(before, read(self._language, pattern, json_texts.character), anything if is_open else self._language.empty)

    def _integer(self, schema: Mapping[str, Any]) -> Node:
        minimum, maximum = None, None
        for key, rounded, step in (("minimum", math.ceil, 0), ("exclusiveMinimum", math.floor, 1)):
            if key in schema:
                bound = rounded(_number(schema[key])) + step
                minimum = bound if minimum is None else max(minimum, bound)
        for key, rounded, step in (("maximum", math.floor, 0), ("exclusiveMaximum", math.ceil, -1)):
            if key in schema:
                bound = rounded(_number(schema[key])) + step
                maximum = bound if maximum is None else min(maximum, bound)
        return json_texts.integers(self._language, minimum, maximum)

    def _number(self, schema: Mapping[str, Any]) -> Node:
        bounds = {key: schema[key] for key in KEYWORDS["number"] if key in schema}
        if bounds and (set(bounds) != {"minimum"} or _number(bounds["minimum"]) != 0):
            raise UnsupportedSyntaxError("bounds of a number")
        return json_texts.numbers(self._language, is_signed=not bounds)

    def _bounds(self, schema: Mapping[str, Any], min_key: str, max_key: str) -> tuple[int, int | None]:
        minimum, maximum = schema.get(min_key, 0), schema.get(max_key)
        for bound in (minimum, 0 if maximum is None else maximum):
            if not isinstance(bound, int) or isinstance(bound, bool) or not 0 <= bound <= LARGEST:
                raise UnsupportedSyntaxError(f"{bound!r} as a length")
        if maximum is not None and maximum < minimum:
            raise UnsupportedSyntaxError("a length that none has")
        return minimum, maximum

    def _text(self, text: str) -> Node:
        return literal(self._language, text)

    def _sequence(self, *parts: Node) -> Node:
        return self._language.cat_all(parts)


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:  # NaN, infinity, or half of a surrogate pair
        raise UnsupportedSyntaxError(str(error)) from None
    return text


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise UnsupportedSyntaxError(f"{value!r} as a bound")
    return value


def _is_of(value: Any, name: str) -> bool:
    """Whether a scalar is of a JSON Schema type."""
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, str):
        return name == "string"
    return name == "number" or (name == "integer" and value % 1 == 0)
