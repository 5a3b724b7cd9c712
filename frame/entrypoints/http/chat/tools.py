"""Validates `tools`, `tool_choice` and `parallel_tool_calls`, and the JSON schemas of tools. Used
by the request schemas. Must not depend on a parser plugin or the engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from frame.core.interfaces.parsing import CallRule, Function
from frame.entrypoints.http.errors import ApiError, quoted

MAX_TOOLS = 128  # OpenAI's limit
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = "auto, none, required, or a function: {'type': 'function', 'function': {'name': …}}"

MAX_PARTS = 2048  # subschemas of one request that are checked before the grammar is compiled
# JSON Schema: the types, and the keywords that hold schemas by name, in a list, or one schema.
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not")
_KEYWORDS: Mapping[str, type] = {
    **dict.fromkeys(_MAPS, dict),
    **dict.fromkeys(_LISTS, list),
    "required": list,
    "enum": list,
    "$ref": str,
    "pattern": str,
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request whose output may hold tool calls."""

    tools: list[dict[str, Any]]  # as sent, for the chat template
    rule: CallRule  # which functions may, or must, be called

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar must constrain the output: a required call, or a strict function."""
        return self.rule.is_required or any(function.is_strict for function in self.rule.functions)


def resolve_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, is_parallel: bool | None) -> ToolUse | None:
    """The tools and the rule for calls; None without tools, or where the choice is `none`. Raises
    ApiError 400 for an invalid tool or tool choice."""
    tools_sent = tools or []
    if len(tools_sent) > MAX_TOOLS:
        raise ApiError(400, f"tools has {len(tools_sent)} functions; it may have {MAX_TOOLS}", "tools")
    functions = {function.name: function for function in (_function(tool, f"tools[{place}]") for place, tool in enumerate(tools_sent))}
    if len(functions) < len(tools_sent):
        raise ApiError(400, "tools has two functions of the same name; give each its own name", "tools")
    allowed, is_required = _allowed_names(choice, list(functions))
    if choice == "none" or not functions:
        return None
    # One call, even with parallel_tool_calls
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    rule = CallRule(tuple(functions[name] for name in dict.fromkeys(allowed)), is_required, is_parallel is not False and not is_named)
    return ToolUse(tools_sent, rule)


def resolve_functions(functions: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> ToolUse | None:
    """Like `resolve_tools`, for OpenAI's deprecated `functions` and `function_call`: at most one
    call. Raises ApiError 400."""
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "auto", "none"):
        raise ApiError(400, f"function_call is {quoted(choice)}; it must be auto, none or {{'name': …}}", "function_call")
    with rename_error_params({".function": "", "tool_choice": "function_call", "tools": "functions"}):
        return resolve_tools([{"type": "function", "function": function} for function in functions or ()], choice, is_parallel=False)


@contextmanager
def rename_error_params(places: Mapping[str, str]) -> Iterator[None]:
    """Rename parts of field paths in errors raised inside: `places`, ours -> theirs."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        for ours, theirs in places.items():
            param = param.replace(ours, theirs)
        raise (error.with_param(param) if param else error) from None


def check_schemas(schemas: Iterable[tuple[Any, str]]) -> None:
    """Check (JSON schema, field path) pairs. Raises ApiError 400 for the first wrong keyword value.

    Checks at most `MAX_PARTS` subschemas, because this runs on the event loop. The grammar
    compiler checks all of them.
    """
    waiting = list(schemas)
    for _ in range(MAX_PARTS):
        if not waiting:
            return
        schema, here = waiting.pop()
        if schema is None or isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise ApiError(400, f"{here}: expected a JSON schema, an object or true or false", here)
        kinds = schema.get("type")
        for kind in kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]:
            if kind not in _TYPES:
                raise ApiError(400, f"{here}.type is {quoted(kind)}; it must be one of {', '.join(_TYPES)}", f"{here}.type")
        for key, json_type in _KEYWORDS.items():
            if schema.get(key) is not None and not isinstance(schema[key], json_type):
                name = "an object" if json_type is dict else "a list" if json_type is list else "a string"
                raise ApiError(400, f"{here}.{key}: expected {name}", f"{here}.{key}")
        for key in _MAPS:
            waiting += [(each, f"{here}.{key}.{name}") for name, each in islice((schema.get(key) or {}).items(), MAX_PARTS)]
        for key in _LISTS:
            waiting += [(each, f"{here}.{key}[{i}]") for i, each in enumerate(islice(schema.get(key) or (), MAX_PARTS))]
        waiting += [(schema[key], f"{here}.{key}") for key in _SCHEMAS if key in schema and not isinstance(schema[key], list)]


def _allowed_names(choice: str | dict[str, Any] | None, names: list[str]) -> tuple[list[str], bool]:
    """(names of the functions that may be called, whether a call is required)."""
    if choice in (None, "auto", "none"):
        return names, False
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        holder = choice.get("allowed_tools", choice)
        allowed = [_function_name(tool) for tool in holder.get("tools") or ()] if isinstance(holder, dict) else []
        is_required = isinstance(holder, dict) and holder.get("mode") == "required"
    elif isinstance(choice, dict):
        allowed, is_required = [_function_name(choice)], True
    elif choice == "required":
        allowed, is_required = names, True
    else:
        raise ApiError(400, f"tool_choice is {quoted(choice)}; it must be {_CHOICES}", "tool_choice")
    if not allowed:
        raise ApiError(400, "tool_choice requires a call, but there are no tools; send tools too", "tool_choice")
    for name in allowed:
        if name not in names:
            raise ApiError(400, f"tool_choice names the function {quoted(name)}, which is not among tools; add it there", "tool_choice")
    return allowed, is_required


def _function_name(choice: Any) -> str:
    holder = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = holder.get("name") if isinstance(holder, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, f"tool_choice is {quoted(choice)}; it must be {_CHOICES}", "tool_choice")
    return name


def _function(tool: dict[str, Any], place: str) -> Function:
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind != "function":
        raise ApiError(400, f"{place}.type is {quoted(kind)}; only tools of type function are supported", f"{place}.type")
    if not isinstance(function, dict):
        wrong = "is missing" if function is None else "is not an object"
        form = "{'type': 'function', 'function': {'name': …, 'parameters': …}}"
        raise ApiError(400, f"{place}.function {wrong}; send the tool as {form}", f"{place}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        sentence = f"{place}.function.name: expected 1 to 128 letters, digits or characters of _ - . : /, got {quoted(name)}"
        raise ApiError(400, sentence, f"{place}.function.name")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(400, f"{place}.function.parameters: expected a JSON schema object", f"{place}.function.parameters")
    for key, kind in (("properties", dict), ("required", list)):
        if parameters and not isinstance(parameters.get(key) or kind(), kind):
            where = f"{place}.function.parameters.{key}"
            raise ApiError(400, f"{where}: expected {'an object' if kind is dict else 'a list'}", where)
    schema = parameters or {"type": "object", "properties": {}}
    return Function(name, schema if "type" in schema else {"type": "object", **schema}, function.get("strict") is True)
