"""The older form of structural tags, which clients of vLLM and SGLang send: `structures` and
`triggers` in place of a `format`. Must not know a grammar backend.
"""

from __future__ import annotations

from typing import Any

from frame.entrypoints.http.errors import ApiError


def to_current_form(tag: dict[str, Any], place: str) -> dict[str, Any]:
    """The tag with a `format`. A tag without `structures` is returned as it is. `place`: its path.
    Raises ApiError 400."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if structures is None:
        return tag
    if not isinstance(structures, list) or not structures or not all(isinstance(each, dict) for each in structures):
        raise ApiError(400, f"{place}.structures: expected a list of objects with begin, schema and end", place)
    if not isinstance(triggers, list) or not triggers or not all(isinstance(each, str) for each in triggers):
        raise ApiError(400, f"{place}.triggers: expected a list of strings", place)
    tags = [_tag(each, f"{place}.structures[{i}]", place) for i, each in enumerate(structures)]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


def _tag(structure: dict[str, Any], here: str, place: str) -> dict[str, Any]:
    begin, end, schema = structure.get("begin"), structure.get("end"), structure.get("schema")
    for name, value in (("begin", begin), ("end", end)):
        if not isinstance(value, str):
            raise ApiError(400, f"{here}.{name}: expected a string", place)
    if not isinstance(schema, dict):
        raise ApiError(400, f"{here}.schema: expected a JSON schema object", place)
    return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}
