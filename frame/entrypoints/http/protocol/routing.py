"""`PathIndex`: finds the endpoint of a method and a path. `decode_path` refuses paths that two
readers could read differently.

Used by the application and by the server of the start phase. Must not depend on keys: routes
declare who may use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

from frame.entrypoints.http.errors import ApiError

E = TypeVar("E")
ENCODED_SLASH = "\0"  # stands for it in a decoded path, where no other NUL can be: it separates no segments
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_SLASH_ESCAPE = re.compile(rb"%2f", re.IGNORECASE)
_PARAMETER = re.compile(r"{(\w+)(:path)?}")


def decode_path(raw: bytes) -> str:
    """The path, percent escapes decoded once. Raises ApiError 400."""
    if b"%" not in raw and raw.isascii():
        path = raw.decode("ascii")
    else:
        if BAD_ESCAPE.search(raw):
            raise ApiError(400, "the path has a % that two hexadecimal digits do not follow; write %25 for a percent sign")
        try:
            pieces = [unquote_to_bytes(piece).decode() for piece in _SLASH_ESCAPE.split(raw)]
        except UnicodeDecodeError:
            raise ApiError(400, "the path is not valid UTF-8; percent-encode its UTF-8 bytes") from None
        if any(_CONTROL.search(piece) for piece in pieces):
            raise _control_character()
        return ENCODED_SLASH.join(pieces)
    if _CONTROL.search(path):
        raise _control_character()
    return path


def _control_character() -> ApiError:
    return ApiError(400, "the path contains a control character; leave it out")


@dataclass(frozen=True, slots=True)
class PathMatch(Generic[E]):
    """The endpoints of a path by method, and the path's parameters."""

    endpoints: dict[str, E]
    parameters: dict[str, str]

    def endpoint(self, method: str) -> E | None:
        """The endpoint for a method. HEAD is GET: the protocol leaves the body out."""
        return self.endpoints.get("GET" if method == "HEAD" else method)

    def methods(self) -> list[str]:
        """The methods that the path takes."""
        return sorted({*self.endpoints, *(["HEAD"] if "GET" in self.endpoints else [])})


class PathIndex(Generic[E]):
    """Paths without parameters are looked up in a dict, then the others are tried in the order of
    the table.

    `{name}` matches one segment, `{name:path}` the rest of the path. A single trailing slash makes
    no difference.
    """

    def __init__(self, rows: Iterable[tuple[str, Iterable[str], E]]) -> None:
        self._exact: dict[str, dict[str, E]] = {}
        patterns: dict[str, dict[str, E]] = {}
        for path, methods, endpoint in rows:
            endpoints = (patterns if "{" in path else self._exact).setdefault(path, {})
            for method in methods:
                if method in endpoints:
                    raise ValueError(f"{method} {path} is declared twice")
                endpoints[method] = endpoint
        self._patterns = [(_compile(path), endpoints) for path, endpoints in patterns.items()]

    def find(self, path: str) -> PathMatch[E] | None:
        """The endpoints of a decoded path; None where there are none. Raises ApiError 400 for an
        encoded slash outside `{name:path}`."""
        if len(path) > 1 and path[-1] == "/" and path[-2] != "/":
            path = path[:-1]
        if (endpoints := self._exact.get(path)) is not None:
            return PathMatch(endpoints, {})
        for pattern, endpoints in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                return PathMatch(endpoints, {name: value.replace(ENCODED_SLASH, "/") for name, value in match.groupdict().items()})
        if ENCODED_SLASH in path:
            raise ApiError(400, "the path contains an encoded slash (%2F); write / where a segment ends")
        return None


def _compile(path: str) -> re.Pattern[str]:
    expression, end = "", 0
    for match in _PARAMETER.finditer(path):
        value = ".+" if match[2] else f"[^/{ENCODED_SLASH}]+"
        expression += re.escape(path[end : match.start()]) + f"(?P<{match[1]}>{value})"
        end = match.end()
    return re.compile(expression + re.escape(path[end:]), re.DOTALL)
