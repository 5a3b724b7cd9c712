"""Turns pydantic's validation errors and JSON decoding errors into `ApiError`: one sentence with
the field and the remedy.

Used by `request_body`, `request_context` and the routes. Must not depend on a route.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf, isfinite
from typing import Any

from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.protocol.bodies import count_names

# pydantic's error type -> the JSON type that the field takes
_TYPE_NAMES: Mapping[str, str] = {
    "string_type": "a string",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "none_required": "null",
}
# pydantic's error type -> the bound's name in its context, and words
_BOUNDS: Mapping[str, tuple[str, str]] = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}
_COUNTED: Mapping[type, str] = {str: "characters", dict: "pairs", list: "entries"}
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
MAX_NAME_CHARS = 64  # of an object's key that a sentence quotes
MAX_SEARCHED = 256 * 1024  # bytes of a body that is read once more to name the field that is at fault
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME_END = re.compile(rb'"[ \t\r\n]*:')
_CUT, _NO_TEXT = "Input data was truncated", "Invalid UTF-8 encoded string"  # msgspec's messages
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def validation_error(errors: Sequence[Mapping[str, Any]], value: Any) -> ApiError:
    """The `ApiError` 400 of pydantic's `errors` about the body `value`.

    A union reports one error for each of its types. The errors of the deepest field count, and
    their types are listed together.
    """
    located = [(_real_path(error, value), error) for error in errors]
    deepest = max(len(path) for path, _ in located)
    path = next(path for path, _ in located if len(path) == deepest)
    same = [error for other, error in located if other == path]
    param = _written(path) or None
    first = same[0]
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing; send it", param)
    is_key = first["loc"][-1:] == ("[key]",)
    place = f"a key of {_written(path[:-1])}" if is_key else param or "the body"
    param = _written(path[:-1]) or None if is_key else param
    names = [_TYPE_NAMES[error["type"]] for error in same if error["type"] in _TYPE_NAMES]
    if names:
        choices = [each for each in dict.fromkeys(names) if each != "null"] or ["null"]
        return ApiError(400, f"{place} is {type_name(first['input'])}; send {' or '.join(choices)}", param)
    return ApiError(400, f"{place}{_sentence(first)}", param)


def _sentence(error: Mapping[str, Any]) -> str:
    """What is wrong, to follow the field's name."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("too_long", "string_too_long"):
        return f" has more than {context['max_length']} {_COUNTED.get(type(error['input']), 'entries')}; send fewer"
    if kind in ("too_many_pairs", "too_large", "not_finite"):
        return f" {error['msg']}"
    if kind == "literal_error":
        return f" is {quoted(error['input'])}; it must be {context['expected']}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f" is {quoted(error['input'])}; it must be {words} {context[name]:g}"
    return f": {error['msg']}"


def _real_path(error: Mapping[str, Any], value: Any) -> tuple[str | int, ...]:
    """The error's location without pydantic's names of union members."""
    path: list[str | int] = []
    for key in error["loc"]:
        if (isinstance(value, dict) and key in value) or (isinstance(value, list | tuple) and isinstance(key, int) and key < len(value)):
            value = value[key]
        else:
            continue
        path.append(key)
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    return tuple(path)


def _written(path: Sequence[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key[:MAX_NAME_CHARS]}" for key in path).lstrip(".")


def type_name(value: Any) -> str:
    """The JSON type of a decoded value, with its article; the value itself where it is null, true
    or false."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "a whole number"
    names: Mapping[type, str] = {str: "a string", float: "a number", list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), "of another type")


def _may_repeat_names(data: bytes, value: Any) -> bool:
    """Whether an object of the JSON text may have a name twice. False is certain: what ends like a
    name is a name, or an escaped quotation mark in a text. Long lists are looked through only where
    the body has objects inside, not for a prompt of token ids."""
    num_ends = sum(1 for _ in _NAME_END.finditer(data))
    if isinstance(value, dict) and num_ends == len(value):
        return False
    return num_ends != _count_kept_names(value)


def repeated_name(data: bytes, value: Any) -> str | None:
    """A name that an object of the JSON text has twice; None without one. `value`: the decoded
    text, which has only the last of both."""
    if not _may_repeat_names(data, value) or count_names(data) == _count_kept_names(value):
        return None
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        seen = set[str]()
        for name, _ in pairs:
            if name in seen and not repeated:
                repeated.append(name)
            seen.add(name)

    json.loads(data, object_pairs_hook=note)
    return repeated[0] if repeated else None


def _count_kept_names(value: Any) -> int:
    count, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            count += len(each)
            each = each.values()
        elif not isinstance(each, list) or {dict, list}.isdisjoint(map(type, each)):  # a long list of token ids
            continue
        waiting += [inner for inner in each if isinstance(inner, dict | list)]
    return count


def repeated_error(name: str, place: str = "the body") -> ApiError:
    """The `ApiError` 400 of a JSON text with a name that is twice in one object. `place`: what the
    text is."""
    name = name[:MAX_NAME_CHARS]
    return ApiError(400, f"{place} has {name} twice in one object; send it once", name)


def invalid_json(data: bytes, error: Exception) -> ApiError:
    """The `ApiError` 400 of a body that is not JSON: it names the field of a number or a text that
    JSON does not have, else it says what `unreadable_json` says."""
    with suppress(ValueError, RecursionError):
        fault = _find_fault(json.loads(data, parse_int=_parse_int)) if len(data) <= MAX_SEARCHED else None
        if fault is not None:
            path, is_number = fault
            number = "is not finite, or beyond the range of 64-bit floating point; send a finite number"
            text = "has half of a surrogate pair (such as \\ud83d alone); send whole characters"
            reason = f"{_written(path) or 'the value'} {number if is_number else text}"
            return ApiError(400, f"the body is not valid JSON: {reason}", _written(path) or None)
    return unreadable_json(data, error)


def _parse_int(text: str) -> int | float:
    """Infinity for a number of more digits than any in range, which Python does not read."""
    return int(text) if len(text) < 400 else inf


def _find_fault(value: Any) -> tuple[tuple[str | int, ...], bool] | None:
    """(the path of the first value that JSON does not have, whether it is a number, not a text);
    None without one."""
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    while waiting:
        each, path = waiting.pop()
        if isinstance(each, float) and not isfinite(each):
            return path, True
        if isinstance(each, str) and _SURROGATE.search(each):
            return path, False
        if isinstance(each, dict):
            if any(map(_SURROGATE.search, each)):  # a name
                return path, False
            waiting += [(inner, (*path, name)) for name, inner in reversed(each.items())]
        elif isinstance(each, list):
            waiting += [(inner, (*path, i)) for i, inner in reversed([*enumerate(each)]) if not isinstance(inner, int)]
    return None


def unreadable_json(data: bytes, error: Exception) -> ApiError:
    """The `ApiError` 400 of a body that is not JSON; `error` is the decoder's."""
    if data.startswith(_BYTE_ORDER_MARKS):
        reason = "it begins with a byte-order mark; send plain UTF-8"
    elif isinstance(error, UnicodeDecodeError) or str(error) == _NO_TEXT:  # up to msgspec 0.22, and from 0.23
        reason = "it is no UTF-8"
    elif _HALF_PAIR.search(data):
        reason = "a string has half of a surrogate pair (such as \\ud83d alone); send whole characters"
    elif str(error) == _CUT:
        reason = "it ends too early"
    else:
        reason = str(error).removeprefix("JSON is malformed: ").partition(" - at ")[0]
    return ApiError(400, f"the body is not valid JSON: {reason}")
