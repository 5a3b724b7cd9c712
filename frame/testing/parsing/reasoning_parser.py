"""The conformance suite of reasoning parsers, on noise and on texts that the parser's own grammar
allows. Must not know a parser by name.

The class may state what it reads: `conformance_replies` is a tuple of (end of the prompt, text,
reasoning, content).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from frame.interfaces.parsing import Format, ReasoningParser
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.contexts import PARSER
from frame.testing.parsing.reading import (
    MAX_HELD,
    ODD,
    compare_interleaved,
    compare_splits,
    require_bounded_responses,
    require_linear_time,
    require_no_error,
    require_quick_pieces,
)
from frame.testing.parsing.texts import CHARACTERS, THOUGHT, accepts, noise, write

PROMPT_ENDS = ("", "<think>\n", "<think>\n\n</think>\n\n", "[THINK]", "<|start|>assistant<|channel|>analysis<|message|>")
REPLY = "7 of 8"

GAPS = ("", "\n", "\n\n", " ")  # that templates write after a mark
MakeReasoning = Callable[[], ReasoningParser]


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `reasoning_parser`."""
    make = partial(subject.target, PARSER, subject.options)
    yield from collect(__name__, make)
    yield Check("reads_as_it_states", partial(_reads_as_it_states, make, getattr(subject.target, "conformance_replies", ())))


def _reads_as_it_states(make: MakeReasoning, stated: Sequence[tuple[str, str, str, str]]) -> None:
    """The class's own examples, whole and character by character."""
    if not stated:
        raise SkipCheck("the class has no conformance_replies: messages that its grammar does not show are not checked")
    for prompt_end, text, *expected in stated:
        for pieces in ([text], [*text]):
            read = read_reasoning(make, pieces, prompt_end)
            assert read == (*expected,), f"{text!r} after the prompt {prompt_end!r} is read as {read}, and not as {expected}"


def find_pairs(make: MakeReasoning) -> list[tuple[str, str]]:
    """The marks that open and close the parser's reasoning: those that it names, and the tags of
    free text in its grammar."""
    parser = make()
    parser.begin("")
    named = parser.find_marks()
    pairs = {(named.begin, named.end)} if named is not None else set()
    waiting: list[Any] = [parser.grammar({"type": "const_string", "value": REPLY}, is_calls=False)]
    while waiting:
        form = waiting.pop()
        if isinstance(form, dict):
            if form.get("type") == "tag" and form["content"] == {"type": "any_text"}:
                pairs.add((form["begin"], form["end"] if isinstance(form["end"], str) else form["end"][0]))
            waiting += form.values()
        elif isinstance(form, list):
            waiting += form
    return sorted(pair for pair in pairs if pair[1])  # the first may be empty: reasoning comes first


def find_begins(make: MakeReasoning) -> list[str]:
    """Marks that open the reasoning: the parser's, and those of known models."""
    return [*dict.fromkeys(begin for begin in (*(begin for begin, _ in find_pairs(make)), "<think>", "[THINK]") if begin)]


def find_prompt_ends(make: MakeReasoning) -> list[str]:
    """Ends of prompts: those of known models, and those that open or close this parser's
    reasoning."""
    ends = [end for begin, close in find_pairs(make) for end in (begin, f"{begin}\n", f"{begin}\n\n{close}\n\n")]
    return [*dict.fromkeys((*PROMPT_ENDS, *ends))]


def make_marked_texts(make: MakeReasoning) -> list[str]:
    """Texts with the parser's own marks: parts of them, blank lines beside them, and marks within
    the answer."""
    texts = []
    for begin, end in find_pairs(make):
        texts += [f"{begin}{'x' * size} {end[:size]} y{end}{REPLY}" for size in range(1, len(end))]
        texts += [f"{begin}{THOUGHT}{end}\n\n {REPLY}", f"{begin}{THOUGHT}{end}{REPLY} {end} or {begin} is {end}\n"]
        texts += [f"{REPLY} {end} {begin}"]
        texts += [f"{begin}{THOUGHT} {end[:-1]}", f"{begin[:-1]} {REPLY}", f"{begin}{end}{REPLY}", f"{begin}{begin}{end}{REPLY}"]
    return texts


