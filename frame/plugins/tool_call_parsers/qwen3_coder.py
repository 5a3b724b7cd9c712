"""`qwen3_coder`: tool calls of Qwen3-Coder:
`<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`.

Values are plain text; what type they have is said by the function's schema. A parameter is passed
on when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from frame.interfaces.parsing import CallRule, Format, Function, ParserContext
from frame.plugins.tool_call_parsers.formats import arguments_of, optional, sequence, several, tag, text, within_text
from frame.plugins.tool_call_parsers.machine import Machine

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_LENGTH = 256

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


class Qwen3Coder(Machine):
    """Parses the tags. The outer tag may be missing; a block without a function is content."""

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._schemas: dict[str, dict[str, Any]] = {}
        self._name = ""
        self._key = ""
        self._has_arguments = False

    def begin(self, functions: Sequence[Function]) -> None:
        super().begin(functions)
        self._schemas = {function.name: function.parameters for function in functions}

    def grammar(self, rule: CallRule) -> Format:
        calls = [self._call(function, rule) for function in rule.functions]
        return several(calls, "\n", rule) if rule.is_required else within_text(OPEN, calls, rule)

    @staticmethod
    def _call(function: Function, rule: CallRule) -> Format:
        arguments = sequence(arguments_of(function, rule, style="qwen_xml"), text("\n"))
        if not function.parameters.get("required"):
            arguments = optional(arguments)
        return tag(f"{OPEN}\n{FUNCTION}{function.name}>\n", arguments, f"{FUNCTION_END}\n{CLOSE}")

    def start(self) -> bool:
        return self.emit_until(OPEN, FUNCTION) is not None and self.set_state(self._header)

    def _header(self) -> bool:
        """State: `held` is whitespace, one of the tags, and the start of `<function=NAME>`."""
        match = _HEADER.match(self.held, 0, MAX_NAME_LENGTH)
        if match is not None:
            self._name, self._has_arguments = match["name"], False
            self.take_held(match.end())
            self.start_call(self._name, "{")
            return self.set_state(self._parameters)
        if len(self.held) < MAX_NAME_LENGTH and _HEADER_BEGINS.fullmatch(self.held):
            return False
        self.emit_content(self.take_held(self.held.index("<") + 1))
        return self.set_state(self.start)

    def _parameters(self) -> bool:
        mark = self.drop_until(PARAMETER, FUNCTION_END, CLOSE)
        if mark is None:
            return False
        if mark != PARAMETER:
            self.emit_arguments("}")
            return self.set_state(self._after)
        end = self.held.find(">", 0, MAX_NAME_LENGTH)
        if end < 0:
            if len(self.held) >= MAX_NAME_LENGTH:
                self.take_held(len(mark))
                return True
            return False
        self._key = self.take_held(end + 1)[len(PARAMETER) : -1].strip()
        return self.set_state(self._value)

    def _value(self) -> bool:
        nearest = self.find_mark(PARAMETER_END, PARAMETER, FUNCTION_END)
        if nearest is None:
            return False
        place, mark = nearest
        value = self.take_held(place).removeprefix("\n").removesuffix("\n")
        if mark == PARAMETER_END:
            self.take_held(len(mark))
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(self._key) if isinstance(properties, dict) else None
        if isinstance(schema, dict) and value.strip() in _list_constants(schema):
            value = value.strip()  # whitespace around an enum value has no meaning
        types = _types(schema)
        comma = ", " if self._has_arguments else ""
        self.emit_arguments(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {_as_json(value, types)}")
        self._has_arguments = True
        return self.set_state(self._parameters)

    def _after(self) -> bool:
        """State: drop the text up to the closing tag or the next function."""
        if self.held.startswith(FUNCTION_END):
            self.take_held(len(FUNCTION_END))
        return self.end_call(CLOSE, OPEN, FUNCTION)

    def end(self) -> None:
        if self.read in (self.start, self._header):
            self.emit_content(self.held)


_HEADER = re.compile(rf"\s*(?:{OPEN}\s*)?{FUNCTION}(?P<name>[^<>\s]+)\s*>")
_STARTS = "|".join(re.escape(FUNCTION[:size]) for size in range(len(FUNCTION), 0, -1))
_HEADER_BEGINS = re.compile(rf"\s*(?:{OPEN}\s*(?:{_STARTS})?|{FUNCTION})(?:(?<==)[^<>\s]*\s*)?")


def _list_constants(schema: dict[str, Any]) -> list[Any]:
    """The values that the schema lists."""
    values = schema.get("enum")
    return [*(values if isinstance(values, list) else ()), schema.get("const")]


def _types(schema: Any) -> frozenset[str]:
    """The JSON types of a value. Empty: the schema has none."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    for value in schema.get("enum", ()) if isinstance(schema.get("enum"), list) else ():
        types.add(_NAMES.get(type(value), "string"))
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            types |= _types(branch)
    if "$ref" in schema and not types:
        types = {"object", "array", "number", "integer", "boolean", "null", "string"}
    return frozenset(name for name in types if isinstance(name, str))


def _as_json(source: str, types: frozenset[str]) -> str:
    """The JSON form of a value: its text if that is of one of `types`, else a string."""
    if types - {"string"}:
        try:
            value = json.loads(source, parse_constant=_refuse)
            json.dumps(value, allow_nan=False)  # 1e999 is infinite
        except (ValueError, RecursionError):
            value = {"true": True, "false": False, "none": None}.get(source.strip().lower(), source)
        name = _NAMES.get(type(value), "")
        fits = name in types or (name == "integer" and "number" in types) or (name == "number" and "integer" in types)
        if name != "string" and fits:
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(source, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
