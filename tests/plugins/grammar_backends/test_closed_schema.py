"""Objects get the named properties only; combined schemas stay unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from frame.plugins.grammar_backends.closed_schema import close_schema

ONE = {"properties": {"a": {}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ONE, {**ONE, "additionalProperties": False}),
        ({"items": ONE, "enum": [ONE]}, {"items": {**ONE, "additionalProperties": False}, "enum": [ONE]}),
        ({"anyOf": [ONE, {}], "$defs": {"x": True}}, {"anyOf": [{**ONE, "additionalProperties": False}, {}], "$defs": {"x": True}}),
        # a property that has the name of a keyword
        ({"properties": {"properties": {"enum": [1]}}}, {"properties": {"properties": {"enum": [1]}}, "additionalProperties": False}),
    ],
)
def test_objects_are_closed(schema: Any, expected: Any) -> None:
    assert close_schema(schema) == expected and close_schema(expected) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True, {}, {"allOf": 5}, {"type": "object"}, {**ONE, "additionalProperties": True}, {**ONE, "patternProperties": {"b": {}}},
        {"allOf": [ONE, {"properties": {"b": {}}}]}, {**ONE, "anyOf": [{"required": ["b"]}]}, {"items": {**ONE, "$ref": "#/x"}},
    ],
)  # fmt: skip
def test_combined_schemas_stay_unchanged(schema: Any) -> None:
    assert close_schema(schema) == schema
