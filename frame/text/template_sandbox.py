"""`TemplateSandbox`: a Jinja environment for templates that may be hostile: they read data only,
and loops, recursion and values are bounded.

Used by `ChatTemplate`. Must not know messages. The clock is read in each iteration of a loop, each
call, and each item of a filter, so that a template ends even where it writes nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

LARGEST_TEXT = 64 * 1024 * 1024  # characters of a text
LARGEST_LIST = 1024 * 1024  # items of a list
LARGEST_POWER = 1000
LARGEST_NUMBER = 16_384  # bits
_SIZED_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "sum", "truncate")
_SLOW_FILTERS = ("pprint", "striptags", "urlize", "wordwrap")  # of HTML and terminals; take quadratic time
_WIDTH = re.compile(r"%[^%a-zA-Z]*(\*|\d{7})")
_WIDTH_OF_SPEC = re.compile(r"\{|\d{7}")


class TemplateTimeoutError(Exception):
    """The template took more time than it may."""


class _Generator(CodeGenerator):
    """Puts a look at the clock into loops, and a bound on the result of `~`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - as the base class has it
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick")))
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Raises SecurityError for values beyond a bound, TemplateTimeoutError within `limit_time`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False)  # what is computed at compile time has no limits
        self._rendering = threading.local()  # `until`: monotonic seconds, in the thread that renders
        self.globals.pop("lipsum")  # generates unbounded text
        for name in _SLOW_FILTERS:
            self.filters.pop(name)
        for name in _SIZED_FILTERS:
            self.filters[name] = self._bound_filter(name, self.filters[name])

    @contextmanager
    def limit_time(self, seconds: float) -> Iterator[None]:
        """Limit the time of the templates that this thread renders in the block."""
        self._rendering.until = time.monotonic() + seconds
        try:
            yield
        finally:
            del self._rendering.until

    @property
    def tick(self) -> None:
        """Raises TemplateTimeoutError when the time is over. A property, because a call of a
        template costs ten times as much."""
        if time.monotonic() > self._rendering.until:
            raise TemplateTimeoutError

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The output of a macro or a block, and the result of `~`."""
        texts = list(pieces)
        if sum(map(len, texts)) > LARGEST_TEXT:
            raise SecurityError(f"it makes a text of more than {LARGEST_TEXT} characters")
        return "".join(texts)

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:  # noqa: N805 - as the base class has it
        _ = __self.tick
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            arguments = _check_text(method.__name__, text, arguments, named)
        return super().call(__context, __obj, *arguments, **named)

    def call_filter(self, *arguments: Any, **named: Any) -> Any:
        _ = self.tick
        return super().call_filter(*arguments, **named)

    def call_test(self, *arguments: Any, **named: Any) -> Any:
        _ = self.tick
        return super().call_test(*arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = [value for value in (left, right) if isinstance(value, int | float)]
        sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "**" and any(abs(value) > LARGEST_POWER for value in numbers):
            raise SecurityError(f"it raises a number above {LARGEST_POWER} to a power")
        if operator in ("*", "**") and sum(value.bit_length() for value in numbers if isinstance(value, int)) > LARGEST_NUMBER:
            raise SecurityError(f"it makes a number of more than {LARGEST_NUMBER} bits")
        if operator == "%" and isinstance(left, str):
            _check_text("%", left, right if isinstance(right, tuple) else (right,), {})
        if sized and operator in ("*", "+"):
            size = len(sized[0]) * numbers[0] if operator == "*" and numbers else sum(map(len, sized))
            if size > (LARGEST_TEXT if isinstance(sized[0], str) else LARGEST_LIST):
                raise SecurityError("it makes a text or a list too large")
        return super().call_binop(context, operator, left, right)

    def _bound_filter(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        takes_context = hasattr(apply, "jinja_pass_arg")

        @wraps(apply)
        def bounded(*arguments: Any, **named: Any) -> Any:
            _ = self.tick
            before, value, rest = arguments[:takes_context], arguments[takes_context], arguments[takes_context + 1 :]
            if name == "sum" and any(isinstance(each, list | tuple) for each in (*rest, *named.values())):
                raise SecurityError("it adds up lists")
            if name == "join":
                value = _check_list(value, rest, named)
            elif isinstance(value, str):
                rest = _check_text(name, value, rest, named)
            elif any(isinstance(each, int) and abs(each) > LARGEST_LIST for each in (*rest, *named.values())):
                raise SecurityError(f"{name} makes more than {LARGEST_LIST} items")
            return apply(*before, value, *rest, **named)

        return bounded


def _check_text(name: str, text: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a method or filter of a text. Raises SecurityError where its result may be
    too large."""
    values = (*arguments, *named.values())
    size = 0
    if name == "join" and arguments:
        arguments = (_check_list(arguments[0], (text,), {}), *arguments[1:])
    elif name == "replace":
        old, new = (str(each) for each in (*values, "", "")[:2])
        size = text.count(old) * len(new)
    elif name in ("format", "format_map", "%"):
        wide = _WIDTH.search(text) if name != "format_map" else None
        if wide or (name != "%" and any(_WIDTH_OF_SPEC.search(spec) for _, _, spec, _ in _parse(text) if spec)):
            raise SecurityError("it formats a text with a width that is too large or not known")
    else:
        size = max((abs(each) for each in values if isinstance(each, int)), default=0) * (len(text) + 1)
    if size > LARGEST_TEXT:
        raise SecurityError(f"{name} makes a text of more than {LARGEST_TEXT} characters")
    return arguments


def _check_list(values: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The values that are joined. Raises SecurityError where they are too long together."""
    separator = next((each for each in (*arguments, *named.values()) if isinstance(each, str)), "")
    items = list(values)
    if sum(len(each) for each in items if isinstance(each, str | list | dict)) + len(items) * len(separator) > LARGEST_TEXT:
        raise SecurityError(f"join makes a text of more than {LARGEST_TEXT} characters")
    return items


def _parse(text: str) -> list[tuple[Any, ...]]:
    try:
        return list(Formatter().parse(text))
    except ValueError:  # which the method raises, too
        return []
