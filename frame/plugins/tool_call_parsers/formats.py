"""Builds the grammar of tool calls, as a structural tag, from the format of one call. Knows no
model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from frame.interfaces.parsing import CallRule, Format, Function

Tag = Callable[[Function, Format], Format]  # (function, format of its arguments) -> format of the call


def arguments_of(function: Function, rule: CallRule, style: str = "json") -> Format:
    """The format of the arguments: the schema if the call is required or the function is strict,
    else any object."""
    schema = function.parameters if rule.is_required or function.is_strict else {"type": "object"}
    arguments: Format = {"type": "json_schema", "json_schema": schema}
    return arguments if style == "json" else {**arguments, "style": style}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def either(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def several(calls: Sequence[Format], separator: str, rule: CallRule) -> Format:
    """One or more calls and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": list(calls),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not rule.is_parallel,
    }


def within_text(trigger: str, calls: Sequence[Format], rule: CallRule) -> Format:
    """Free text in which `trigger` begins one of `calls`."""
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(calls), "stop_after_first": not rule.is_parallel}


def marked(rule: CallRule, call: Tag, trigger: str, separator: str) -> Format:
    """Calls with marks of their own: only calls if they are required, else within text."""
    calls = [call(function, arguments_of(function, rule)) for function in rule.functions]
    return several(calls, separator, rule) if rule.is_required else within_text(trigger, calls, rule)
