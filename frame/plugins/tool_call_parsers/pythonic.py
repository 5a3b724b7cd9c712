"""Tool calls as a list of Python calls with literal arguments, which is the whole answer: `[f(a=1,
b="x"), g()]` (Llama 4, Llama 3.2).

Nothing is evaluated: the text is parsed, and only literals are taken. A call is passed on when it
is complete; what is no list of calls to offered functions is text.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from typing import Any

from pydantic import BaseModel

from frame.interfaces.parsing import CallRule, Format, Function, ParserContext
from frame.plugins.tool_call_parsers.formats import either, optional, sequence, several, tag, text
from frame.plugins.tool_call_parsers.machine import Machine

MARKS = ("<|python_start|>", "<|python_end|>")
DEEPEST = 64
MAX_HEAD_LENGTH = 256

_HEAD = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*\(")  # the characters of `Function.name`
_HEAD_BEGINS = re.compile(r"\s*(?:[\w.:/-]+\s*)?")
_OUTSIDE = re.compile(r"""[()\[\]{}"']""")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class Pythonic(Machine):
    """Parses a list of calls. `held` starts with the name of the current call."""

    keeps_special_tokens = True

    def __init__(self, context: ParserContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._lead = ""  # emitted if no call follows
        self._name = ""
        self._place = 0  # characters of the call that were read
        self._depth = 0
        self._quote = ""

    def grammar(self, rule: CallRule) -> Format | None:
        if not all(_is_argument(key) for function in rule.functions for key in function.parameters.get("properties") or ()):
            return None
        calls = several([_call(function, rule) for function in rule.functions], ", ", rule)
        block = tag("[", calls, "]")
        return block if rule.is_required else either([block, {"type": "regex", "pattern": r"[^\[<][\s\S]*"}])

    def start(self) -> bool:
        stripped = self.held.lstrip()
        if not stripped or any(mark.startswith(stripped) and mark != stripped for mark in MARKS):
            return False
        if stripped.startswith(MARKS):
            self._lead += self.take_held(self.held.index(">") + 1)
            return True
        if stripped[0] != "[":
            return self.set_state(self._text)
        self._lead += self.take_held(self.held.index("[") + 1)
        return self.set_state(self._head)

    def _head(self) -> bool:
        match = _HEAD.match(self.held, 0, MAX_HEAD_LENGTH)
        if match is None:
            if len(self.held) < MAX_HEAD_LENGTH and _HEAD_BEGINS.fullmatch(self.held):
                return False
            return self.set_state(self._text)
        if match["name"] not in self.names:
            return self.set_state(self._text)
        self._name, self._place, self._depth, self._quote = match["name"], match.end(), 1, ""
        return self.set_state(self._body)

    def _body(self) -> bool:
        """State: find the closing bracket of the call."""
        while self._depth:
            if self._quote and not self._skip_string():
                return False
            match = _OUTSIDE.search(self.held, self._place)
            if match is None:
                self._place = len(self.held)
                return False
            self._place, char = match.end(), match.group()
            if char in "\"'":
                self._quote = char
            else:
                self._depth += 1 if char in "([{" else -1
                if self._depth > DEEPEST:
                    return self.set_state(self._text)
        arguments = _arguments(self.held[self.held.index("(") + 1 : self._place - 1])
        if arguments is None:
            return self.set_state(self._text)
        self.take_held(self._place)
        self._lead = ""
        self.start_call(self._name, arguments)
        return self.set_state(self._between)

    def _skip_string(self) -> bool:
        """Move past the closing quote of the string. False: it has not arrived."""
        while True:
            match = re.compile(rf"[\\{self._quote}]").search(self.held, self._place)
            if match is None:
                self._place = len(self.held)
                return False
            if match.group() == self._quote:
                self._place, self._quote = match.end(), ""
                return True
            if match.end() >= len(self.held):
                self._place = match.start()
                return False
            self._place = match.end() + 1

    def _between(self) -> bool:
        if not self.strip_held():
            return False
        if self.held[0] == ",":
            self.take_held(1)
            return self.set_state(self._head)
        if self.held[0] == "]":
            self.take_held(1)
            return self.set_state(self._last)
        return self.set_state(self._text)

    def _last(self) -> bool:
        """State after the list: drop whitespace and the closing mark."""
        if not self.strip_held() or (MARKS[1].startswith(self.held) and MARKS[1] != self.held):
            return False
        if self.held.startswith(MARKS[1]):
            self.take_held(len(MARKS[1]))
            return True
        return self.set_state(self._text)

    def _text(self) -> bool:
        self.emit_content(self._lead + self.held)
        self._lead = self.held = ""
        return False

    def end(self) -> None:
        self.emit_content(self._lead + self.held)


def _arguments(source: str) -> str | None:
    """Convert keyword arguments with literal values to a JSON object. None: other syntax."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes
            tree = ast.parse(f"f({source}\n)", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or not isinstance(tree.func, ast.Name):
            return None
        values = {}
        for argument in tree.keywords:
            if argument.arg is None:
                return None
            values[argument.arg] = _value(argument.value)
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError for other syntax."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float | bool)):
        return node.value
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no key")


def _is_argument(key: str) -> bool:
    """Whether the name is valid for a Python argument."""
    return key.isidentifier() and not keyword.iskeyword(key)


def _call(function: Function, rule: CallRule) -> Format:
    """`name(key=value, …)`: required parameters first, then any of the others, in order."""
    schema = function.parameters
    properties: dict[str, Any] = schema.get("properties") or {}
    required = [key for key in schema.get("required", ()) if key in properties]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def argument(key: str) -> Format:
        value = properties[key]
        whole = {**shared, **value} if isinstance(value, dict) else value
        return sequence(text(f"{key}="), {"type": "json_schema", "json_schema": whole})

    elements = [element for key in required for element in (text(", "), argument(key))][1:]
    others = [optional(sequence(text(", "), argument(key))) for key in properties if key not in required]
    if required:
        elements += others
    elif others:
        firsts = [sequence(argument(key), *others[place + 1 :]) for place, key in enumerate(properties)]
        elements = [optional(either(firsts))]
    return tag(f"{function.name}(", sequence(*elements) if elements else text(""), ")")
