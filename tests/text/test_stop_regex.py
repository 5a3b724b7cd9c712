"""`stop_regex`: the place of a match equals that of `re`, whatever the pieces; hostile patterns."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.text.incremental_decoder import MAX_HELD, TextStream
from frame.text.stop_regex import MAX_PLACES, PatternError, RegexSearch, check_patterns

PIECES = ["a", "b", "ab", "[ab]", "[^a]", ".", r"\n", "a?b", "(?:ab)+", "(a|bb)", "b{2,3}", "a{2}", "(?i:A)", r"\d", r"\W", "^a", "(?:a*b)"]
patterns = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
texts = st.text("ab1\nA ", max_size=24)


class Letters:
    """A decoder whose ids are characters."""

    def feed(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def run(text: str, **params: object) -> tuple[str, Finish | None, int]:
    """(the text, how it ended, characters read) of a stream that gets `text` by character."""
    stream = TextStream(Letters(), SamplingParams(**params))  # type: ignore[arg-type]
    shown = ""
    for count, character in enumerate(text, 1):
        added, _, finish = stream.feed([ord(character)], Finish("length") if count == len(text) else None)
        shown += added
        if finish is not None:
            return shown, finish, count
    return shown, None, len(text)


@settings(deadline=None, max_examples=300)
@given(patterns, texts, st.integers(1, 5))
def test_a_match_is_where_re_finds_it(pattern: str, text: str, size: int) -> None:
    """The first place at which a match ends, and of the matches that end there the one that begins
    first."""
    expected = None
    for end in range(1, len(text) + 1):
        begins = [begin for begin in range(end) if re.compile(pattern).fullmatch(text, begin, end)]
        if pattern.startswith("^"):
            begins = [begin for begin in begins if begin == 0]
        if begins:
            expected = (begins[0], end)
            break
    search, place = RegexSearch((pattern,)), 0
    while place < len(text):
        added = text[place : place + size]
        place += len(added)
        if (match := search.feed(added)) is not None:
            assert (place - match[0], place - match[1]) == expected
            return
        assert search.num_held <= place
        if expected is not None:
            assert place - search.num_held <= expected[0], "what may become part of the match is held back"
    assert expected is None


def test_text_of_a_match_is_left_out_or_kept() -> None:
    text = "Call 555-1234 now"
    assert run(text, stop_regex=(r"\d{3}-\d{4}",)) == ("Call ", Finish("stop", r"\d{3}-\d{4}"), 13)
    assert run(text, stop_regex=(r"\d{3}-\d{4}",), include_stop_str_in_output=True)[0] == "Call 555-1234"
    assert run("Call 555-99 now", stop_regex=(r"\d{3}-\d{4}",)) == ("Call 555-99 now", Finish("length"), 15)
    assert run("foobar foo. x", stop_regex=(r"\bfoo\b",))[:2] == ("foobar ", Finish("stop", r"\bfoo\b"))
    assert run("one END\nEND two", stop_regex=("(?m)^END",))[0] == "one END\n"
    assert run("abc", stop=("bc",), stop_regex=("c",))[0] == "a", "the match that begins first"
    assert run("a1b2", stop_regex=(r"\d",), min_tokens=3)[0] == "a1b"
    assert run("x\ny", stop_regex=(r"^y",))[1] == Finish("length")


def test_held_text_is_bounded() -> None:
    stream = TextStream(Letters(), SamplingParams(stop_regex=("(?s)<.*>",)))
    text = "".join(stream.feed([ord(c)], None)[0] for c in "<" + "x" * 3 * MAX_HELD)
    assert len(text) == 2 * MAX_HELD + 1
    assert stream.feed([ord(">")], None)[2] == Finish("stop", "(?s)<.*>")


BACKTRACKING = ["(a+)+$", "(a+)+x$", "(a|a)*x", "(.*a){20}x", "(a?){24}a{24}x", r"(\w|\d|a){16}x"]
LARGEST = [".{49}x", "(?:a?b?){24}x", r"(?:a|\B){16}x", r"(?:\Ba){16}x", r"(?:(?:\b|\B)a?){9}x", "a{16}(a?){33}x"]


@pytest.mark.parametrize("pattern", BACKTRACKING + LARGEST)
@pytest.mark.parametrize("text", ["a" * 1000, "ab" * 500, "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))], ids=["one", "two", "many"])
def test_a_character_takes_bounded_time(pattern: str, text: str) -> None:
    check_patterns((pattern,))
    seconds = []
    for _ in range(3):
        search, began = RegexSearch((pattern,)), time.process_time()
        for character in text:
            search.feed(character)
        seconds.append(time.process_time() - began)
    assert min(seconds) / len(text) < 100e-6, "30 us are measured; backtracking would never end"


def test_classes_are_those_of_re() -> None:
    """Each kind of characters, from several alphabets, with and without case."""
    characters = [chr(point) for point in (*range(0x250), *range(0x370, 0x600), 0x130, 0x1E9E, 0x2028, 0x2163, 0x1F600)]
    for pattern in [r"\d", r"\D", r"\s", r"\S", r"\w", r"\W", r"[^\W\d]", "[a-fμ]", "(?i)[a-fμ]", "(?i)[^k-s]", ".", "(?s).", r"[\d\s-]"]:
        compiled = re.compile(pattern)
        differing = [c for c in characters if (RegexSearch((pattern,)).feed(c) is not None) != (compiled.match(c) is not None)]
        assert not set(differing) - set("ſıİKſµμ"), (pattern, differing)  # cases that `re` folds further


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "is no regular expression: missing"),
        ("a*", "matches an empty text"),
        ("^", "matches an empty text"),
        (r"(a)\1", "a backreference"),
        ("a(?=b)", "a lookahead"),
        ("(?<!a)b", "a lookahead or lookbehind"),
        ("a++", "a possessive repetition"),
        ("(?>a)", "an atomic group"),
        ("(?a:x)", "a flag"),
        ("a{1000000}", f"more than {MAX_PLACES} characters"),
        ("((a{0,60}){0,60}){60}", f"more than {MAX_PLACES} characters"),
        ("(|){3000000000}a", f"more than {MAX_PLACES} characters"),
        ("(" * 900 + "a" + ")" * 900, "nests too deeply"),
    ],
)
def test_patterns_that_are_refused(pattern: str, says: str) -> None:
    began = time.process_time()
    with pytest.raises(PatternError, match=re.escape(says)):
        check_patterns((pattern,))
    assert time.process_time() - began < 1.0


def test_patterns_share_the_limit() -> None:
    check_patterns(("a" * 25, "b" * 25))
    with pytest.raises(PatternError, match="more than"):
        check_patterns(("a" * 40, "b" * 30))
    with pytest.raises(PatternError, match="more than 50 different"):
        check_patterns(("[" + "".join(map(chr, range(0x4E00, 0x4E00 + 51))) + "]",))
