"""JSON schemas as clients mean them: an object has the properties that its schema names, and no others. Knows no backend."""

from __future__ import annotations

from typing import Any

OPEN_ENDED = ("additionalProperties", "unevaluatedProperties", "patternProperties")  # say themselves what else there may be
COMBINED = ("allOf", "if", "not", "$ref", "dependentSchemas")  # together with properties: closing one part would close out the others'
BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "oneOf", "prefixItems")
ONE = ("items", "additionalProperties")


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object that names properties and says nothing of others. Schemas that are
    put together of several for one object (`allOf` and the like) are left as they are."""
    return schema if _joins(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = {key: _inside(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in OPEN_ENDED):
        found["additionalProperties"] = False
    return found


def _inside(key: str, value: Any) -> Any:
    if key in BY_NAME and isinstance(value, dict):
        return {name: _closed(each) for name, each in value.items()}
    if key in LISTS and isinstance(value, list):
        return [_closed(each) for each in value]
    return _closed(value) if key in ONE else value


def _joins(schema: Any) -> bool:
    """Whether some object's properties come from several places."""
    if not isinstance(schema, dict):
        return False
    combines = "properties" in schema and any(key in schema for key in (*COMBINED, "anyOf", "oneOf"))
    if combines or len(schema.get("allOf") or ()) > 1:
        return True
    inner = [each for key in BY_NAME if isinstance(schema.get(key), dict) for each in schema[key].values()]
    inner += [each for key in (*LISTS, "allOf") if isinstance(schema.get(key), list) for each in schema[key]]
    return any(map(_joins, [*inner, *(schema.get(key) for key in ONE)]))
