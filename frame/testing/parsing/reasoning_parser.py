"""The conformance suite of reasoning parsers, on noise and on texts that the parser's own grammar
allows. Must not know a parser by name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from functools import partial

from frame.interfaces.parsing import Format, ReasoningParser
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.contexts import PARSER
from frame.testing.parsing.reading import MAX_HELD, ODD, compare_interleaved, compare_splits, require_linear_time, require_no_error
from frame.testing.parsing.texts import THOUGHT, accepts, noise, write

PROMPT_ENDS = ("", "<think>\n", "<think>\n\n</think>\n\n", "[THINK]", "<|start|>assistant<|channel|>analysis<|message|>")
REPLY = "7 of 8"

MakeReasoning = Callable[[], ReasoningParser]


def suite(subject: Subject) -> Iterable[Check]:
    """The suite of the kind `reasoning_parser`."""
    return collect(__name__, partial(subject.target, PARSER, subject.options))


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
                result = "".join(read_reasoning(make, pieces, prompt_end))
                assert result.split() == text.split(), f"{text!r} after the prompt {prompt_end!r} is read as {result!r}"


def check_reasoning_is_not_held_back(make: MakeReasoning) -> None:
    text = "word " * 400
    for prompt_end in PROMPT_ENDS:
        parser = make()
        parser.begin(prompt_end)
        deltas = [parser.feed(piece) for piece in text]
        size = sum(len(delta.reasoning) + len(delta.content) for delta in deltas)
        assert size >= len(text) - MAX_HELD, f"{len(text) - size} of {len(text)} characters are held back after the prompt {prompt_end!r}"


def check_reasoning_that_is_off_is_content(make: MakeReasoning) -> None:
    result = read_reasoning(make, [REPLY], may_think=False)
    assert result == ("", REPLY), f"{REPLY!r} is read as {result} where the client switched reasoning off"


def check_grammar_keeps_the_reply(make: MakeReasoning) -> None:
    reply: Format = {"type": "const_string", "value": REPLY}
    for prompt_end in PROMPT_ENDS:
        for is_calls in (False, True):
            parser = make()
            parser.begin(prompt_end)
            assert REPLY in json.dumps(parser.grammar(reply, is_calls=is_calls)), "grammar() loses the format of the answer"


def check_known_replies_are_read(make: MakeReasoning) -> None:
    for text, prompt_end, may_think in find_replies(make):
        reasoning, content = read_reasoning(make, [text], prompt_end, may_think)
        thought = THOUGHT if THOUGHT in text else ""
        where = f"{text!r} after the prompt {prompt_end!r} is allowed by the grammar"
        assert content.strip() == REPLY, f"{where}, and {content!r} of it is read as content"
        assert reasoning.strip() == thought, f"{where}, and {reasoning!r} of it is read as reasoning"


def check_reasoning_splits_change_nothing(make: MakeReasoning) -> None:
    for prompt_end in PROMPT_ENDS:
        known = [text for text, end, may_think in find_replies(make) if end == prompt_end and may_think]
        compare_splits(lambda pieces, prompt_end=prompt_end: read_reasoning(make, pieces, prompt_end), [*noise(), *known])  # type: ignore[misc]


def check_cut_reasoning_is_reasoning(make: MakeReasoning) -> None:
    """A response that ends within the reasoning has all of it that was written."""
    checked = 0
    for text, prompt_end, may_think in find_replies(make):
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

    texts = [*noise()[:10], *(text for text, end, _ in find_replies(make) if not end)]
    compare_interleaved(started, lambda pieces: read_reasoning(make, pieces), texts)


def check_odd_reasoning_does_not_raise(make: MakeReasoning) -> None:
    for prompt_end in (*PROMPT_ENDS, *ODD, "<think>" * 99):
        for odd in ODD:
            for text in (odd, f"<think>{odd}</think>{odd}", f"[THINK]{odd}[/THINK]", f"<|channel|>{odd}<|message|>{odd}<|end|>"):
                require_no_error(lambda text=text, end=prompt_end: read_reasoning(make, [text], end), text)  # type: ignore[misc]


def check_reasoning_time_is_linear(make: MakeReasoning) -> None:
    heads = ["", "<think>", "[THINK]", "<|channel|>analysis<|message|>"]
    require_linear_time(lambda pieces: read_reasoning(make, pieces), heads)


def find_replies(make: MakeReasoning) -> list[tuple[str, str, bool]]:
    """Texts that the grammar allows around the answer, each with the end of its prompt and whether
    reasoning is on."""
    replies = []
    reply: Format = {"type": "const_string", "value": REPLY}
    for prompt_end in PROMPT_ENDS:
        for may_think in (True, False):
            parser = make()
            parser.begin(prompt_end, may_think)
            form = parser.grammar(reply, is_calls=False)
            texts = {write(form, random.Random(seed)) for seed in range(4)}
            replies += [(text, prompt_end, may_think) for text in sorted(texts) if accepts(form, text)]
    if not replies:
        raise SkipCheck("no text that the grammar allows could be written")
    return replies
