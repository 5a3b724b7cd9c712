"""The interface of HTTP extensions (kind `http_extension`): routes, middleware, and hooks around
requests, in the HTTP process.

FastAPI is imported by the plugin alone. Imports no torch and no FastAPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fastapi import APIRouter
    from pydantic import BaseModel

MIN_REFUSAL, MAX_REFUSAL = 400, 599


@dataclass(frozen=True, slots=True)
class HttpContext:
    """The server that an extension is built for."""

    served_name: str  # the model's name in the API
    task: str = "generate"  # generate, embed or classify
    max_context: int = 0  # tokens of a sequence, prompt and output


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that the server admitted, before its body is read."""

    method: str
    path: str  # decoded
    route: str  # the path of the route, such as "/v1/models/{name}"; "none": no route took it
    headers: Mapping[str, str]  # by lower-case name, read-only; the last value of a repeated header
    request_id: str
    tenant: str = ""  # of the API key; "" where the server has no keys
    client: str = ""  # IP address; "" for a Unix socket


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """How a request was answered."""

    status: int  # 499: the client left before the response began
    seconds: float  # from the request's arrival to the last byte
    prompt_tokens: int = 0  # of all its sequences
    output_tokens: int = 0


class RefuseRequest(Exception):  # noqa: N818 - a decision, not an error
    """Raised by `on_request`: the request is answered with this status and sentence, in the error
    shape of its API. `code`: the error's name for programs. `headers` are added to the response,
    such as `{"www-authenticate": "Basic"}`.
    """

    def __init__(self, status: int, sentence: str, code: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.code = code
        self.headers: Mapping[str, str] = headers or {}


class HttpExtension:
    """Adds to the HTTP server. Every method has a default that adds nothing.

    Contract: methods are called in the HTTP process, on its one event loop, and must not block it.
    One object serves all requests at once, so a request's data must not be kept in it. Memory is
    bounded. An error of a hook ends its request alone, with status 500, and the log names the
    extension.
    """

    open_paths: ClassVar[frozenset[str]] = frozenset()  # own routes that need no API key
    # What the extension does, for its conformance suite: requests that it accepts, those that it
    # refuses with their status, and the JSON that GET of its paths answers when it has seen those
    # that it accepts, each with an `HttpResponse(200, 0.25, 3, 4)`.
    conformance_requests: ClassVar[Sequence[HttpRequest]] = ()
    conformance_refusals: ClassVar[Sequence[tuple[HttpRequest, int]]] = ()
    conformance_bodies: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, context: HttpContext, options: BaseModel | None = None) -> None: ...

    def make_routers(self) -> Sequence[APIRouter]:
        """The extension's own routes, as FastAPI routers of plain HTTP routes.

        They need an API key where the server has keys, have bounded bodies, and are in
        `/openapi.json`. A path must not be one that the server or another extension has.
        """
        return ()

    def make_middleware(self) -> Sequence[tuple[type, Mapping[str, Any]]]:
        """ASGI middleware as (class, keyword arguments), the outermost first; each is made as
        `class(app, **arguments)`. It sees every message of every response, one for each token.
        """
        return ()

    async def on_request(self, request: HttpRequest) -> None:
        """Check a request of any route but those that are open to all, such as `/health`.

        Raises RefuseRequest to refuse it.
        """

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        """Record a response after its last byte; refused requests too."""

    @classmethod
    def has_hook(cls, name: str) -> bool:
        """Whether the class has its own `on_request` or `on_response`; a hook that it does not have
        costs nothing.
        """
        return getattr(cls, name) is not getattr(HttpExtension, name)
