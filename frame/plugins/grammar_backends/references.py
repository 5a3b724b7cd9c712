"""Checks what a library would ignore in JSON schemas: a `$ref` out of the document, for which it
would allow any value or fetch it, a `minProperties` that repeated keys would meet, and look-around
in patterns. Knows no library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from frame.plugins.grammar_backends.closed_schema import close_schema

# keywords whose values are schemas; the others (`enum`, `const`, `default`, `examples`) contain
# data, where `$ref` is a plain name
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
SCHEMAS = frozenset(
    ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
     "propertyNames", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "contentSchema")
)  # fmt: skip
ANCHORS = ("$anchor", "$dynamicAnchor")
UNFOLLOWED = ("$dynamicRef", "$recursiveRef")
MAX_LENGTH = 100  # characters of a reference in an error
LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")


def check_references(kind: str, parsed: Any, pointers_only: bool) -> None:
    """Raise ValueError, one sentence, for a reference in a `json_schema`, or in a schema of a
    `structural_tag`, that cannot be resolved. `pointers_only`: the library resolves `#` and
    `#/...`, but neither `$anchor` nor `$id`, and ignores look-around in patterns, which is then an
    error too."""
    if kind == "json_schema":
        _Document(kind, close_schema(parsed)).check(pointers_only)
        return
    for schema in _schemas_of_tag(parsed):  # which may come from a tool, so the error does not name the tag
        _Document("a schema of this request", close_schema(schema)).check(pointers_only)


class _Document:
    """A schema document, and the names of its parts."""

    def __init__(self, name: str, root: Any) -> None:
        self._name = name
        self._resources: dict[str, Any] = {"": root}  # by `$id`
        self._anchors: set[tuple[str, str]] = set()  # `$id` of the resource, name
        self._schemas: list[tuple[dict[str, Any], str]] = []  # schema, `$id` of its resource
        self._seen: set[int] = set()
        self._collect(root, "")

    def check(self, pointers_only: bool) -> None:
        for schema, base in self._schemas:  # grows while targets are found outside of the schema keywords
            for keyword in UNFOLLOWED:
                if keyword in schema:
                    raise ValueError(f"{self._name} has a {keyword}, which is not supported; use a $ref such as '#/$defs/NAME'")
            self._check_count(schema)
            if pointers_only:
                self._check_patterns(schema)
            if "$ref" in schema:
                self._follow(schema["$ref"], base, pointers_only)

    def _check_count(self, schema: dict[str, Any]) -> None:
        """Refuse a `minProperties` above the number of different keys that are certain. Grammars
        count keys and do not compare them, and keys without a name in `properties` may repeat."""
        minimum, required = schema.get("minProperties"), schema.get("required")
        if isinstance(minimum, bool) or not isinstance(minimum, int | float):
            return
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        certain = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
        if not is_closed and minimum > max(certain, 1):
            reason = f"{self._name} has minProperties {minimum} for an object whose keys may repeat, which a grammar cannot enforce"
            remedy = "name that many keys in properties and required, or leave minProperties out"
            raise ValueError(f"{reason}; {remedy}")

    def _check_patterns(self, schema: dict[str, Any]) -> None:
        by_name = schema.get("patternProperties")
        for pattern in (schema.get("pattern"), *(by_name if isinstance(by_name, dict) else ())):
            if isinstance(pattern, str) and LOOK_AROUND.search(pattern):
                short = repr(pattern[:MAX_LENGTH])
                raise ValueError(f"{self._name} has look-around in the pattern {short}, which is not supported; leave it out")

    def _follow(self, reference: Any, base: str, pointers_only: bool) -> None:
        if pointers_only and isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            raise self._refused(reference, "which this grammar backend does not resolve")
        resource, fragment = _split(reference, base)
        if resource not in self._resources:
            raise self._refused(reference, "which is outside of the schema")
        if fragment and not fragment.startswith("/"):
            if (resource, fragment) not in self._anchors:
                raise self._refused(reference, "which points to no part of the schema")
            return
        target = _at(self._resources[resource], fragment)
        if not isinstance(target, dict | bool):
            raise self._refused(reference, "which points to no part of the schema")
        self._collect(target, resource)

    def _collect(self, schema: Any, base: str) -> None:
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if isinstance(schema.get("$id"), str):
            address, name = _split(schema["$id"], base)
            base = base if address is None else address
            self._resources.setdefault(base, schema)
            self._anchors.add((base, name))  # the form up to draft 7
        self._anchors.update((base, schema[keyword]) for keyword in ANCHORS if isinstance(schema.get(keyword), str))
        self._schemas.append((schema, base))
        for subschema in _list_subschemas(schema):
            self._collect(subschema, base)

    def _refused(self, reference: Any, reason: str) -> ValueError:
        shown = reference[:MAX_LENGTH] if isinstance(reference, str) else reference
        remedy = "move its target into the schema's $defs and refer to it as '#/$defs/NAME'"
        return ValueError(f"{self._name} has the $ref {shown!r}, {reason}; {remedy}")


def _list_subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            yield from value.values()
        elif key in SCHEMAS:
            yield from value if isinstance(value, list) else (value,)


def _split(reference: Any, base: str) -> tuple[str | None, str]:
    """The address of a resource (None: invalid) and the fragment."""
    try:
        address = base + reference if reference.startswith("#") else urljoin(base, reference)
    except (AttributeError, ValueError):
        return None, ""
    resource, _, fragment = address.partition("#")
    return resource, unquote(fragment)


def _at(node: Any, pointer: str) -> Any:
    """The target of a JSON pointer. None: no target."""
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isascii() and name.isdigit():
            node = node[int(name)] if int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node


def _schemas_of_tag(node: Any) -> Iterator[Any]:
    """The schemas of a structural tag; each is a document of its own."""
    if isinstance(node, list):
        for each in node:
            yield from _schemas_of_tag(each)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("json_schema", "schema"):
                yield value
            else:
                yield from _schemas_of_tag(value)
