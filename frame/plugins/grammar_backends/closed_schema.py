"""Closes JSON schemas: an object has only the properties that its schema names. Used by backends;
knows no library."""

from __future__ import annotations

from typing import Any

OPEN_ENDED = ("additionalProperties", "unevaluatedProperties", "patternProperties")  # define further properties
COMBINED = ("allOf", "if", "not", "$ref", "dependentSchemas")  # closing one part would exclude the properties of the other
BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "oneOf", "prefixItems")
ONE = ("items", "additionalProperties")


def close_schema(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in every object that names properties
    and does not define further ones. Schemas that combine several schemas for one object (`allOf`
    and the like) are returned unchanged."""
    return schema if _joins(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = {key: _inside(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in OPEN_ENDED):
        closed["additionalProperties"] = False
    return closed


def _inside(key: str, value: Any) -> Any:
    if key in BY_NAME and isinstance(value, dict):
        return {name: _closed(each) for name, each in value.items()}
    if key in LISTS and isinstance(value, list):
        return [_closed(each) for each in value]
    return _closed(value) if key in ONE else value


def _joins(schema: Any) -> bool:
    """Whether the properties of an object come from several schemas."""
    if not isinstance(schema, dict):
        return False
    combines = "properties" in schema and any(key in schema for key in (*COMBINED, "anyOf", "oneOf"))
    schemas = schema.get("allOf")
    if combines or (isinstance(schemas, list) and len(schemas) > 1):
        return True
    inner = [each for key in BY_NAME if isinstance(schema.get(key), dict) for each in schema[key].values()]
    inner += [each for key in (*LISTS, "allOf") if isinstance(schema.get(key), list) for each in schema[key]]
    return any(map(_joins, [*inner, *(schema.get(key) for key in ONE)]))
