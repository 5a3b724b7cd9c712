"""Errors as clients of the OpenAI API know them: `{"error": {message, type, param, code}}` with a
status. Must not depend on a route."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec

from frame.entrypoints.http.response_types import declare

ErrorDetail = declare(
    "ErrorDetail",
    "message type param",
    "`param`: the field of the request that the error is about. `code`: a name of the error, or\nthe status.",
    code=str | int,
)
ErrorResponse = declare("ErrorResponse", doc="The error body of the OpenAI API and of the server's own routes.", error=ErrorDetail)

TYPES = {
    **dict.fromkeys((400, 405, 413, 415, 431), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


QUOTED = 100  # characters of a text that a sentence quotes
MAX_SENTENCE_LENGTH = 4096  # characters

_PATH = re.compile(r"(?<![\w/#])(?!/v\d/)(?:[A-Za-z]:)?(?:[/\\][\w.+@~-]+)+[/\\]([\w.+@~-]+)")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


def public(sentence: str) -> str:
    """The sentence without folders and memory addresses, which libraries' messages contain."""
    return _ADDRESS.sub("0x…", _PATH.sub(r"\1", sentence))


def without_folders(value: Any) -> Any:
    """Plain data with every absolute path cut to its last name."""
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(each) for each in value]
    if isinstance(value, str):
        return PurePath(value).name if PurePath(value).is_absolute() else public(value)
    return value


_quotation = reprlib.Repr()
_quotation.maxstring = _quotation.maxother = _quotation.maxlong = QUOTED


def quoted(value: Any) -> str:
    """The `repr` of a client's value, cut to `QUOTED` characters, in constant time."""
    return _quotation.repr(value)


RETRY_AFTER = 1  # seconds
Headers = tuple[tuple[bytes, bytes], ...]
CLOSE: Headers = ((b"connection", b"close"),)  # where the rest of a body is not read, so no request may follow it
SEE_LOG = "a part of the server failed on this request; its log says which"  # of errors of plugins
CONTEXT_LENGTH = "context_length_exceeded"  # the code of a prompt that does not fit


class ApiError(Exception):
    """Ends a request with this status and sentence. `retry_after` in seconds. The sentence of a
    status of 500 or more is made `public`. `headers`: further ones of the response."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int | None = None,
        headers: Headers = (),
    ) -> None:  # fmt: skip
        message = message if len(message) <= MAX_SENTENCE_LENGTH else f"{message[:MAX_SENTENCE_LENGTH]}…"
        message = public(message) if status >= 500 else message
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = headers

    def with_param(self, param: str) -> ApiError:
        """The same error with another name of its field, in `param` and in the sentence."""
        message = self.message.replace(self.param, param) if self.param else self.message
        return ApiError(self.status, message, param, self.code, self.retry_after)

    def body(self) -> bytes:
        """The JSON of the response, and of the last event of a stream that fails midway."""
        kind = TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}
        return msgspec.json.encode({"error": error})


class ErrorShape(NamedTuple):
    """How a dialect writes an error: as a whole response, and as the last events of a stream that
    fails midway. `id_header`: where it has the request's id, besides `x-request-id`. `model`: the
    type of the body, for `/openapi.json`."""

    body: Callable[[ApiError], bytes]
    events: Callable[[ApiError], bytes]
    id_header: bytes | None = None
    model: Any = ErrorResponse


OPENAI = ErrorShape(ApiError.body, lambda error: b"data: " + error.body() + b"\n\ndata: [DONE]\n\n")


class DisconnectedError(Exception):
    """The client closed the connection; no response can be sent."""


class ResponseCutError(Exception):
    """A response cannot be completed; the connection ends, so that the client sees it cut."""
