"""Sentences about JSON that does not fit, and about bytes that are none."""

from __future__ import annotations

import gzip

import msgspec
import pytest

from frame.entrypoints.http.validation_errors import misfit, unreadable
from tests.entrypoints.inprocess import serving


class Part(msgspec.Struct):
    name: str


class Body(msgspec.Struct, kw_only=True):
    size: int | None = None
    prompt: str | list[int | str] = ""
    parts: list[Part] = []
    ratio: float = 1.0


@pytest.mark.parametrize(
    ("body", "root", "sentence", "param"),
    [
        ("[]", None, "the body is a list; send an object", None),
        ("null", None, "the body is null; send an object", None),
        ('{"size": 1.5}', None, "size is a number; send a whole number", "size"),
        ('{"size": true}', "outer", "outer.size is true or false; send a whole number", "outer.size"),
        ('{"prompt": {}}', None, "prompt is an object; send a string or a list", "prompt"),
        ('{"parts": [{"name": 1}]}', None, "parts[0].name is a whole number; send a string", "parts[0].name"),
        ('{"parts": [{}]}', None, "name is missing; send it", "parts[0].name"),
        ('{"ratio": 1e999}', None, "ratio: Number out of range", "ratio"),
    ],
)
def test_fields_that_do_not_fit(body: str, root: str | None, sentence: str, param: str | None) -> None:
    with pytest.raises(msgspec.ValidationError) as wrong:
        msgspec.json.decode(body, type=Body)
    error = misfit(wrong.value, root)
    assert (error.status, error.message, error.param) == (400, sentence, param)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'\xef\xbb\xbf{"size": 1}', "it begins with a byte-order mark; send plain UTF-8"),
        ('{"size": 1}'.encode("utf-16"), "it begins with a byte-order mark; send plain UTF-8"),
        (b'{"prompt": "\xff"}', "it is no UTF-8"),
        (b'{"size": 1', "it ends too early"),
        (b'{"size": NaN}', "invalid character (byte 9)"),
    ],
)
def test_bytes_that_are_no_json(data: bytes, reason: str) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as wrong:
        msgspec.json.decode(data, type=Body)
    assert unreadable(data, wrong.value).message == f"the body is not valid JSON: {reason}"


async def test_a_packed_body_is_named() -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    async with serving() as server:
        answer = await server.request("POST", "/v1/completions", body, [(b"content-encoding", b"gzip")])
        assert answer.status == 415
        assert answer.json()["error"]["message"] == "the body is packed (content-encoding: gzip); send it as it is"
