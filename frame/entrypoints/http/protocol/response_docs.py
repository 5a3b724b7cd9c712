"""Documents the responses of routes in OpenAPI: `responds_with` on a route, `add_responses` for the
whole description.

Schemas are made when `/openapi.json` is first read, and nothing is validated against them. Used by
the modules that declare routes, and by the application. Must not depend on a route.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic import TypeAdapter

from frame.entrypoints.http.errors import ErrorShape

JSON = "application/json"
EVENTS = "text/event-stream"
REFERENCE = "#/components/schemas/{model}"
FAILURES = {"4XX": "The request is refused.", "5XX": "The server failed, or is overloaded."}
# FastAPI's own error body, which no route sends
REPLACED = ("HTTPValidationError", "ValidationError")

Responses = dict[int | str, dict[str, Any]]


class DocumentedRoute(Protocol):
    """The attributes of `ApiRoute` that this module reads."""

    path_format: str
    errors: ErrorShape
    response_docs: Responses

    @property
    def methods(self) -> Collection[str] | None: ...


def responds_with(model: Any, *, events: Any = None, media_type: str = JSON, stream_type: str = EVENTS) -> Responses:
    """The argument `responses` of a route whose 200 body is of type `model`. `events`: the type of
    one event of its stream, which is sent with `stream_type`."""
    content = {media_type: {"model": model}}
    if events is not None:
        content[stream_type] = {"model": events}
    return {200: {"description": "The response.", "content": content}}


def add_responses(schema: dict[str, Any], routes: Sequence[DocumentedRoute]) -> None:
    """Put the responses that routes declare, and the error bodies of their APIs, into an OpenAPI
    schema. Raises ValueError for two types of one name."""
    models = {id(model): model for route in routes for model in _models(route)}
    references, found = TypeAdapter.json_schemas(
        [(key, "serialization", TypeAdapter(model)) for key, model in models.items()], ref_template=REFERENCE
    )
    shapes = {key: shape for (key, _), shape in references.items()}
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in REPLACED:
        components.pop(name, None)
    for name, definition in found.get("$defs", {}).items():
        if components.setdefault(name, definition) != definition:
            raise ValueError(f"two bodies are named {name}; rename the type of the response")
    for route in routes:
        for method in route.methods or ():
            schema["paths"][route.path_format][method.lower()]["responses"] = dict(_responses(route, shapes))


def _models(route: DocumentedRoute) -> Iterator[Any]:
    yield route.errors.model
    for response in route.response_docs.values():
        yield from (body["model"] for body in _content(response).values() if "model" in body)


def _content(response: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The bodies of a declared response by media type; `{"model": M}` is FastAPI's short form."""
    found: Mapping[str, Mapping[str, Any]] = response.get("content", {})
    return {**found, JSON: {"model": response["model"]}} if "model" in response else found


def _responses(route: DocumentedRoute, shapes: Mapping[int, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for status, response in {200: {"description": "The response."}, **route.response_docs}.items():
        shown = {name: value for name, value in response.items() if name not in ("model", "content")}
        content = {
            media_type: {"schema": shapes[id(body["model"])]} if "model" in body else dict(body)
            for media_type, body in _content(response).items()
        }
        yield str(status), {"description": "", **shown, **({"content": content} if content else {})}
    for status, description in FAILURES.items():
        if status not in {str(each) for each in route.response_docs}:
            yield status, {"description": description, "content": {JSON: {"schema": shapes[id(route.errors.model)]}}}
