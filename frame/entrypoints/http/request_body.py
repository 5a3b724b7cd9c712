"""The bodies of requests: `RequestBody`, the base class of the JSON bodies; `parse_body`, which
makes one of decoded JSON; the fields that several routes share, `RequestOptions` on every route
that runs the model and `SamplingFields` on every route that generates; `FormReader`, which reads
multipart/form-data (RFC 7578).

Used by the routes. Must not depend on a route or the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.protocol.bodies import check_text_sizes
from frame.entrypoints.http.protocol.fields import Shape, check_fields, check_nested, check_nested_fields
from frame.entrypoints.http.validation_errors import validation_error

MAX_PAIRS = 4096  # entries of an object whose values are validated one by one
_NESTED = ("schema", "items_schema", "values_schema")  # keys are texts


def bounded_schema(schema: Any, is_form: bool = False, in_container: bool = False) -> Any:
    """A core schema, changed in place, with the bounds and number rules of bodies. is_form: values
    come as text."""
    kind = schema.get("type")
    if kind == "function-before" and _is_bound(schema["function"]["function"]):
        return schema  # pydantic shares the schema of a body between the schemas that contain it
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


def _is_bound(function: Any) -> bool:
    return function is _limit_pairs or (isinstance(function, partial) and function.func is _check_number)


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


class NestedBody(RequestBody):
    """An object inside a body, at `place`, whose unknown fields are refused."""

    place: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        if isinstance(value, dict):
            check_nested_fields(cls.place, value, cls.model_fields)
        return value


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


# fields that routes share -------------------------------------------------------------------------

# What a client may attach to what is kept for it: as much as OpenAI allows.
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)]
_TOKEN_ID = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")  # `int` takes spaces, underscores and digits of other scripts too


class RequestOptions(RequestBody):
    """`cache_salt` is the client's part of the name of the prefix cache that the request sees;
    `rid` names the request, and vLLM's name for it is `request_id`. `lora_path` names an adapter,
    or one for each prompt. The last four fields keep the prefix of the request after its end, see
    `frame.entrypoints.http.protocol.sessions`."""

    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None  # seconds
    rid: str | None = None
    request_id: str | None = None
    lora_path: str | list[str | None] | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_control: dict[str, Any] | None = None

    def resolve_priority(self) -> int:
        """The priority for the scheduler."""
        return self.priority or 0

    def request_name(self) -> str | None:
        """What the client calls the request. Raises ApiError for two different names, and for one
        with control characters, which the log would repeat."""
        if self.rid is not None and self.request_id is not None and self.rid != self.request_id:
            raise ApiError(400, "rid and request_id name the same thing and differ; send one of them", "request_id")
        field_name, name = ("request_id", self.request_id) if self.rid is None else ("rid", self.rid)
        if name is not None and not name.isprintable():
            raise ApiError(400, f"{field_name} holds a character that is not printable; leave it out", field_name)
        return name

    def sent_name(self, parameter: str) -> str:
        """How the client's request calls a sampling parameter."""
        return parameter

    @property
    def truncates(self) -> bool:
        """Whether a prompt that is too long is cut rather than refused."""
        return False

    def truncated(self, prompt: list[int], room: int) -> list[int]:
        """The prompt, cut as asked; `room`: the most tokens that it may have. Raises ApiError."""
        return prompt


class TransferParams(NestedBody):
    """`do_remote_decode` asks a prefill server to keep the blocks of the prompt; the response has
    all other fields, for the request to a decode server. `remote_block_ids`: places of the blocks
    in the prompt. `first_token_ids`, `seed`, `cached_tokens`: what the prefill server computed."""

    place = "kv_transfer_params"
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = Field(None, max_length=256)
    remote_request_id: str | None = Field(None, max_length=256)
    remote_block_ids: list[int] | None = Field(None, max_length=1 << 20)
    remote_host: str | None = Field(None, max_length=256)
    remote_port: int | None = None
    first_token_ids: list[int] | None = Field(None, max_length=1)
    seed: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    signature: str | None = Field(None, max_length=256)


class SamplingFields(RequestOptions):
    """Sampling parameters beyond a dialect's own, with the names that clients of vLLM and SGLang
    send.

    `truncate_prompt_tokens` keeps so many tokens of a longer prompt, the last ones unless
    `truncation_side` is `right`; -1: as many as fit.
    """

    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name of include_stop_str_in_output
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    num_speculative_tokens: int | None = None
    stream_interval: int | None = None
    logprob_token_ids: list[int] | None = None
    custom: dict[str, str] | None = None
    custom_params: dict[str, Any] | None = None  # SGLang's name of custom, with values of any type

    def sent_name(self, parameter: str) -> str:
        if parameter == "custom" and self.custom_params is not None:
            return "custom_params"
        if parameter == "include_stop_str_in_output" and self.no_stop_trim is not None:
            return "no_stop_trim"
        return parameter

    def sampling_fields(self) -> dict[str, Any]:
        """Those that were sent, as `SamplingParams` types them, without constraints."""
        for name, other in (("custom", "custom_params"), ("include_stop_str_in_output", "no_stop_trim")):
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise ApiError(400, f"{name} and {other} are the same; send one of them", other)
        values = {name: value for name in _SAME & self.model_fields_set if (value := getattr(self, name)) is not None}
        for name in ("stop_token_ids", "bad_words", "stop_regex", "logprob_token_ids"):
            if name in values:
                values[name] = (values[name],) if isinstance(values[name], str) else tuple(values[name])
        if self.no_stop_trim is not None:
            values["include_stop_str_in_output"] = self.no_stop_trim
        if self.custom_params is not None:
            values["custom"] = to_custom(self.custom_params)
        if self.logit_bias:
            if (wrong := next((token for token in self.logit_bias if not _TOKEN_ID.fullmatch(token)), None)) is not None:
                raise ApiError(400, f"logit_bias has the key {quoted(wrong)}; the keys must be token ids", "logit_bias")
            values["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return values

    @property
    def truncates(self) -> bool:
        return self.truncate_prompt_tokens is not None

    def truncated(self, prompt: list[int], room: int) -> list[int]:
        asked = self.truncate_prompt_tokens
        if asked is None:
            return prompt
        if asked < -1 or asked == 0:
            sentence = f"truncate_prompt_tokens is {asked}; it must be 1 or more, or -1 for what fits"
            raise ApiError(400, sentence, "truncate_prompt_tokens")
        count = max(1, room) if asked == -1 else asked
        if len(prompt) <= count:
            return prompt
        return prompt[:count] if self.truncation_side == "right" else prompt[-count:]


def to_custom(values: dict[str, Any]) -> dict[str, str]:
    """SGLang's `custom_params` as `custom`: values that are no text become JSON text."""
    return {name: value if isinstance(value, str) else msgspec.json.encode(value).decode() for name, value in values.items()}


# The fields that `SamplingParams` has too, with the same values. `constraints` converts grammars.
_CONVERTED = {"logit_bias", "regex", "ebnf", "json_schema", "structural_tag"}
_SAME = (SamplingFields.model_fields.keys() & set(SamplingParams.__struct_fields__)) - _CONVERTED


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
