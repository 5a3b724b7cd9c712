"""`$ref` into the same schema is accepted; others are refused and named, as is a
`minProperties` that repeated keys would meet."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frame.plugins.grammar_backends.sources import check_source

TEXT = {"type": "string"}


def check(schema: Any, pointers_only: bool = False, kind: str = "json_schema") -> None:
    check_source(kind, json.dumps(schema), 65536, 64, pointers_only)


PLACES: dict[str, Any] = {
    "properties": lambda bad: {"properties": {"a": bad}},
    "properties called like keywords": lambda bad: {"properties": {"enum": bad, "const": TEXT}},
    "items": lambda bad: {"items": bad},
    "items as a list": lambda bad: {"items": [TEXT, bad]},
    "prefixItems": lambda bad: {"prefixItems": [bad]},
    "anyOf": lambda bad: {"anyOf": [{"type": "null"}, bad]},
    "allOf": lambda bad: {"allOf": [bad]},
    "not": lambda bad: {"not": bad},
    "then": lambda bad: {"if": TEXT, "then": bad},
    "additionalProperties": lambda bad: {"additionalProperties": bad},
    "patternProperties": lambda bad: {"patternProperties": {"^x": bad}},
    "$defs": lambda bad: {"$defs": {"a": bad}},
    "definitions": lambda bad: {"definitions": {"a": {"items": bad}}},
    "beside": lambda bad: {"type": "object", **bad},
    "where only a reference leads": lambda bad: {"$ref": "#/components/a", "components": {"a": {"items": bad}}},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("pointers_only", [False, True])
@pytest.mark.parametrize(
    "reference", ["http://x/y.json", "other.json#/x", "file:///etc/x", "#/$defs/none", "#/title", "#/", "#name", "http://["]
)
@pytest.mark.parametrize("place", PLACES)
def test_outside_references_are_named_at_every_place(place: str, reference: str, pointers_only: bool) -> None:
    with pytest.raises(ValueError) as raised:
        check({"title": "t", **PLACES[place]({"$ref": reference})}, pointers_only)
    sentence = str(raised.value)
    assert sentence.startswith(f"json_schema has the $ref {reference!r}, which ") and sentence.endswith("refer to it as '#/$defs/NAME'")
    assert "\n" not in sentence


@pytest.mark.parametrize("reference", [3, None, {"type": "string"}, "x" * 5000])
def test_references_of_other_types_and_long_ones(reference: Any) -> None:
    with pytest.raises(ValueError, match=r"the \$ref") as raised:
        check({"$ref": reference})
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("keyword", ["$dynamicRef", "$recursiveRef"])
def test_unsupported_reference_keywords(keyword: str) -> None:
    with pytest.raises(ValueError, match=rf"json_schema has a \{keyword}, which is not supported"):
        check({"properties": {"a": {keyword: "#"}}})


def test_pointers_into_the_schema() -> None:
    parts = {"a": TEXT, "b/c~d e": True, "list": {"anyOf": [TEXT, {"items": {"$ref": "#"}}]}, "again": {"$ref": "#/$defs/again"}}
    for reference in ("#", "#/$defs/a", "#/$defs/b~1c~0d%20e", "#/$defs/list/anyOf/1/items", "#/$defs/again"):
        for pointers_only in (False, True):
            check({"items": {"$ref": reference}, "$defs": parts}, pointers_only)
    for reference in ("#/$defs/list/anyOf/2", "#/$defs/list/anyOf/-1", "#/$defs/list/anyOf", "#/$defs/list/anyOf/\N{SUPERSCRIPT TWO}"):
        with pytest.raises(ValueError, match="points to no part of the schema"):
            check({"items": {"$ref": reference}, "$defs": parts})


@pytest.mark.parametrize(
    "reference", ["#name", "https://x/y#name", "y", "https://x/y", "z.json", "https://x/z.json#/$defs/deep", "#/$defs/a", ""]
)
def test_anchors_and_ids_are_resolved(reference: str) -> None:
    inner = {"$id": "z.json", "$defs": {"deep": TEXT}, "items": {"$ref": "#/$defs/deep"}}
    schema = {"$id": "https://x/y", "items": {"$ref": reference}, "$defs": {"a": {"$anchor": "name", **TEXT}, "b": inner}}
    check(schema)
    if not reference.startswith("#/"):
        with pytest.raises(ValueError, match="which this grammar backend does not resolve"):
            check(schema, pointers_only=True)


def test_an_invalid_address() -> None:
    check({"$id": "http://[", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": TEXT}})


def test_data_that_looks_like_a_reference() -> None:
    data = {"$ref": "http://x/y", "$dynamicRef": 1}
    for keyword, value in (("enum", [data]), ("const", data), ("default", data), ("examples", [data]), ("x-note", data)):
        check({"type": "object", "properties": {"a": {keyword: value}}}, pointers_only=True)
    names = {"$ref": TEXT, "$id": TEXT, "$anchor": TEXT, "$dynamicRef": TEXT, "$recursiveRef": TEXT}
    check({"properties": names, "required": ["$ref"], "$defs": names, "items": {"$ref": "#/$defs/$ref"}}, pointers_only=True)


def test_schemas_of_a_structural_tag_are_separate_documents() -> None:
    def tag(schema: Any) -> dict[str, Any]:
        content = {"type": "json_schema", "json_schema": schema}
        return {"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "tag", "begin": "<f>", "content": content}]}}

    check(tag({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": TEXT}}), kind="structural_tag")
    with pytest.raises(ValueError, match=r"^a schema of this request has the \$ref '#/format'"):
        check(tag({"items": {"$ref": "#/format"}}), kind="structural_tag")


BOOLEAN = {"type": "boolean"}
OPEN: list[dict[str, Any]] = [
    {"patternProperties": {"^x$": BOOLEAN}, "additionalProperties": False},
    {"type": "object"},
    {"additionalProperties": BOOLEAN},
    {"properties": {"a": BOOLEAN}, "required": ["a"], "additionalProperties": True},
    {"properties": {"a": BOOLEAN}, "unevaluatedProperties": BOOLEAN},
    {"allOf": [{"properties": {"a": BOOLEAN}}, {"properties": {"b": BOOLEAN}}]},
]


@pytest.mark.pairwise
@pytest.mark.parametrize("pointers_only", [False, True])
@pytest.mark.parametrize("schema", OPEN)
@pytest.mark.parametrize("place", PLACES)
def test_a_count_that_repeated_keys_would_meet_is_refused(place: str, schema: dict[str, Any], pointers_only: bool) -> None:
    bad = PLACES[place]({**schema, "minProperties": 2})
    with pytest.raises(ValueError, match="has minProperties 2 for an object whose keys may repeat, .*; name that many keys in properties"):
        check(bad, pointers_only)
    check(PLACES[place]({**schema, "minProperties": 1, "maxProperties": 5}), pointers_only)


def test_a_count_of_keys_that_cannot_repeat_is_accepted() -> None:
    two = {"a": BOOLEAN, "b": BOOLEAN}
    for schema in (
        {"properties": two, "minProperties": 2},
        {"properties": two, "additionalProperties": False, "minProperties": 2},
        {"properties": two, "required": ["a", "b"], "additionalProperties": True, "minProperties": 2},
        {"properties": {"minProperties": {"const": 9}}},
        {"enum": [{"minProperties": 9}]},
        {"minProperties": True},
        {"minProperties": "9"},
    ):
        check(schema)
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "object", "minProperties": 2}}}
    with pytest.raises(ValueError, match="a schema of this request has minProperties 2"):
        check(tag, kind="structural_tag")
