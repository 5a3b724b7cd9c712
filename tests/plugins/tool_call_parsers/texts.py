"""Output of models, well-formed and not, for every in-tree parser. Used by the property tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

from frame.interfaces.parsing import Function, ToolCallParser

Call = tuple[str, dict[str, Any]]

FUNCTIONS = (
    Function(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Köln", "Rome"]},
                "days": {"type": "integer", "enum": [1, 2]},
                "exact": {"type": "boolean"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
        is_strict=True,
    ),
    Function("now", {"type": "object", "properties": {}, "additionalProperties": False}, is_strict=True),
)
WORDS = ("Köln", "日本語", "🙂 ok", 'a "b"', "</tool_call", "x\ny", "{[", "back\\slash", "'", "", "é")


def some_calls(dice: random.Random) -> list[Call]:
    """One to three calls of FUNCTIONS with arguments of all kinds."""
    found: list[Call] = []
    for _ in range(dice.randint(1, 3)):
        if dice.random() < 0.25:
            found.append(("now", {}))
            continue
        arguments: dict[str, Any] = {"city": dice.choice(WORDS)}
        if dice.random() < 0.5:
            arguments["days"] = dice.randint(-5, 10**6)
        if dice.random() < 0.5:
            arguments["exact"] = dice.random() < 0.5
        found.append(("get_weather", arguments))
    return found


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: list[Call], key: str) -> list[str]:
    return [f'{{"name": "{name}", "{key}": {dumped(arguments)}}}' for name, arguments in calls]


def _xml(calls: list[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        values = "".join(f"<parameter={k}>\n{v if isinstance(v, str) else dumped(v)}\n</parameter>\n" for k, v in arguments.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(blocks)


def _deepseek(calls: list[Call], left: str, right: str, end: str, between: str) -> str:
    inner = between.join(f"<｜tool▁call▁begin｜>{left}{n}{right}{dumped(a)}{end}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def python_calls(calls: list[Call], write: Callable[[Any], str] = repr) -> str:
    return "[" + ", ".join(f"{name}({', '.join(f'{k}={write(v)}' for k, v in arguments.items())})" for name, arguments in calls) + "]"


def _harmony(calls: list[Call]) -> str:
    heads = (" <|constrain|>json", "", " json")
    messages = [f"<|channel|>commentary to=functions.{n}{heads[i % 3]}<|message|>{dumped(a)}<|call|>" for i, (n, a) in enumerate(calls)]
    return "<|start|>assistant".join(messages)


# parser -> how it writes calls
WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in _objects(calls, "arguments")),
    "qwen3_coder": _xml,
    "deepseek_v3": lambda calls: _deepseek(calls, "function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": lambda calls: _deepseek(calls, "", "<｜tool▁sep｜>", "", ""),
    "llama3": lambda calls: "<|python_tag|>" * (len(calls) % 2) + "; ".join(_objects(calls, "parameters")),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls),
    "gpt-oss": _harmony,
    "pythonic": python_calls,
}
# parser -> (before, after) of its thinking
THOUGHTS: dict[str, tuple[str, str]] = {
    "think-tags": ("<think>\n", "\n</think>\n\n"),
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "deepseek_r1": ("", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}


def old_mistral(calls: list[Call]) -> str:
    return f"[TOOL_CALLS] [{', '.join(_objects(calls, 'arguments'))}]"


def damaged(text: str, dice: random.Random) -> str:
    """The text with something missing, doubled, moved or foreign in it."""
    for _ in range(dice.randint(1, 3)):
        a, b = sorted(dice.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + 12)
        part = text[a:b]
        replacement = dice.choice(("", part * 2, part[::-1], " ", "\n", "{", '"', "]", "<", "<tool_call>", "[TOOL_CALLS]", "\\", "😀"))
        text = text[:a] + replacement + text[b:]
    return text


def cut(text: str, dice: random.Random) -> list[str]:
    """The text in pieces of random sizes, empty ones among them."""
    size = dice.choice((1, 2, 5, 20))
    pieces, place = [], 0
    while place < len(text):
        step = dice.randint(0, size)
        pieces.append(text[place : place + step])
        place += step
    return pieces


def collect(parser: ToolCallParser, chunks: Iterable[str], is_cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """What a parser makes of a text in pieces: (content, [(name, arguments)]). `is_cut`: the text
    was cut off."""
    content = ""
    calls: list[list[str]] = []
    for delta in [*(parser.feed(chunk) for chunk in chunks), parser.finish_cut() if is_cut else parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return content, [(name, arguments) for name, arguments in calls]
