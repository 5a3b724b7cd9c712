"""What every parser of tool calls or thinking must do, as checks that raise AssertionError with a
sentence.

Texts are noise with marks of known models in it, and, for parsers that give a grammar, what that
grammar allows, drawn at random (needs xgrammar). Knows no parser.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.interfaces.parsing import CallRule, Format, Function, ReasoningParser, ToolCallParser
from frame.testing.contexts import PARSER

if TYPE_CHECKING:
    from frame.testing.conformance import Subject

TEXTS, DRAWN = 30, 6
LONG, LIMIT = 8_000, 5.0  # characters, fed one by one; seconds of CPU, of which a linear parser takes a fraction of one
STEPS = 600  # bytes of a drawn text
PROMPT_ENDS = ("", "<think>\n", "<think>\n\n</think>\n\n", "[THINK]", "<|start|>assistant<|channel|>analysis<|message|>")
MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[f(a=1)]"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", '{"name": "f", "arguments": {"a": 1}}', "<｜tool▁call▁begin｜>"),
    *("<｜tool▁sep｜>", "```json\n", "<｜tool▁call▁end｜>", "<|channel|>", "commentary to=functions.f", "analysis"),
    *("<|message|>", "<|end|>"),
)
NOISE = "af é日🙂\n<>[]{}()\"'\\|:,="
CITIES = ("Rome", "Köln")
_CITY: dict[str, Any] = {"city": {"type": "string", "enum": list(CITIES)}}
FUNCTIONS = (
    Function("f", {"type": "object", "properties": _CITY, "required": ["city"], "additionalProperties": False}, is_strict=True),
    Function("now", {"type": "object", "properties": {}, "additionalProperties": False}, is_strict=True),
)

Check = tuple[str, Callable[[], None]]


def check_tool_call_parser(make: Callable[[], ToolCallParser]) -> Iterator[Check]:
    """The laws of `tool_call_parser/2`."""

    def read(pieces: Iterable[str]) -> tuple[str, list[list[str]]]:
        parser = make()
        parser.begin(FUNCTIONS)
        content = ""
        calls: list[list[str]] = []
        for delta in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
            content += delta.content
            for call in delta.calls:
                if call.name is not None:
                    assert call.index == len(calls), f"call {call.index} begins after {len(calls)} calls"
                    calls.append([call.name, ""])
                assert call.index == len(calls) - 1, f"arguments of call {call.index} come when call {len(calls) - 1} is the last"
                calls[-1][1] += call.arguments
        return content, calls

    def drawn() -> list[str]:
        parser = make()
        parser.begin(FUNCTIONS)
        form = parser.grammar(CallRule(FUNCTIONS, is_required=True, is_parallel=False))
        return draw(form, DRAWN) if form is not None else []

    def grammar_is_read() -> None:
        for text in drawn():
            content, calls = read([text])
            assert not content.strip(), f"{text!r} is allowed by the grammar, and {content!r} of it is read as content"
            found = [(name, json.loads(arguments)) for name, arguments in calls]
            wanted = [("now", {}), *(("f", {"city": city}) for city in CITIES)]
            assert len(found) == 1 and found[0] in wanted, f"{text!r} is allowed by the grammar, and is read as {found}"

    yield "splits", lambda: _check_splits(read, [*_noise(), *drawn()])
    yield "long_texts", lambda: _check_time(read)
    yield "grammar_is_read", grammar_is_read


def check_reasoning_parser(make: Callable[[], ReasoningParser]) -> Iterator[Check]:
    """The laws of `reasoning_parser/2`."""

    def reader(prompt_end: str) -> Callable[[Iterable[str]], tuple[str, str]]:
        def read(pieces: Iterable[str]) -> tuple[str, str]:
            parser = make()
            parser.begin(prompt_end)
            deltas = [*(parser.feed(piece) for piece in pieces), parser.finish()]
            return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)

        return read

    def grammar_keeps_the_answer() -> None:
        answer: Format = {"type": "const_string", "value": "7"}
        for prompt_end in PROMPT_ENDS:
            parser = make()
            parser.begin(prompt_end)
            assert "const_string" in json.dumps(parser.grammar(answer, is_calls=False)), "grammar() loses the answer's format"

    def splits() -> None:
        for prompt_end in PROMPT_ENDS:
            _check_splits(reader(prompt_end), _noise())

    yield "splits", splits
    yield "long_texts", lambda: _check_time(reader(""))
    yield "grammar_keeps_the_answer", grammar_keeps_the_answer


def tool_call_parser(subject: Subject) -> Iterable[Any]:
    """Suite."""
    return _suite(subject, check_tool_call_parser)


def reasoning_parser(subject: Subject) -> Iterable[Any]:
    """Suite."""
    return _suite(subject, check_reasoning_parser)


def _suite(subject: Subject, checks: Callable[[Callable[[], Any]], Iterator[Check]]) -> Iterable[Any]:
    from frame.testing.conformance import Check as Named

    return [Named(*check) for check in checks(lambda: subject.target(PARSER, subject.options))]


def draw(form: Format, count: int) -> list[str]:
    """Texts that the format allows, byte by byte at random; those that do not end in time are left
    out. None without xgrammar."""
    try:
        import xgrammar
    except ImportError:
        return []
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)]))
    compiled = compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    found = []
    for seed in range(count):
        dice, matcher, data = random.Random(seed), xgrammar.GrammarMatcher(compiled), bytearray()
        mask = np.zeros((1, 8), np.int32)
        while len(data) < STEPS and not matcher.is_completed():
            matcher.fill_next_token_bitmask(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            data.append(int(dice.choice(allowed)))
            matcher.accept_token(data[-1])
        if matcher.is_completed():
            found.append(data.decode())
    return found


def _noise() -> list[str]:
    dice = random.Random(0)

    def text() -> str:
        return "".join(dice.choice(MARKS if dice.random() < 0.4 else NOISE) for _ in range(dice.randint(0, 24)))

    return [text() for _ in range(TEXTS)]


def _check_splits(read: Callable[[Iterable[str]], Any], texts: Sequence[str]) -> None:
    dice = random.Random(1)
    for text in texts:
        whole = read([text])
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for split in (list(text), pieces):
            found = read(split)
            assert found == whole, f"{text!r} gives {whole} in one piece, and {found} in the pieces {split}"


def _check_time(read: Callable[[Iterable[str]], Any]) -> None:
    for mark, filling in (("", " "), ("", "<"), ("<tool_call>", "a"), ("[TOOL_CALLS]", " "), ('{"name": "f", "arguments": "', "a")):
        begun = time.process_time()
        read([mark, *(filling * LONG)])
        taken = time.process_time() - begun
        assert taken < LIMIT, f"{LONG} tokens of {filling!r} after {mark!r} take {taken:.1f} s: what is held is read again and again"