def read_reasoning(make: MakeReasoning, pieces: Iterable[str], prompt_end: str = "", may_think: bool = True) -> tuple[str, str]:
    """The reasoning and the content of a text in pieces."""
    parser = make()
    parser.begin(prompt_end, may_think)
    deltas = [*map(parser.feed, pieces), parser.finish()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


def check_text_is_kept(make: MakeReasoning) -> None:
    """Every character of a text without marks is reasoning or content, after any prompt."""
    parts = [f"1 {end[:size]}" for _, end in find_pairs(make) for size in range(1, len(end))]
    parts += [begin[:size] for begin in find_begins(make) for size in range(1, len(begin))]
    for prompt_end in find_prompt_ends(make):
        for text in ("Hello, world.", "x", " two  words\nand a line ", "日本 🙂", "1 <", *parts):
            for pieces in ([text], list(text)):
                result = "".join(read_reasoning(make, pieces, prompt_end))
                assert result.split() == text.split(), f"{text!r} after the prompt {prompt_end!r} is read as {result!r}"


def check_reasoning_is_not_held_back(make: MakeReasoning) -> None:
    text = "word " * 400
    for prompt_end in find_prompt_ends(make):
        parser = make()
        parser.begin(prompt_end)
        deltas = [parser.feed(piece) for piece in text]
        size = sum(len(delta.reasoning) + len(delta.content) for delta in deltas)
        assert size >= len(text) - MAX_HELD, f"{len(text) - size} of {len(text)} characters are held back after the prompt {prompt_end!r}"


def check_reasoning_that_is_off_is_content(make: MakeReasoning) -> None:
    result = read_reasoning(make, [REPLY], may_think=False)
    assert result == ("", REPLY), f"{REPLY!r} is read as {result} where the client switched reasoning off"


def check_grammar_demands_no_reasoning_that_is_off(make: MakeReasoning) -> None:
    """Where the client switched reasoning off, or the prompt closed it, the answer alone is
    allowed."""
    closed = [f"{begin}\n\n{end}\n\n" for begin, end in find_pairs(make)]
    for prompt_end, may_think in (("", False), *((end, True) for end in closed), *((end, False) for end in closed)):
        parser = make()
        parser.begin(prompt_end, may_think)
        form = parser.grammar({"type": "const_string", "value": REPLY}, is_calls=False)
        texts = [text for seed in range(8) if accepts(form, text := write(form, random.Random(seed)))]
        if texts and not any(THOUGHT not in text for text in texts):
            state = "the prompt closed the reasoning" if may_think else "the client switched reasoning off"
            raise AssertionError(f"grammar() demands reasoning where {state}: {texts[0]!r}")


def check_grammar_allows_no_reasoning_that_is_off(make: MakeReasoning) -> None:
    """Where the client switched reasoning off, an answer with a format does not reason."""
    parser = make()
    parser.begin("", False)
    form = parser.grammar({"type": "const_string", "value": REPLY}, is_calls=False)
    for seed in range(12):
        text = write(form, random.Random(seed))
        assert THOUGHT not in text or not accepts(form, text), f"grammar() allows {text!r} where the client switched reasoning off"


def check_grammar_closes_the_prompts_reasoning(make: MakeReasoning) -> None:
    """A reply or calls after reasoning that the prompt has opened: the grammar has the mark that
    closes it, and a text of it is read as reasoning and a reply."""
    for prompt_end in find_prompt_ends(make):
        for is_calls in (False, True):
            parser = make()
            parser.begin(prompt_end)
            marks = parser.find_marks()
            if marks is None or marks.begin or not marks.end:
                continue
            form = parser.grammar({"type": "const_string", "value": REPLY}, is_calls=is_calls)
            what = f"after the prompt {prompt_end!r}, which opens the reasoning, grammar(is_calls={is_calls})"
            assert marks.end in json.dumps(form, ensure_ascii=False), f"{what} leaves no room for the reasoning, which {marks.end!r} ends"


def check_marks_within_the_prompt_count_no_more(make: MakeReasoning) -> None:
    """A user may write about marks: those that other text follows open nothing."""
    for begin, end in find_pairs(make):
        for question in (f"what is {begin} for?\n", f"{begin}\nis a mark. Is it?", f"{begin} x {end}{begin} y", f"{begin}{THOUGHT}"):
            got, expected = read_reasoning(make, [REPLY], question), read_reasoning(make, [REPLY], "what is it for?\n")
            assert not begin or got == expected, f"{REPLY!r} after a prompt that ends with {question!r} is read as {got}, not {expected}"


def check_space_after_the_prompts_mark_changes_nothing(make: MakeReasoning) -> None:
    """Templates write line breaks after the mark that opens the reasoning."""
    for begin, end in find_pairs(make):
        read = [read_reasoning(make, [f"{THOUGHT}{end}{REPLY}"], begin + gap) for gap in GAPS]
        assert all(each == read[0] for each in read), f"after a prompt that ends with {begin!r} and white space, {read} is read"


def check_marks_are_those_that_are_read(make: MakeReasoning) -> None:
    """`find_marks`, by which the server limits the reasoning, says where it begins and ends after
    each prompt."""
    for prompt_end in find_prompt_ends(make):
        parser = make()
        parser.begin(prompt_end)
        marks = parser.find_marks()
        if marks is not None and marks.end:
            reasoning, content = read_reasoning(make, [marks.begin + THOUGHT, marks.end + REPLY], prompt_end)
            is_read = reasoning.strip() == THOUGHT and content.strip() in (REPLY, "")  # an answer may need a header
            what = f"the marks are {marks}, and a text with them has the reasoning {reasoning!r} and the content {content!r}"
            assert is_read, f"after the prompt {prompt_end!r}, {what}"
        elif marks is not None:
            assert not read_reasoning(make, [REPLY], prompt_end)[0], f"after the prompt {prompt_end!r} are no marks, and there is reasoning"


def check_grammar_keeps_the_reply(make: MakeReasoning) -> None:
    reply: Format = {"type": "const_string", "value": REPLY}
    for prompt_end in find_prompt_ends(make):
        for is_calls in (False, True):
            parser = make()
            parser.begin(prompt_end)
            assert REPLY in json.dumps(parser.grammar(reply, is_calls=is_calls)), "grammar() loses the format of the answer"


def check_grammars_are_those_of_their_replies(make: MakeReasoning) -> None:
    """Replies of one type with other schemas, none of which the parser changes."""
    for number in (1, 2, 1):
        for is_calls in (False, True):
            schema = {"type": "object", "properties": {f"only_in_{number}": {"type": "integer"}}}
            reply: Format = {"type": "json_schema", "json_schema": schema}
            before, parser = json.dumps(reply), make()
            parser.begin("")
            form = parser.grammar(reply, is_calls=is_calls)
            assert f"only_in_{number}" in json.dumps(form), "grammar() returns the format of another reply of the same type"
            assert json.dumps(reply) == before, "grammar() changes the format of the reply, which the caller uses again"
            other: Format = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"only_in_other": {"type": "integer"}}}}
            assert "only_in_other" in json.dumps(parser.grammar(other, is_calls=is_calls)), "grammar() returns the format of another reply"


