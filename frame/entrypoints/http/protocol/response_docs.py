"""`complete_schema`: FastAPI's OpenAPI description with the responses that routes declare, the
error bodies of their APIs, and the ways to send a key.

Made when `/openapi.json` is first read; nothing is validated against it. Used by the application.
Must not depend on a single route.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from frame.entrypoints.http.protocol.api_route import JSON_BODY, Access, ApiRoute

FAILURES = {"4XX": "The request is refused.", "5XX": "The server failed, or is overloaded."}
# FastAPI's own error body, which no route sends
REPLACED = ("HTTPValidationError", "ValidationError")


def complete_schema(schema: dict[str, Any], routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """FastAPI's schema of these routes, changed in place. Raises ValueError for two types of one
    name."""
    schema["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    schema["security"] = [{}, {"bearer": []}, {"key": []}]
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    models = {id(model): model for route in routes for model in (route.errors.model, *route.response_types.values())}
    references, found = TypeAdapter.json_schemas(
        [(key, "serialization", TypeAdapter(model)) for key, model in models.items()], ref_template="#/components/schemas/{model}"
    )
    shapes = {key: {"schema": shape} for (key, _), shape in references.items()}
    bodies = components.setdefault("schemas", {})
    for name in REPLACED:
        bodies.pop(name, None)
    for name, definition in found.get("$defs", {}).items():
        if bodies.setdefault(name, definition) != definition:
            raise ValueError(f"two bodies are named {name}; rename the type of the response")
    for route in routes:
        content = {media_type: shapes[id(model)] for media_type, model in route.response_types.items()}
        failure = {"content": {JSON_BODY: shapes[id(route.errors.model)]}}
        responses = {"200": {"description": "The response.", **({"content": content} if content else {})}}
        responses |= {status: {"description": description, **failure} for status, description in FAILURES.items()}
        for method in route.methods or ():
            operation = schema["paths"][route.path_format][method.lower()]
            operation["responses"] = responses
            if route.access is Access.OPEN:
                operation["security"] = []
    return schema
