"""The conformance suites of reasoning parsers and tool-call parsers.

Each check is a function without arguments that raises AssertionError with one sentence. Texts are
noise with marks of known models in it, and texts that the parser's own grammar allows, of which the
calls and the answer are known. Used by the conformance option of the pytest plugin. Must not know a
parser by name.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from frame.core.interfaces.parsing import CallRule, Format, Function, ReasoningParser, ToolCallParser
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.contexts import PARSER
from frame.testing.parsing.texts import MARKS, STEPS, THOUGHT, accepts, draw, noise, write

LONG, GROWTH, QUICK = 2_500, 9.0, 0.1  # characters, fed one by one; most growth of the time for four times as many; seconds
LIMIT = 5.0  # seconds of CPU time for 4 * LONG characters
MAX_HELD = 512  # characters of plain text that a parser may hold back
PROMPT_ENDS = ("", "<think>\n", "<think>\n\n</think>\n\n", "[THINK]", "<|start|>assistant<|channel|>analysis<|message|>")
ODD = ("", "\0", "�" * 3, "\u2028\u0301", "{" * 3000, "[" * 3000, '"' * 9, "\\" * 99, "-", "1e999", "]" * 40, "</", "🙂" * 9)
PLAIN = (
    *("", "Hello.", " a < b [1] {2} \n", '{"city": "Rome"}', "[1, 2]", "| a | b |\n|---|---|\n", '```json\n{"a": 1}\n```', "x = f(1)"),
    *("5 > 3 & 2 < 4", "<b>bold</b>", "日本 🙂", "\n\n"),
)
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"city": "Köln 🙂"},
    {"text": 'quote " and back\\slash', "other": "a/b"},
    {"number": -5, "share": 1.5, "is_exact": True, "none": None},
    {"items": [1, "two", [3]], "deep": {"a": {"b": [{}]}}},
    {"text": "braces } ] { [ in , a : text"},
    {"long": "abc " * 80 + "end"},
)
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object"}
ODD_SCHEMAS: tuple[Any, ...] = ({"enum": 3}, {"type": [{}, "integer"]}, {"anyOf": 1}, {"anyOf": [2]}, {"type": {}}, [], None)
CITY = "Zanzibar"  # stands in every drawn call once
REPLY = "7 of 8"

Calls = list[tuple[str, str]]
MakeCalls = Callable[[], ToolCallParser]
MakeReasoning = Callable[[], ReasoningParser]


def tool_call_parser(subject: Subject) -> Iterable[Check]:
    """The suite of the kind `tool_call_parser`."""
    make = partial(subject.target, PARSER, subject.options)
    yield from collect(__name__, make)


def reasoning_parser(subject: Subject) -> Iterable[Check]:
    """The suite of the kind `reasoning_parser`."""
    make = partial(subject.target, PARSER, subject.options)
    yield from collect(__name__, make)


# tool calls ---------------------------------------------------------------------------------------


def read_calls(make: MakeCalls, pieces: Iterable[str], functions: Sequence[Function] = (), is_cut: bool = False) -> tuple[str, Calls]:
    """The content and the calls of a text in pieces. Asserts the order of the deltas."""
    parser = make()
    parser.begin(functions or make_rule(ARGUMENTS[1]).functions)
    deltas = [*map(parser.feed, pieces), parser.finish_cut() if is_cut else parser.finish()]
    calls: list[list[str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.name is not None:
            assert call.index == len(calls), f"call {call.index} begins after {len(calls)} calls"
            calls.append([call.name, ""])
        assert call.index == len(calls) - 1, f"arguments of call {call.index} come when call {len(calls) - 1} is the last"
        calls[-1][1] += call.arguments
    return "".join(delta.content for delta in deltas), [(name, arguments) for name, arguments in calls]


def check_plain_text_is_content(make: MakeCalls) -> None:
    for text in PLAIN:
        for pieces in ([text], list(text)):
            found = read_calls(make, pieces)
            assert found == (text, []), f"{text!r} is no call, and is read as {found}"


def check_content_is_not_held_back(make: MakeCalls) -> None:
    parser, text = make(), "word " * 400
    parser.begin(make_rule(ARGUMENTS[1]).functions)
    content = "".join(parser.feed(piece).content for piece in text)
    assert len(content) >= len(text) - MAX_HELD, f"{len(text) - len(content)} of {len(text)} characters of plain text are held back"


def check_known_calls_are_read(make: MakeCalls) -> None:
    """Every text that the grammar of known calls allows is read as these calls."""
    for arguments in ARGUMENTS:
        for text in _drawn(make, make_rule(arguments)):
            content, calls = read_calls(make, [text], make_rule(arguments).functions)
            assert not content.strip(), f"{text!r} is allowed by the grammar, and {content!r} of it is read as content"
            assert read_values(calls) == [("f", arguments)], f"{text!r} is allowed, and is read as {calls}"
    for text in _several(make):
        content, calls = read_calls(make, [text])
        wanted = [("f", {"city": CITY})] * text.count(CITY)
        assert not content.strip(), f"{text!r} is allowed by the grammar, and {content!r} of it is read as content"
        assert read_values(calls) == wanted, f"{text!r} has {len(wanted)} calls, and is read as {calls}"


def check_text_around_calls_is_content(make: MakeCalls) -> None:
    """Text before and after a call, where the grammar allows it."""
    rule = CallRule(make_rule({"city": CITY}).functions)
    parser = make()
    parser.begin(rule.functions)
    form = parser.grammar(rule)
    if form is None or form.get("type") != "triggered_tags":
        raise SkipCheck("the grammar does not say which text begins a call within other text")
    for call in _several(make):
        for before, after in (("Let me see.\n", ""), ("", "\nDone."), ("Let me see.\n", "\nDone.")):
            text = before + call + after
            if accepts(form, text):
                content, calls = read_calls(make, [text])
                assert len(calls) == call.count(CITY), f"{text!r} has {call.count(CITY)} calls, and is read as {calls}"
                assert "".join(content.split()) == "".join((before + after).split()), f"the text of {text!r} is read as {content!r}"


def check_splits_change_nothing(make: MakeCalls) -> None:
    known = [text for arguments in ARGUMENTS[1:5] for text in find_calls(make, make_rule(arguments))]
    _check_splits(lambda pieces: read_calls(make, pieces), [*noise(), *PLAIN, *known, *(f"Hm. {text} So." for text in known)])


def check_cut_calls_leave_no_content(make: MakeCalls) -> None:
    """An answer that ends within a call has the calls before it, and no marks as content."""
    for text in _several(make):
        whole = read_calls(make, [text])[1]
        for size in range(0, len(text), 3):
            content, calls = read_calls(make, [text[:size]], is_cut=True)
            assert not content.strip(), f"{text[:size]!r}, cut within a call, leaves {content!r} as content"
            for (name, arguments), (known, complete) in zip(calls, whole, strict=False):
                is_prefix = complete.startswith(arguments) or _json(arguments) == _json(complete)
                assert name == known and is_prefix, f"{text[:size]!r}, cut within a call, is read as {calls}"
            assert len(calls) <= len(whole), f"{text[:size]!r}, cut within a call, is read as {calls}"


def check_responses_stand_alone(make: MakeCalls) -> None:
    """Parsers of two responses, fed in turn, share nothing."""
    texts = [*noise()[:10], *find_calls(make, make_rule(ARGUMENTS[1]))]
    _check_alone(lambda: _started(make()), lambda pieces: read_calls(make, pieces), texts)


def check_odd_texts_do_not_raise(make: MakeCalls) -> None:
    calls = find_calls(make, make_rule(ARGUMENTS[1]))[:1]
    for odd in ODD:
        within = [call[:at] + odd + call[at:] for call in calls for at in range(0, len(call), 4)]
        for text in (odd, *(f"{mark}{odd}{mark}" for mark in MARKS), *within):
            for is_cut in (False, True):
                _does_not_raise(lambda text=text, is_cut=is_cut: read_calls(make, [text], is_cut=is_cut), text)  # type: ignore[misc]


def check_odd_schemas_do_not_raise(make: MakeCalls) -> None:
    """Clients send any JSON as the schema of a function."""
    texts = find_calls(make, make_rule(ARGUMENTS[1]))[:1] or [MARKS[14]]
    for schema in ODD_SCHEMAS:
        functions = (Function("f", {"type": "object", "properties": {"city": schema}}), Function("g", {"properties": schema}))
        _does_not_raise(lambda functions=functions: read_calls(make, texts, functions), f"the schema {schema!r}")  # type: ignore[misc]
    _does_not_raise(lambda: _started(make(), ()).feed(texts[0]), "no functions")


def check_time_is_linear(make: MakeCalls) -> None:
    heads = ["", "<tool_call>", "[TOOL_CALLS]", '{"name": "f", "arguments": "']
    heads += [text[: text.index("abc") + 3] for text in find_calls(make, make_rule(ARGUMENTS[6]))[:1]]
    _check_time(lambda pieces: read_calls(make, pieces, make_rule(ARGUMENTS[6]).functions), heads)


def check_special_tokens_are_kept(make: MakeCalls) -> None:
    """Marks such as `<|x|>` are special tokens, which only `keeps_special_tokens` leaves in the
    text."""
    for text in _drawn(make, make_rule(ARGUMENTS[1])):
        found = re.search(r"<[|｜][^>]*[|｜]>", text)
        assert found is None or make().keeps_special_tokens, f"{found and found[0]} is a special token, and `keeps_special_tokens` is False"


def _started(parser: ToolCallParser, functions: Sequence[Function] | None = None) -> ToolCallParser:
    parser.begin(make_rule(ARGUMENTS[1]).functions if functions is None else functions)
    return parser


def make_rule(arguments: dict[str, Any], is_parallel: bool = False) -> CallRule:
    """One function, `f`, that takes these arguments alone."""
    values = {name: {"type": TYPES[type(value)], "const": value} for name, value in arguments.items()}
    schema = {"type": "object", "properties": values, "required": list(values), "additionalProperties": False}
    return CallRule((Function("f", schema, is_strict=True),), is_required=True, is_parallel=is_parallel)


def _drawn(make: MakeCalls, rule: CallRule) -> list[str]:
    """Texts that the parser's grammar of required calls allows. Raises SkipCheck without."""
    parser = make()
    parser.begin(rule.functions)
    form = parser.grammar(rule)
    if form is None:
        raise SkipCheck("the parser has no grammar, so no text is known to hold a call")
    found = draw(form, 2)
    assert found, f"no text of {STEPS} bytes that the grammar of one call allows ends"
    return found


