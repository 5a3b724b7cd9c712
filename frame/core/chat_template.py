"""Chat messages to prompt text: the checkpoint's Jinja template in an immutable sandbox, with what templates expect to find there.

Knows no tokenizer but its special tokens' texts, and no HTTP. Arguments of clients reach the template as variables, never as options.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplateError(ValueError):
    """The template refused the messages, or there is no template; the sentence is for the client."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's turns for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `special_tokens` (bos_token, eos_token, …) are variables in it."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}; give another with --chat-template") from error
        self._special_tokens = dict(special_tokens or {})
        self._has_developer = "developer" in source

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises ChatTemplateError with the template's own complaint."""
        taken = RESERVED & set(arguments or {})
        if taken:
            raise ChatTemplateError(f"chat_template_kwargs may not set {', '.join(sorted(taken))}; use the request's own fields")
        if not self._has_developer:  # OpenAI's newer name for the system role, which most templates do not know
            messages = [{**message, "role": "system"} if message.get("role") == "developer" else message for message in messages]
        variables = {**self._special_tokens, "documents": None, **(arguments or {})}
        try:
            text: str = self._template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template cannot read these messages: {error}") from error
        return text


def find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The source of a checkpoint's template: `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`."""
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    boxed = folder / "chat_template.json"
    template = json.loads(boxed.read_text(encoding="utf-8")).get("chat_template") if boxed.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which is wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
