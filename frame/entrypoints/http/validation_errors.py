"""What is wrong with a client's JSON, in a sentence for the client: msgspec's words, made plain. Knows no route."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from frame.entrypoints.http.errors import ApiError

_MISSING, _CUT = "Object missing required field ", "Input data was truncated"  # msgspec's words
_WRONG_TYPE = re.compile(r"Expected `([a-z |]+)`, got `([a-z]+)`")
_OF_KEY = " - at `key` in `$"
_TOO_LONG = re.compile(r"Expected `(str|object|array)` of length <= (\d+)")
_COUNTED: Mapping[str, str] = MappingProxyType({"str": "characters", "object": "pairs", "array": "entries"})
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "str": "a string",
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "array": "a list",
        "object": "an object",
        "null": "null",
    }
)
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def misfit(error: msgspec.ValidationError, root: str | None = None) -> ApiError:
    """Of JSON whose fields do not fit. `root` is the place of what was read, None: the body."""
    text, _, path = str(error).replace(_OF_KEY, " - at `$").partition(" - at `$")
    param = f"{root or ''}{path.rstrip('`')}".lstrip(".") or None
    if text.startswith(_MISSING):
        missing = text.removeprefix(_MISSING).strip("`")
        return ApiError(400, f"{missing} is missing; send it", f"{param}.{missing}" if param else missing)
    place = f"a key of {param}" if _OF_KEY in str(error) else param or "the body"
    if wrong := _WRONG_TYPE.fullmatch(text):
        wanted, got = wrong[1].split(" | "), _TYPES.get(wrong[2], wrong[2])
        choices = [_TYPES.get(each, each) for each in wanted if each != "null" or len(wanted) == 1]
        return ApiError(400, f"{place} is {got}; send {' or '.join(choices)}", param)
    if long := _TOO_LONG.fullmatch(text):
        return ApiError(400, f"{place} has more than {long[2]} {_COUNTED[long[1]]}; send fewer", param)
    return ApiError(400, f"{place}: {text}", param)


def unreadable(data: bytes, error: Exception) -> ApiError:
    """Of bytes that are no JSON."""
    if data.startswith(_MARKS):
        reason = "it begins with a byte-order mark; send plain UTF-8"
    elif isinstance(error, UnicodeDecodeError):
        reason = "it is no UTF-8"
    elif str(error) == _CUT:
        reason = "it ends too early"
    else:
        reason = str(error).removeprefix("JSON is malformed: ")
    return ApiError(400, f"the body is not valid JSON: {reason}")
