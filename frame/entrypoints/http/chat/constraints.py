"""What constrains the output of a request: structured outputs and tools.

Turns the constraint fields of a request into sampling parameters: OpenAI's `response_format`,
vLLM's `guided_*` and `structured_outputs`, SGLang's `regex`, `ebnf` and `json_schema`. Validates
`tools`, `tool_choice` and `parallel_tool_calls`, and the JSON schemas of tools. Used by the request
schemas and the output parsers. Must not depend on a grammar backend, a parser plugin or a request
schema of one API.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams, whitespace_fields
from frame.entrypoints.http.chat.older_tags import to_current_form
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.protocol.fields import check_nested_fields
from frame.entrypoints.http.request_body import SamplingFields
from frame.entrypoints.http.validation_errors import type_name
from frame.interfaces.parsing import CallRule, Format, Function

# field of structured_outputs -> sampling parameter
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
GRAMMAR_PARAMS = frozenset(_STRUCTURED.values())  # sampling parameters that constrain the output
# field of the body -> sampling parameter
_FIELDS = {
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "regex": "regex",
    "guided_regex": "regex",
    "ebnf": "ebnf",
    "guided_grammar": "ebnf",
    "guided_choice": "choice",
    "structural_tag": "structural_tag",
}
# further fields of structured_outputs; there is no fallback that `disable_fallback` could switch
# off
_SWITCHES = ("disable_any_whitespace", "disable_fallback", "whitespace_pattern")
_FORMATS = "text, json_object, json_schema or structural_tag"
# response_format.type -> the fields that it may have; `structures` and `triggers` are SGLang's
# older form
FORMAT_FIELDS = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
    "structural_tag": ("type", "format", "structures", "triggers"),
}
SCHEMA_FIELDS = ("name", "description", "schema", "strict")  # of a JSON schema format


def constraint_params(fields: SamplingFields, response_format: dict[str, Any] | None) -> dict[str, Any]:
    """The sampling parameters that constrain the output, by name. Raises ApiError 400 that names
    the field, also for more than one constraint."""
    constraints = list(_constraints(fields, response_format))
    if len(constraints) > 1:
        names = [sent for sent, _, _ in constraints]
        raise ApiError(400, f"{' and '.join(names)} exclude each other; keep one", names[0])
    structured = fields.structured_outputs or {}
    switch, pattern = structured.get("disable_any_whitespace"), structured.get("whitespace_pattern")
    switches = {} if switch is None else {"disable_any_whitespace": switch}
    if fields.guided_whitespace_pattern is not None:
        pattern = fields.guided_whitespace_pattern
    if pattern is not None:
        switches["whitespace_pattern"] = pattern
    return switches | {parameter: value for _, parameter, value in constraints}


def sent_constraint(fields: SamplingFields, response_format: dict[str, Any] | None, parameter: str) -> str:
    """The field that the client sent for a sampling parameter that constrains the output. The
    server writes a structural tag of its own around the other constraints, and around tools."""
    sent_names = {parameter: sent for sent, parameter, _ in _constraints(fields, response_format)}
    return sent_names.get(parameter) or (next(iter(sent_names.values()), "tools") if parameter == "structural_tag" else parameter)


def _constraints(fields: SamplingFields, response_format: dict[str, Any] | None) -> Iterator[tuple[str, str, Any]]:
    """The field, the sampling parameter and its value of each constraint. Raises ApiError 400."""
    for parameter, value in _response_format(response_format or {}).items():
        yield "response_format", parameter, value
    if fields.structured_outputs:
        yield _structured_outputs(fields.structured_outputs)
    for sent, parameter in _FIELDS.items():
        value = getattr(fields, sent)
        if value is not None:
            yield sent, parameter, _parameter(sent, parameter, value)


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    kind = form.get("type", "text")
    if not isinstance(kind, str) or kind not in FORMAT_FIELDS:
        raise ApiError(400, f"response_format.type is {quoted(kind)}; it must be {_FORMATS}", "response_format")
    check_nested_fields("response_format", form, FORMAT_FIELDS[kind])
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": _text(to_current_form(form, "response_format"))}
    holder = form.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or not isinstance(schema, dict):
        raise ApiError(400, "response_format.json_schema.schema: expected an object", "response_format")
    check_nested_fields("response_format.json_schema", holder, SCHEMA_FIELDS)
    return {"json_schema": _text(schema)}


def _structured_outputs(fields: dict[str, Any]) -> tuple[str, str, Any]:
    switch = fields.get("disable_any_whitespace")
    if switch is not None and not isinstance(switch, bool):
        raise ApiError(400, "structured_outputs.disable_any_whitespace: expected true or false", "structured_outputs")
    if not isinstance(fields.get("whitespace_pattern"), str | None):
        raise ApiError(400, "structured_outputs.whitespace_pattern: expected a string", "structured_outputs")
    check_nested_fields("structured_outputs", fields, (*_STRUCTURED, *_SWITCHES))
    known = {name: value for name, value in fields.items() if name in _STRUCTURED and value is not None and value is not False}
    if len(known) != 1:
        raise ApiError(400, f"structured_outputs must have exactly one of {', '.join(_STRUCTURED)}", "structured_outputs")
    ((name, value),) = known.items()
    sent = f"structured_outputs.{name}"
    return sent, _STRUCTURED[name], _parameter(sent, _STRUCTURED[name], value)


def _parameter(sent: str, parameter: str, value: Any) -> Any:
    if parameter == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise ApiError(400, f"{sent} is {quoted(value)}; it must be a list of strings", sent)
        return tuple(value)
    if parameter == "json_object":
        return bool(value)
    if parameter == "structural_tag" and isinstance(value, str) and '"structures"' in value:
        value = _object(sent, value)
    if isinstance(value, dict) and parameter in ("json_schema", "structural_tag"):
        return _text(to_current_form(value, sent) if parameter == "structural_tag" else value)
    if not isinstance(value, str):
        raise ApiError(400, f"{sent} is {type_name(value)}; send a string", sent)
    return value


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def to_format(params: SamplingParams) -> Format | None:
    """The constraint of `params` as a structural-tag format; None without a constraint. Raises
    ApiError 400 for a JSON schema or structural tag that is not a JSON object."""
    if params.grammar is None:
        return None
    kind, source = params.grammar
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": _object(kind, source)}
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if kind == "regex":
        return {"type": "regex", "pattern": source}
    if kind == "ebnf":
        return {"type": "grammar", "grammar": source}
    if kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in params.choice or ()]}
    form = _object(kind, source).get("format")
    if not isinstance(form, dict):
        raise ApiError(400, "structural_tag.format: expected an object", "structural_tag")
    return form


def replace_constraint(params: SamplingParams, form: Format) -> SamplingParams:
    """`params` with the structural-tag format `form` in place of their own constraint."""
    if not params.disable_any_whitespace or params.whitespace_pattern is not None:
        form = _spaced(form, whitespace_fields(params.whitespace_pattern))
    source = _text({"type": "structural_tag", "format": form})
    none = dict.fromkeys(("json_schema", "regex", "ebnf", "choice", "whitespace_pattern"))
    return msgspec.structs.replace(params, **none, json_object=False, structural_tag=source)


def _spaced(form: Any, fields: Mapping[str, Any]) -> Any:
    """The format with whitespace allowed between JSON tokens, where it does not bound it itself."""
    if isinstance(form, list):
        return [_spaced(each, fields) for each in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") == "json_schema":
        return {**fields, **form}
    return {key: _spaced(value, fields) for key, value in form.items()}


def _object(kind: str, source: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, f"{kind} is not a JSON object; send one", kind)
    return value


# tools --------------------------------------------------------------------------------------------

MAX_TOOLS = 128  # OpenAI's limit
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = "auto, none, required, or a function: {'type': 'function', 'function': {'name': …}}"

MAX_SUBSCHEMAS = 2048  # subschemas of one request that are checked before the grammar is compiled
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

    Checks at most `MAX_SUBSCHEMAS` subschemas, because this runs on the event loop. The grammar
    compiler checks all of them.
    """
    waiting = list(schemas)
    for _ in range(MAX_SUBSCHEMAS):
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
            waiting += [(each, f"{here}.{key}.{name}") for name, each in islice((schema.get(key) or {}).items(), MAX_SUBSCHEMAS)]
        for key in _LISTS:
            waiting += [(each, f"{here}.{key}[{i}]") for i, each in enumerate(islice(schema.get(key) or (), MAX_SUBSCHEMAS))]
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
