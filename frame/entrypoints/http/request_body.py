"""`RequestBody`: base class of the JSON request bodies, and `parse_body`, which makes one of
decoded JSON. Used by the routes. Must not depend on a route or the engine."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

from frame.entrypoints.http.protocol.bodies import check_text_sizes
from frame.entrypoints.http.protocol.fields import check_fields
from frame.entrypoints.http.validation_errors import validation_error

MAX_PAIRS = 4096  # entries of an object whose values are validated one by one
_NESTED = ("schema", "items_schema", "values_schema", "keys_schema")


def bounded_schema(schema: Any, in_container: bool = False) -> Any:
    """A core schema, changed in place, with the bounds and number rules of bodies."""
    kind = schema.get("type")
    if kind in ("int", "float"):
        if in_container:
            schema["strict"] = True
            return schema
        return core_schema.no_info_before_validator_function(partial(_refuse_bool, f"{kind}_type"), schema)
    if kind in ("list", "tuple"):
        schema["fail_fast"] = True
    is_container = in_container or kind in ("list", "tuple", "dict")
    for name in _NESTED:
        if isinstance(schema.get(name), dict):
            schema[name] = bounded_schema(schema[name], is_container and name != "keys_schema")
    if isinstance(schema.get("items_schema"), list):
        schema["items_schema"] = [bounded_schema(each, True) for each in schema["items_schema"]]
    if kind == "union":
        schema["choices"] = [bounded_schema(each, in_container) for each in schema["choices"]]
    if kind == "model-fields":
        for field in schema["fields"].values():
            field["schema"] = bounded_schema(field["schema"])
    if kind == "definitions":
        schema["definitions"] = [bounded_schema(each) for each in schema["definitions"]]
    if kind == "dict" and schema.get("values_schema", {}).get("type", "any") != "any":
        return core_schema.no_info_before_validator_function(_limit_pairs, schema)
    return schema


def _refuse_bool(error_type: Any, value: Any) -> Any:
    if value is True or value is False:
        raise PydanticKnownError(error_type)
    return value


def _limit_pairs(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_PAIRS:
        raise PydanticCustomError("too_many_pairs", "has more than {most} pairs; send fewer", {"most": MAX_PAIRS})
    return value


class RequestBody(BaseModel):
    """A JSON object that a client sends. Unknown fields are left to `fields.check_fields`.

    Validation runs on the event loop, so its time is bounded: lists stop at their first error,
    objects with typed values have at most `MAX_PAIRS` entries. Numbers may come as strings, as in
    the OpenAI API; true and false are no numbers.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return bounded_schema(handler(source))


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], value: Any) -> tuple[Body, tuple[str, ...]]:
    """`value` (decoded JSON) as a `kind`, and the names of the fields that the server ignores.
    Raises ApiError 400 that names the first wrong field."""
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), value) from None
    known = kind.model_fields.keys()
    check_text_sizes({name: value[name] for name in known & value.keys()})
    return body, check_fields(known, value)
