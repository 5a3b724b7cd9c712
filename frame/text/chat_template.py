"""Renders chat messages to prompt text with the checkpoint's Jinja template, in an immutable
sandbox.

Used by `Tokenizer`. Must not know HTTP. Arguments of clients reach the template as variables, never
as options.
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

from frame.core.errors import CheckpointError
from frame.text.joined_turns import join_turns
from frame.text.named_file import read_named
from frame.text.template_sandbox import LARGEST_TEXT, TemplateSandbox, TemplateTimeoutError
from frame.text.tool_prompt import as_plain_messages

MAX_REASON_CHARS = 200  # of an error of Python
LARGEST_INDENT = 64  # characters
MAX_TIME = 20.0  # seconds of rendering
TEMPLATE = "chat_template"  # the argument with a template of the request; callers allow it for trusted clients only
RESERVED = frozenset({"messages", "tools", TEMPLATE})
PROBE = "frame probe"  # a text that no template writes itself
CUT = "\u2063cut here\u2063"  # marks the end of a message to be continued, while the template is rendered


class ChatTemplateError(ValueError):
    """The template refused the messages, or there is no template. The sentence is for the
    client."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's turns for training:
    renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `special_tokens` (bos_token, eos_token, …) are variables in it. `file`:
    where it comes from. Raises CheckpointError if it is invalid."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None, file: str | Path = "") -> None:
        self.source = source
        self._sandbox = environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
            reason = describe_compile_error(error)
            where = f"{file}: " if file else ""
            raise CheckpointError(f"{where}the chat template does not compile: {reason}; give another with --chat-template") from error
        self._special_tokens = dict(special_tokens or {})
        self._has_developer = "developer" in source
        self._has_tools = "tool" in source
        self.takes_strings = True  # as `content`; templates that read parts only leave a string out

    def probe_strings(self) -> None:
        """Find `takes_strings`, by rendering a short message."""
        rendered = []
        for content in (PROBE, [_text_part(PROBE)]):
            try:
                rendered.append(self.render([{"role": "user", "content": content}]))
            except ChatTemplateError:
                return
        self.takes_strings = PROBE in rendered[0] or PROBE not in rendered[1]

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: dict[str, Any] | None = None,
    ) -> str:
        """Render the prompt. `arguments` may have `continue_final_message` (the prompt ends within
        the last message, which the model continues) and `add_generation_prompt`. Raises
        ChatTemplateError with the template's own message."""
        arguments = dict(arguments or {})
        continues = bool(arguments.pop("continue_final_message", False))
        add_generation_prompt = bool(arguments.pop("add_generation_prompt", add_generation_prompt and not continues))
        if continues:
            messages = _to_be_continued(messages, add_generation_prompt)
        taken = RESERVED & set(arguments)
        if taken:
            raise ChatTemplateError(f"chat_template_kwargs may not set {', '.join(sorted(taken))}; use the request's own fields")
        if not self._has_tools:
            messages, tools = as_plain_messages(messages, tools), None
        if not self._has_developer:  # OpenAI's newer name of the system role; most templates lack it
            messages = [{**message, "role": "system"} if message.get("role") == "developer" else message for message in messages]
        if not self.takes_strings:
            messages = [
                {**each, "content": [_text_part(text)]} if isinstance(text := each.get("content"), str) else each for each in messages
            ]
        variables = {**self._special_tokens, "documents": None, **arguments}
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            try:
                text = self._write(messages=messages, **variables)
            except jinja2.TemplateError:  # many templates take one system message, and turns that alternate
                if (joined := join_turns(messages)) == messages:
                    raise
                text = self._write(messages=joined, **variables)
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except MemoryError:
            raise ChatTemplateError("the chat template needs more memory for these messages than there is; send less") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template cannot read these messages: {error}") from error
        if continues and CUT not in text:
            raise ChatTemplateError("the chat template leaves out the message that is to be continued; leave continue_final_message out")
        return text.rpartition(CUT)[0] if continues else text

    def _write(self, **variables: Any) -> str:
        """The template's output, whose size and time are limited."""
        pieces: list[str] = []
        size = 0
        try:
            with self._sandbox.limit_time(MAX_TIME):
                for piece in self._template.generate(**variables):
                    _ = self._sandbox.tick
                    pieces.append(piece)
                    size += len(piece)
                    if size > LARGEST_TEXT:
                        raise ChatTemplateError(
                            f"the chat template renders these messages to more than {LARGEST_TEXT} characters; send less"
                        )
        except TemplateTimeoutError:
            raise ChatTemplateError(f"the chat template took more than {MAX_TIME:g} s for these messages; send less") from None
        return "".join(pieces)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _to_be_continued(messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[dict[str, Any]]:
    """The messages with a mark after the text of the last one."""
    last = messages[-1] if messages else {}
    if add_generation_prompt:
        raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other; keep one")
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise ChatTemplateError("continue_final_message needs a last message of the assistant with text to continue")
    return [*messages[:-1], {**last, "content": last["content"] + CUT}]


def describe_compile_error(error: BaseException) -> str:
    """The reason in one line. Only Jinja's own errors speak of the template: the others are of the
    Python code that Jinja makes of it, whose limits on nesting are lower than Jinja's."""
    if isinstance(error, jinja2.TemplateError):
        return str(error)
    if isinstance(error, ValueError):  # a number of more digits than Python converts, or a text that is not Unicode
        return " ".join(str(error).split())[:MAX_REASON_CHARS]
    return "its expressions or blocks are nested too deep"


def find_file(folder: Path) -> Path:
    """The file of a checkpoint that holds its template, if any."""
    names = ("chat_template.jinja", "chat_template.json")
    return next((folder / name for name in names if (folder / name).is_file()), folder / "tokenizer_config.json")


def find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the source of a checkpoint's template, from `chat_template.jinja`,
    `chat_template.json`, or `config`, the content of `tokenizer_config.json`. Raises
    CheckpointError if it cannot be read."""
    file = find_file(folder)
    try:
        if file.suffix == ".jinja":
            return file.read_text(encoding="utf-8")
        template = (json.loads(file.read_text(encoding="utf-8")) if file.name == "chat_template.json" else config).get("chat_template")
        if isinstance(template, list):  # several named templates
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default", next(iter(named.values()), None))
        if template is not None and not isinstance(template, str):
            raise TypeError(f"it is a {type(template).__name__}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} holds no chat template that can be read ({error}); give another with --chat-template") from error
    return template


def read_template(file: str) -> str:
    """Read the template that `text.chat_template` names. Raises ConfigError if it cannot be
    read."""
    return read_named("text.chat_template", file, "name a file with a Jinja template")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes for HTML, which is wrong in a prompt.
    spaces = [len(each) if isinstance(each, str) else each for each in (indent or 0, *(separators or ()))]
    if max(spaces) > LARGEST_INDENT:
        raise jinja2.TemplateError(f"tojson indents by more than {LARGEST_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
