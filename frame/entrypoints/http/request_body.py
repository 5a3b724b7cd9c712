"""`RequestBody`: base class of the JSON request bodies, and `parse_body`, which makes one of
decoded JSON. `FormReader` reads multipart/form-data. Used by the routes. Must not depend on a route
or the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import isfinite
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.bodies import check_text_sizes
from frame.entrypoints.http.protocol.fields import Shape, check_fields, check_nested
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


# multipart/form-data ------------------------------------------------------------------------------


MAX_PARTS = 16
LARGEST_HEAD = 16 * 1024  # bytes of a part's headers
_BOUNDARY = re.compile(r'multipart/form-data;.*boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="?([^";\r\n]*)"?', re.IGNORECASE)
_FILENAME = re.compile(rb'[;\s]filename="([^"\r\n]*)"', re.IGNORECASE)


class FormPart(NamedTuple):
    """`name` is empty where the part gives none; `filename` is None where it is a plain field."""

    name: str
    filename: str | None


class FormReader:
    """One body. `content_type`: its header. `fields`: those that the route takes, for errors.
    Raises ApiError for a header without a boundary."""

    def __init__(self, content_type: str, fields: str = "file and purpose") -> None:
        self._fields = fields
        boundary = _BOUNDARY.match(content_type)
        if boundary is None:
            raise ApiError(400, f"the body must be multipart/form-data with the fields {fields}", "file")
        self._mark = b"\r\n--" + boundary[1].encode("latin-1")
        self._kept = bytearray(b"\r\n")  # bytes that were not returned; the first mark may be the beginning of the body
        self._is_head = False
        self._part: FormPart | None = None  # None: before the first one
        self._num_parts = 0
        self._is_over = False

    def feed(self, piece: bytes) -> Iterator[tuple[FormPart, bytes]]:
        """Parts and pieces of their contents; the first of each part is empty. Raises ApiError."""
        self._kept += piece
        while not self._is_over:
            if self._is_head:
                if not self._read_head():
                    return
                assert self._part is not None
                yield self._part, b""
            end = self._kept.find(self._mark)
            content = bytes(self._kept[: end if end >= 0 else max(0, len(self._kept) - len(self._mark) + 1)])
            del self._kept[: len(content) if end < 0 else end + len(self._mark)]
            if content and self._part is not None:
                yield self._part, content
            if end < 0:
                return
            self._is_head = True

    def close(self) -> None:
        """End the body. Raises ApiError for an incomplete one."""
        if not self._is_over:
            raise ApiError(400, "the multipart body is cut off or has another boundary than its header says", "file")

    def _read_head(self) -> bool:
        """Whether a part begins: its headers are complete."""
        if len(self._kept) < 2:
            return False
        if self._kept.startswith(b"--"):
            self._is_over = True
            self._kept.clear()
            return False
        end = self._kept.find(b"\r\n\r\n")
        if max(end, len(self._kept) if end < 0 else 0) > LARGEST_HEAD:
            raise ApiError(400, f"the headers of a part are larger than {LARGEST_HEAD} bytes; send the fields {self._fields}", "file")
        if end < 0:
            return False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(400, f"the body has more than {MAX_PARTS} parts; send the fields {self._fields}", "file")
        self._part = _part_of(bytes(self._kept[:end]))
        del self._kept[: end + 4]
        self._is_head = False
        return True


def _part_of(head: bytes) -> FormPart:
    line = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b"")
    name, filename = _NAME.search(line), _FILENAME.search(line)
    return FormPart(
        name[1].decode("utf-8", "replace") if name is not None else "",
        filename[1].decode("utf-8", "replace") if filename is not None else None,
    )
