"""`RequestBody`: base class of the JSON request bodies, and `parse_body`, which makes one of
decoded JSON. Used by the routes. Must not depend on a route or the engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isfinite
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

from frame.entrypoints.http.protocol.bodies import check_text_sizes
from frame.entrypoints.http.protocol.fields import check_fields
from frame.entrypoints.http.protocol.nested_fields import Shape, check_nested
from frame.entrypoints.http.validation_errors import validation_error

MAX_PAIRS = 4096  # entries of an object whose values are validated one by one
_NESTED = ("schema", "items_schema", "values_schema")  # keys are texts


def bounded_schema(schema: Any, is_form: bool = False, in_container: bool = False) -> Any:
    """A core schema, changed in place, with the bounds and number rules of bodies. is_form: values
    come as text."""
    kind = schema.get("type")
    if kind in ("int", "float"):
        if in_container:
            schema["strict"] = True
            return schema
        refused = (bool,) if is_form else (bool, str)
        return core_schema.no_info_before_validator_function(partial(_check_number, refused, f"{kind}_type"), schema)
    if kind == "bool":
        schema["strict"] = not is_form
    if kind in ("list", "tuple"):
        schema["fail_fast"] = True
    is_container = in_container or kind in ("list", "tuple", "dict")
    for name in _NESTED:
        if isinstance(schema.get(name), dict):
            schema[name] = bounded_schema(schema[name], is_form, is_container)
    if isinstance(schema.get("items_schema"), list):
        schema["items_schema"] = [bounded_schema(each, is_form, True) for each in schema["items_schema"]]
    if kind == "union":
        schema["choices"] = [bounded_schema(each, is_form, in_container) for each in schema["choices"]]
    if kind == "model-fields":
        for field in schema["fields"].values():
            field["schema"] = bounded_schema(field["schema"], is_form)
    if kind == "definitions":
        schema["definitions"] = [bounded_schema(each, is_form) for each in schema["definitions"]]
    if kind == "dict" and schema.get("values_schema", {}).get("type", "any") != "any":
        return core_schema.no_info_before_validator_function(_limit_pairs, schema)
    return schema


def _check_number(refused: tuple[type, ...], error_type: Any, value: Any) -> Any:
    if isinstance(value, refused):
        raise PydanticKnownError(error_type)
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise PydanticCustomError("too_large", "is out of range; it must fit in 64 bits")
    if type(value) is float and not isfinite(value):
        raise PydanticCustomError("not_finite", "is not finite; send a finite number")
    return value


def _limit_pairs(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_PAIRS:
        raise PydanticCustomError("too_many_pairs", "has more than {most} pairs; send fewer", {"most": MAX_PAIRS})
    return value


class RequestBody(BaseModel):
    """A JSON object that a client sends. Unknown fields are left to `fields.check_fields`.

    Validation runs on the event loop, so its time is bounded: lists stop at their first error,
    objects with typed values have at most `MAX_PAIRS` entries. As in the OpenAI API, a string is
    neither a number nor true or false, and true and false are no numbers; 5.0 is the whole number
    5. `is_form`: the fields of a form, whose values are texts. `NESTED`: field -> the shape of the
    objects in it, whose unknown fields are reported as well.
    """

    is_form: ClassVar[bool] = False
    NESTED: ClassVar[Mapping[str, Shape]] = {}
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return bounded_schema(handler(source), cls.is_form)


Body = TypeVar("Body", bound=BaseModel)  # a plugin's body may be no `RequestBody`


def parse_body(kind: type[Body], value: Any) -> tuple[Body, tuple[str, ...]]:
    """`value` (decoded JSON) as a `kind`, and the names of the fields that the server ignores.
    Raises ApiError 400 that names the first wrong field."""
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), value) from None
    known = kind.model_fields.keys()
    check_text_sizes({name: value[name] for name in known & value.keys()})
    return body, check_fields(known, value) + check_nested(getattr(kind, "NESTED", {}), value)