def find_calls(make: MakeCalls, rule: CallRule) -> list[str]:
    try:
        return _drawn(make, rule)
    except SkipCheck:
        return []


def _several(make: MakeCalls) -> list[str]:
    """Texts of one or more calls."""
    return _drawn(make, make_rule({"city": CITY})) + _drawn(make, make_rule({"city": CITY}, is_parallel=True))


# reasoning ----------------------------------------------------------------------------------------


def read_reasoning(make: MakeReasoning, pieces: Iterable[str], prompt_end: str = "", may_think: bool = True) -> tuple[str, str]:
    """The reasoning and the content of a text in pieces."""
    parser = make()
    parser.begin(prompt_end, may_think)
    deltas = [*map(parser.feed, pieces), parser.finish()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


def check_text_is_kept(make: MakeReasoning) -> None:
    """Every character of a text without marks is reasoning or content, after any prompt."""
    for prompt_end in PROMPT_ENDS:
        for text in ("Hello, world.", "x", " two  words\nand a line ", "日本 🙂", "1 <"):
            for pieces in ([text], list(text)):
                found = "".join(read_reasoning(make, pieces, prompt_end))
                assert found.split() == text.split(), f"{text!r} after the prompt {prompt_end!r} is read as {found!r}"


def check_reasoning_is_not_held_back(make: MakeReasoning) -> None:
    text = "word " * 400
    for prompt_end in PROMPT_ENDS:
        parser = make()
        parser.begin(prompt_end)
        deltas = [parser.feed(piece) for piece in text]
        size = sum(len(delta.reasoning) + len(delta.content) for delta in deltas)
        assert size >= len(text) - MAX_HELD, f"{len(text) - size} of {len(text)} characters are held back after the prompt {prompt_end!r}"


def check_reasoning_that_is_off_is_content(make: MakeReasoning) -> None:
    found = read_reasoning(make, [REPLY], may_think=False)
    assert found == ("", REPLY), f"{REPLY!r} is read as {found} where the client switched reasoning off"


def check_grammar_keeps_the_reply(make: MakeReasoning) -> None:
    reply: Format = {"type": "const_string", "value": REPLY}
    for prompt_end in PROMPT_ENDS:
        for is_calls in (False, True):
            parser = make()
            parser.begin(prompt_end)
            assert REPLY in json.dumps(parser.grammar(reply, is_calls=is_calls)), "grammar() loses the format of the answer"


def check_known_replies_are_read(make: MakeReasoning) -> None:
    for text, prompt_end, may_think in find_answers(make):
        reasoning, content = read_reasoning(make, [text], prompt_end, may_think)
        wanted = THOUGHT if THOUGHT in text else ""
        where = f"{text!r} after the prompt {prompt_end!r} is allowed by the grammar"
        assert content.strip() == REPLY, f"{where}, and {content!r} of it is read as content"
        assert reasoning.strip() == wanted, f"{where}, and {reasoning!r} of it is read as reasoning"


def check_reasoning_splits_change_nothing(make: MakeReasoning) -> None:
    for prompt_end in PROMPT_ENDS:
        known = [text for text, end, may_think in find_answers(make) if end == prompt_end and may_think]
        _check_splits(lambda pieces, prompt_end=prompt_end: read_reasoning(make, pieces, prompt_end), [*noise(), *known])  # type: ignore[misc]


def check_cut_reasoning_is_reasoning(make: MakeReasoning) -> None:
    """A response that ends within the reasoning has all of it that was written."""
    checked = 0
    for text, prompt_end, may_think in find_answers(make):
        at = text.find(THOUGHT)
        for size in range(1, len(THOUGHT) + 1) if at >= 0 else ():
            reasoning, content = read_reasoning(make, [text[:at], *text[at : at + size]], prompt_end, may_think)
            assert not content.strip(), f"{text[: at + size]!r} ends within the reasoning, and {content!r} of it is read as content"
            assert reasoning.strip() == THOUGHT[:size].strip(), f"{text[: at + size]!r} has the reasoning {reasoning!r}"
            checked += 1
    if not checked:
        raise SkipCheck("no text of the grammar has reasoning")


def check_replies_stand_alone(make: MakeReasoning) -> None:
    """Parsers of two responses, fed in turn, share nothing."""

    def started() -> ReasoningParser:
        parser = make()
        parser.begin("")
        return parser

    texts = [*noise()[:10], *(text for text, end, _ in find_answers(make) if not end)]
    _check_alone(started, lambda pieces: read_reasoning(make, pieces), texts)


def check_odd_reasoning_does_not_raise(make: MakeReasoning) -> None:
    for prompt_end in (*PROMPT_ENDS, *ODD, "<think>" * 99):
        for odd in ODD:
            for text in (odd, f"<think>{odd}</think>{odd}", f"[THINK]{odd}[/THINK]", f"<|channel|>{odd}<|message|>{odd}<|end|>"):
                _does_not_raise(lambda text=text, end=prompt_end: read_reasoning(make, [text], end), text)  # type: ignore[misc]


def check_reasoning_time_is_linear(make: MakeReasoning) -> None:
    heads = ["", "<think>", "[THINK]", "<|channel|>analysis<|message|>"]
    _check_time(lambda pieces: read_reasoning(make, pieces), heads)


def find_answers(make: MakeReasoning) -> list[tuple[str, str, bool]]:
    """Texts that the grammar allows around the answer, each with the end of its prompt and whether
    reasoning is on."""
    found = []
    reply: Format = {"type": "const_string", "value": REPLY}
    for prompt_end in PROMPT_ENDS:
        for may_think in (True, False):
            parser = make()
            parser.begin(prompt_end, may_think)
            form = parser.grammar(reply, is_calls=False)
            texts = {write(form, random.Random(seed)) for seed in range(4)}
            found += [(text, prompt_end, may_think) for text in sorted(texts) if accepts(form, text)]
    if not found:
        raise SkipCheck("no text that the grammar allows could be written")
    return found


# both ---------------------------------------------------------------------------------------------


def _json(text: str) -> Any:
    """The value of a JSON text; the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_values(calls: Calls) -> list[tuple[str, Any]]:
    """The calls with their arguments as values. Formats without quotes may have whitespace around a
    string."""
    found = [(name, _json(arguments)) for name, arguments in calls]
    for _, arguments in found:
        if isinstance(arguments, dict):
            arguments.update({name: value.strip() for name, value in arguments.items() if isinstance(value, str)})
    return found


def _does_not_raise(call: Callable[[], object], text: str) -> None:
    try:
        call()
    except AssertionError:
        raise
    except Exception as error:
        short = text if len(text) < 80 else f"{text[:80]}…"
        raise AssertionError(f"the parser raises {type(error).__name__} ({str(error)[:80]}) on {short!r}") from error


def _check_splits(read: Callable[[Iterable[str]], Any], texts: Sequence[str]) -> None:
    """Read each text whole, by character, by pieces, and with empty pieces."""
    dice = random.Random(1)
    for text in texts:
        whole = read([text])
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for split in (list(text), pieces, ["", text[: len(text) // 2], "", text[len(text) // 2 :], ""]):
            found = read(split)
            assert found == whole, f"{text!r} gives {whole} in one piece, and {found} in the pieces {split}"


def _check_alone(start: Callable[[], Any], read: Callable[[Iterable[str]], Any], texts: Sequence[str]) -> None:
    alone = [read([text]) for text in texts]
    others = [start() for _ in texts]
    for other, text in zip(others, texts, strict=True):  # responses that do not end
        other.feed(text[: len(text) // 2 + 1])
    again = [read([text]) for text in texts]
    assert again == alone, "a response is read otherwise while others are: parsers share state"
    fed: list[tuple[Any, str, list[Any]]] = [(start(), text, []) for text in texts]
    for turn in range(max(map(len, texts))):
        for parser, text, deltas in fed:
            deltas += [parser.feed(text[turn])] if turn < len(text) else []
    for parser, text, deltas in fed:
        single = start()
        wanted = [*map(single.feed, text), single.finish()]
        assert [*deltas, parser.finish()] == wanted, f"{text!r} is read otherwise when another response is read in turn"


def _check_time(read: Callable[[Iterable[str]], Any], heads: Sequence[str]) -> None:
    """Four times as many tokens take four times as long, and not 16 times."""
    for head in heads:
        filling = "a" if head else " <"
        few, many = (_measure(read, [head, *(filling * size)]) for size in (LONG, 4 * LONG))
        if LIMIT > many > max(QUICK, GROWTH * few):  # again, in case the machine was busy
            few, many = (_measure(read, [head, *(filling * size)]) for size in (LONG, 4 * LONG))
        what = f"{4 * LONG} tokens of {filling!r} after {head!r} take {many:.2f} s"
        assert many < LIMIT, f"{what}: the parser reads what it holds again and again"
        assert many <= max(QUICK, GROWTH * few), f"{what}, and {LONG} take {few:.2f} s: the time is not linear in the text"


def _measure(read: Callable[[Iterable[str]], Any], pieces: list[str]) -> float:
    began = time.process_time()
    read(pieces)
    return time.process_time() - began