def check_long_reasoning_is_kept(make: MakeReasoning) -> None:
    """100,000 characters of each part."""
    for prompt_end in find_prompt_ends(make):
        for length in (10, 100_000):
            text = "so it is. " * (length // 10)
            reasoning, content = read_reasoning(make, [text[place : place + 1000] for place in range(0, len(text), 1000)], prompt_end)
            kept = len(reasoning) + len(content)
            assert kept >= len(text) - MAX_HELD, f"of {len(text)} characters after the prompt {prompt_end!r}, {kept} are returned"


def check_a_piece_of_reasoning_is_read_at_once(make: MakeReasoning) -> None:
    require_quick_pieces(lambda: _started(make))


def check_nothing_is_kept_of_replies(make: MakeReasoning) -> None:
    require_bounded_responses(lambda: _started(make))


def _started(make: MakeReasoning) -> ReasoningParser:
    parser = make()
    parser.begin("")
    return parser


def check_known_replies_are_read(make: MakeReasoning) -> None:
    for text, prompt_end, may_think in find_replies(make):
        reasoning, content = read_reasoning(make, [text], prompt_end, may_think)
        thought = THOUGHT if THOUGHT in text else ""
        where = f"{text!r} after the prompt {prompt_end!r} is allowed by the grammar"
        assert content.strip() == REPLY, f"{where}, and {content!r} of it is read as content"
        assert reasoning.strip() == thought, f"{where}, and {reasoning!r} of it is read as reasoning"


def check_reasoning_splits_change_nothing(make: MakeReasoning) -> None:
    for prompt_end in find_prompt_ends(make):
        known = [text for text, end, may_think in find_replies(make) if end == prompt_end and may_think]
        texts = [*noise(), *make_marked_texts(make), *known]
        compare_splits(lambda pieces, prompt_end=prompt_end: read_reasoning(make, pieces, prompt_end), texts)  # type: ignore[misc]


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
    for begin, end in find_pairs(make):  # within the closing mark
        for size in range(1, len(end)):
            reasoning, content = read_reasoning(make, [f"{begin}{THOUGHT}{end[:size]}"])
            assert not content.strip(), f"a response that ends within its closing mark has the content {content!r}"
            assert reasoning.strip().startswith(THOUGHT), f"a response that ends within its closing mark has the reasoning {reasoning!r}"
    marks = _started(make).find_marks()
    if marks is not None and marks.end and not marks.begin:  # all text is reasoning, up to its end
        for text in (begin[:size] for begin in find_begins(make) for size in range(1, len(begin))):
            assert not read_reasoning(make, [text])[1].strip(), f"{text!r}, which ends within the reasoning, is read as content"
    if not checked:
        raise SkipCheck("no text of the grammar has reasoning")


def check_replies_stand_alone(make: MakeReasoning) -> None:
    """Parsers of two responses, fed in turn, share nothing."""

    texts = [*noise()[:10], *make_marked_texts(make), *(text for text, end, _ in find_replies(make) if not end)]
    compare_interleaved(lambda: _started(make), lambda pieces: read_reasoning(make, pieces), texts)


def check_odd_reasoning_does_not_raise(make: MakeReasoning) -> None:
    for prompt_end in (*find_prompt_ends(make), *ODD, "<think>" * 99):
        for odd in ODD:
            marked = [f"{begin}{odd}{close}{odd}" for begin, close in find_pairs(make)]
            for text in (odd, *marked, f"<think>{odd}</think>{odd}", f"[THINK]{odd}[/THINK]", f"<|channel|>{odd}<|message|>{odd}<|end|>"):
                require_no_error(lambda text=text, end=prompt_end: read_reasoning(make, [text], end), text)  # type: ignore[misc]


def check_reasoning_time_is_linear(make: MakeReasoning) -> None:
    own = [begin for begin, _ in find_pairs(make)]
    require_linear_time(lambda pieces: read_reasoning(make, pieces), [*dict.fromkeys(["", "<think>", "[THINK]", *own])])


def find_replies(make: MakeReasoning) -> list[tuple[str, str, bool]]:
    """Texts that the grammar allows around the answer, each with the end of its prompt and whether
    reasoning is on."""
    replies = []
    reply: Format = {"type": "const_string", "value": REPLY}
    for prompt_end in find_prompt_ends(make):
        for may_think in (True, False):
            parser = make()
            parser.begin(prompt_end, may_think)
            form = parser.grammar(reply, is_calls=False)
            texts = {write(form, random.Random(seed)) for seed in range(4)}
            replies += [(text, prompt_end, may_think) for text in sorted(texts) if accepts(form, text)]
    if not replies:
        raise SkipCheck("no text that the grammar allows could be written")
    return replies


def check_characters_are_kept(make: MakeReasoning) -> None:
    """Line ends, control characters and letters in several forms stay as they were written."""
    for prompt_end in find_prompt_ends(make):
        for text in CHARACTERS:
            result = "".join(read_reasoning(make, [text], prompt_end)).strip()
            assert result == text, f"{text!r} after the prompt {prompt_end!r} is read as {result!r}"


def check_a_response_may_be_empty(make: MakeReasoning) -> None:
    """A response that ends before its first token is read by `finish` alone."""
    for prompt_end in find_prompt_ends(make):
        result = read_reasoning(make, [], prompt_end)
        assert result == ("", ""), f"no text after the prompt {prompt_end!r} is read as {result}"
