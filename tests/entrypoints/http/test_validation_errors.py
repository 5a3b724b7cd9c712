"""Sentences about JSON that does not fit, and about bytes that are none."""

from __future__ import annotations

import gzip
from typing import Literal

import msgspec
import pytest
from pydantic import Field, ValidationError, create_model

from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.validation_errors import unreadable_json, validation_error
from tests.entrypoints.inprocess import serving


class Part(RequestBody):
    name: str


class Body(RequestBody):
    size: int | None = None
    prompt: str | list[int | str] = ""
    parts: list[Part] = Field(default_factory=list)
    ratio: float = Field(1.0, ge=0, le=1)
    form: Literal["float", "base64"] | None = None
    biases: dict[str, float] = Field(default_factory=dict)
    names: dict[str, str] = Field(default_factory=dict, max_length=2)


def test_bounds_are_set_once() -> None:
    """pydantic shares the schema of a body with those of the models that contain it."""
    before = str(Body.__pydantic_core_schema__).count("_check_number")
    for number in range(20):
        create_model(f"Outer{number}", __base__=RequestBody, bodies=(list[Body], ...))
    assert str(Body.__pydantic_core_schema__).count("_check_number") == before > 0


@pytest.mark.parametrize(
    ("body", "sentence", "param"),
    [
        ("[]", "the body is a list; send an object", None),
        ("null", "the body is null; send an object", None),
        ('{"size": 1.5}', "size is a number; send a whole number", "size"),
        ('{"size": true}', "size is true; send a whole number", "size"),
        ('{"prompt": {}}', "prompt is an object; send a string or a list", "prompt"),
        ('{"prompt": [{}]}', "prompt[0] is an object; send a whole number or a string", "prompt[0]"),
        ('{"prompt": [true]}', "prompt[0] is true; send a whole number or a string", "prompt[0]"),
        ('{"parts": [{"name": 1}]}', "parts[0].name is a whole number; send a string", "parts[0].name"),
        ('{"parts": [{}]}', "parts[0].name is missing; send it", "parts[0].name"),
        ('{"ratio": false}', "ratio is false; send a number", "ratio"),
        ('{"ratio": -1}', "ratio is -1; it must be at least 0", "ratio"),
        ('{"ratio": "1.5"}', "ratio is a string; send a number", "ratio"),
        ('{"ratio": 1.5}', "ratio is 1.5; it must be at most 1", "ratio"),
        ('{"size": 18446744073709551616}', "size is out of range; it must fit in 64 bits", "size"),
        ('{"form": "int8"}', "form is 'int8'; it must be 'float' or 'base64'", "form"),
        ('{"biases": {"5": "high"}}', "biases.5 is a string; send a number", "biases.5"),
        ('{"names": {"a": "", "b": "", "c": ""}}', "names has more than 2 pairs; send fewer", "names"),
    ],
)
def test_fields_that_do_not_fit(body: str, sentence: str, param: str | None) -> None:
    value = msgspec.json.decode(body)
    with pytest.raises(ValidationError) as wrong:
        Body.model_validate(value)
    error = validation_error(wrong.value.errors(include_url=False), value)
    assert (error.status, error.message, error.param) == (400, sentence, param)


@pytest.mark.parametrize("field", ["prompt", "parts", "biases"])
def test_many_wrong_values_cost_no_more_than_one(field: str) -> None:
    value = {str(i): "x" for i in range(100_000)} if field == "biases" else [1.5] * 100_000
    with pytest.raises(ValidationError) as wrong:
        Body.model_validate({field: value})
    assert wrong.value.error_count() <= 4


class Form(Body):
    is_form = True


def test_the_numbers_of_a_form_come_as_texts() -> None:
    assert Body.model_validate({"size": 12.0}).size == Form.model_validate({"size": "12"}).size == 12
    with pytest.raises(ValidationError, match="valid integer"):
        Body.model_validate({"size": "12"})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'\xef\xbb\xbf{"size": 1}', "it begins with a byte-order mark; send plain UTF-8"),
        ('{"size": 1}'.encode("utf-16"), "it begins with a byte-order mark; send plain UTF-8"),
        (b'{"prompt": "\xff"}', "it is no UTF-8"),
        (b'{"size": 1', "it ends too early"),
        (b'{"size": NaN}', "invalid character (byte 9)"),
        (b'{"ratio": 1e999}', "Number out of range"),
    ],
)
def test_bytes_that_are_no_json(data: bytes, reason: str) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as wrong:
        msgspec.json.decode(data)
    assert unreadable_json(data, wrong.value).message == f"the body is not valid JSON: {reason}"


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"size": NaN}', "size"),
        (b'{"ratio": 1e400}', "ratio"),
        (b'{"parts": [{"name": "a"}, {"name": -Infinity}]}', "parts[1].name"),
        (b'{"prompt": ["a", "\\ud83d"]}', "prompt[1]"),
        (b'{"metadata": {"\\udfff": "\\ud800"}}', "metadata"),  # no sentence quotes such a name
        (b'{"prompt": ["' + b"a" * 200_000 + b'", "\\ud83d"]}', "prompt[1]"),
    ],
)
async def test_values_that_json_does_not_have_are_named(data: bytes, param: str) -> None:
    async with serving() as server:
        reply = await server.request("POST", "/v1/completions", data)
        error = reply.json()["error"]
        assert (reply.status, error["param"]) == (400, param)
        assert error["message"].startswith(f"the body is not valid JSON: {param} ")


async def test_a_compressed_body_is_named() -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    async with serving() as server:
        reply = await server.request("POST", "/v1/completions", body, [(b"content-encoding", b"gzip")])
        assert reply.status == 415
        assert reply.json()["error"]["message"] == "the body is compressed (content-encoding: gzip); send it uncompressed"
