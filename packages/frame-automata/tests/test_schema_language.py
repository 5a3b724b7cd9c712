"""Schemas as automata: their texts are valid, they accept valid texts in their spelling, and
unsupported schemas are refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from frame.plugins.grammar_backends.closed_schema import close_schema
from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError
from frame.plugins.grammar_backends.states import json_texts
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.schema_language import read_schema
from tests.plugins.grammar_backends import random_grammars


def matches(language: Language, node: Node, text: str) -> bool:
    return language.follow(node, text.encode()).is_nullable


def a_text(rng: random.Random, language: Language, node: Node) -> str:
    """A random text that the automaton accepts. It ends soon after 200 bytes."""
    found = bytearray()
    while not (node.is_nullable and (rng.random() < 0.5 or len(found) > 200)) and node is not language.empty:
        bytes_ = [byte for byte in range(256) if node.first >> byte & 1]
        ends = [byte for byte in bytes_ if byte in b'"]},:'] if rng.random() < 0.3 else []
        found.append(rng.choice(ends or bytes_))
        node = language.derive(node, found[-1])
        assert node is not language.none
    return found.decode()


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.soak)])
def test_every_text_is_valid(count: int) -> None:
    rng, read = random.Random(0), 0
    for i in range(count):
        schema, language = random_grammars.schema(i), Language()
        try:
            node = read_schema(language, close_schema(schema), 2)
        except UnsupportedSyntaxError:
            continue
        read += 1
        for _ in range(3):
            text = a_text(rng, language, node)
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            again = json.dumps(json.loads(text), ensure_ascii=False)  # other spellings of some escapes and numbers are not accepted
            assert matches(language, node, again) or r"\u" in text, (schema, text)
    assert read > count * 0.7


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', r'"\n\""', '"é😀"', r'"\u0001"'], ['""', '"abc"', '"a', '"\n"']),
        ({"type": "string", "pattern": "b"}, ['"abc"', '"b"', r'"\"b\\"'], ['"ac"', '""']),
        ({"type": "string", "pattern": r'^[^a]"?\\$'}, [r'"b\"\\"', r'"\\\\"', r'"\n\\"'], [r'"a\\"', r'"b"', '"b\\"']),
        ({"type": "string", "pattern": r"x\$"}, ['"x$"', '"ax$b"'], ['"x"']),
        ({"type": "integer"}, ["0", "-7", "120"], ["-0", "01", "1.0", "-", "1e3"]),
        ({"type": "integer", "exclusiveMinimum": -3, "maximum": 12.5}, ["-2", "0", "9", "10", "12"], ["-3", "13", "100", "-12"]),
        ({"type": "integer", "minimum": 98}, ["98", "99", "100", "12345"], ["97", "9", "0", "-98"]),
        ({"type": "integer", "maximum": -10}, ["-10", "-11", "-999"], ["-9", "10", "0"]),
        ({"type": "number"}, ["0", "-1.50E+5", "2e-1", "-0"], ["1.", ".5", "01", "+1"]),
        ({"type": "number", "minimum": 0}, ["0", "1.5e3"], ["-1", "-0"]),
        ({"type": ["boolean", "null"]}, ["true", "false", "null"], ["0", "True"]),
        ({"enum": ["é", 1, 2.5, None, True], "type": ["string", "integer", "boolean"]}, ['"é"', "1", "true"], ["2.5", "null"]),
        ({"const": 'a"b'}, [r'"a\"b"'], ['"ab"']),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"const": "x"}}}, ["3", '"x"'], ['"y"']),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, ["[]", "[ null ]", "[null, null]"], ["[null,]", "[null,null,null]"]),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, ["[null,null]", "[null,null,null]"], ["[]", "[null]"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, ["[]"], ["[null]"]),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}, "minItems": 1, "maxItems": 4},
            ["[1]", "[1,2]", "[1,2,3]", "[1,2,3,3]"],
            ["[]", "[2]", "[1,3]", "[1,2,3,3,3]"],
        ),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[]", "[1]"], ["[1,1]", "[2]"]),
        ({"type": "object", "properties": {}}, ["{}", "{ }"], ['{"a":1}', "{,}"]),
        (
            {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b"]},
            ['{"b":2}', '{ "a" : 1 , "b":2}', '{"b":2,"c":3}', '{"a":1,"b":2,"c":3\n}'],
            ["{}", '{"a":1}', '{"b":2,"a":1}', '{"b":2,}', '{,"b":2}', ' {"b":2}', '{"b":2} ', '{"b":2  \n}'],
        ),
    ],
)  # fmt: skip
def test_texts_of_a_schema(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    language = Language()
    node = read_schema(language, close_schema(schema), 2)
    assert [text for text in good if not matches(language, node, text)] == []
    assert [text for text in bad if matches(language, node, text)] == []


def test_whitespace_may_be_forbidden() -> None:
    language = Language()
    node = read_schema(language, close_schema({"type": "object", "properties": {"a": {"type": "null"}}}), 0)
    assert matches(language, node, '{"a":null}') and not matches(language, node, '{"a": null}')


@pytest.mark.parametrize(
    "schema",
    [
        True, {}, {"type": "object"}, {"type": "array"}, {"type": "text"}, {"type": {}}, {"type": "string", "format": "date"},
        {"type": "string", "pattern": "a", "maxLength": 3}, {"type": "string", "pattern": r"[^\w]"}, {"type": "string", "pattern": "(?=a)"},
        {"type": "string", "maxLength": -1}, {"type": "string", "minLength": 2, "maxLength": 1}, {"type": "string", "maxLength": 2.5},
        {"type": "number", "maximum": 1}, {"type": "integer", "multipleOf": 2}, {"type": "integer", "exclusiveMinimum": True},
        {"type": "integer", "minimum": 10**30}, {"type": "integer", "minimum": 2, "maximum": 1}, {"enum": [[1]]}, {"enum": []},
        {"enum": ["\ud800"]}, {"enum": [1], "type": "string"}, {"enum": [1], "const": 1}, {"oneOf": [{"type": "null"}]}, {"anyOf": []},
        {"$ref": "#"}, {"$ref": "#/$defs/no"}, {"$ref": "other.json"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, {"not": {}},
        {"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "array", "prefixItems": [{"type": "null"}], "maxItems": 3}, {"enum": [float("nan")]},
        {"type": "array", "items": {"$ref": "#/$defs/a0"},
         "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(20)} | {"a20": {"type": "null"}}},
    ],
)  # fmt: skip
def test_unsupported_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedSyntaxError):
        read_schema(Language(), close_schema(schema), 2)


def test_integers_of_a_range() -> None:
    rng = random.Random(0)
    for _ in range(40):
        minimum, maximum = sorted((rng.randint(-300, 300), rng.randint(-300, 300)))
        bounds = [(minimum, maximum), (minimum, None), (None, maximum)][rng.randint(0, 2)]
        language = Language()
        node = json_texts.integers(language, *bounds)
        for value in range(-1100, 1100, 1 + rng.randint(0, 6)):
            expected = (bounds[0] is None or value >= bounds[0]) and (bounds[1] is None or value <= bounds[1])
            assert matches(language, node, str(value)) == expected, (bounds, value)
