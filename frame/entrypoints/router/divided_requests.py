"""The two requests that one becomes in front of prefill and decode servers. Pure. Must not know a
server."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from frame.entrypoints.router.requests import MAX_READ_LENGTH

FIELD = "kv_transfer_params"
_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))
_Fields = dict[str, msgspec.Raw]  # values stay as they came
_FIELDS = msgspec.json.Decoder(_Fields)
_WHOLE = ("prompt_logprobs", "return_hidden_states", "echo", "suffix", FIELD, "lora_path")  # fields of requests that one server computes
_ABSENT = (b"null", b"false", b'""')
_NAME_END = re.compile(rb'"[ \t\r\n]*:')


class _Response(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_RESPONSE = msgspec.json.Decoder(_Response)


def read_divisible(method: str, path: str, body: bytes) -> _Fields | None:
    """The fields of a request that a prefill server can begin and a decode server continue. None:
    it goes to one server whole."""
    if method != "POST" or path not in _PATHS or len(body) > MAX_READ_LENGTH:
        return None
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the server refuses the body
    if _count_names(body) != len(fields) + sum(map(_count_names, fields.values())):
        return None  # a name is there twice, which the server refuses
    if any(bytes(fields[name]) not in _ABSENT for name in _WHOLE if name in fields):
        return None
    prompt = bytes(fields.get("prompt", b""))
    if prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b"[", b'"'):  # several
        return None
    is_single = all(_read_number(fields, name) in (None, 1) for name in ("n", "best_of"))
    limits = [_read_number(fields, name) for name in ("max_tokens", "max_completion_tokens")]
    return fields if is_single and not any(limit is not None and limit <= 1 for limit in limits) else None


def make_prefill_body(fields: _Fields, path: str) -> bytes:
    """The body for the prefill server: one token, whole, and the blocks of the prompt are kept."""
    changed: dict[str, Any] = {**fields, "stream": False, "max_tokens": 1, FIELD: {"do_remote_decode": True}}
    changed.pop("stream_options", None)
    if path == "/v1/chat/completions" and "max_completion_tokens" in fields:
        changed["max_completion_tokens"] = 1
    if (_read_number(fields, "min_tokens") or 0) > 1:
        changed["min_tokens"] = 1
    return msgspec.json.encode(changed)


def make_decode_body(fields: _Fields, response: bytes) -> bytes | None:
    """The body for the decode server, with what the prefill server's response has for it. None: it
    has no object."""
    try:
        params = _RESPONSE.decode(response).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return msgspec.json.encode({**fields, FIELD: params}) if bytes(params).lstrip()[:1] == b"{" else None


def _count_names(text: bytes | msgspec.Raw) -> int:
    """The names of the objects in a JSON text, and what looks like one in its strings."""
    return sum(1 for _ in _NAME_END.finditer(text))


def _read_number(fields: _Fields, name: str) -> float | None:
    """A number of the request; 0 for what is none, which a server refuses."""
    try:
        value = msgspec.json.decode(fields.get(name, b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    return value if value is None or (isinstance(value, int | float) and not isinstance(value, bool)) else 0
