"""Structured outputs: turns the constraint fields of a request into sampling parameters.

Reads OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`, SGLang's `regex`,
`ebnf` and `json_schema`. Used by the request schemas and the output parsers. Must not depend on a
grammar backend or on a request schema of one API.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from frame.core.interfaces.parsing import Format
from frame.core.interfaces.sampling_params import MAX_JSON_WHITESPACE, SamplingParams
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.protocol.fields import check_nested_fields
from frame.entrypoints.http.request_body import SamplingFields
from frame.entrypoints.http.validation_errors import type_name

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
_SWITCHES = ("disable_any_whitespace", "disable_fallback")
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
    switch = (fields.structured_outputs or {}).get("disable_any_whitespace")
    switches = {} if switch is None else {"disable_any_whitespace": switch}
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
        return {"structural_tag": _text(form)}
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
    if isinstance(value, dict) and parameter in ("json_schema", "structural_tag"):
        return _text(value)
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
    form = form if params.disable_any_whitespace else _spaced(form)
    source = _text({"type": "structural_tag", "format": form})
    return msgspec.structs.replace(params, json_schema=None, json_object=False, regex=None, ebnf=None, choice=None, structural_tag=source)


def _spaced(form: Any) -> Any:
    """The format with whitespace allowed between JSON tokens, where it does not bound it itself."""
    if isinstance(form, list):
        return [_spaced(each) for each in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") == "json_schema":
        return {"max_whitespace_cnt": MAX_JSON_WHITESPACE, **form}
    return {key: _spaced(value) for key, value in form.items()}


def _object(kind: str, source: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, f"{kind} is not a JSON object; send one", kind)
    return value
