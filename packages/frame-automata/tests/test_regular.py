"""Automata match the texts of Python's expressions, and their masks agree with following each
token's text."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from frame.core.interfaces.sampling import Grammar
from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError, complement
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.regular_syntax import literal, literals, read
from frame_automata.automaton import AutomatonCompiled, Masks, Vocabulary
from frame_automata.states import TooMuchWorkError, only_byte
from tests.core.scheduling.scripted_grammar import Script
from tests.plugins.grammar_backends import random_grammars

CHARS = "ab01 .-é€😀\n\v"
PIECES = [
    *("a", "b", "[a-b]", "[^a]", ".", "é", "[à-ü€]", r"\d", r"\w", r"\s", r"[\d.\-]", r"\.", "(?:ab)", "(a|b0)", "[^\\n€-😀]"),
    *(r"\x61", r"\u00e9"),
]  # fmt: skip


def expression(rng: random.Random, depth: int = 0) -> str:
    if depth == 3 or rng.random() < 0.4:
        return rng.choice(PIECES)
    parts = [expression(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    text = f"({'|'.join(parts)})" if rng.random() < 0.4 else f"(?:{''.join(parts)})"
    low = rng.randint(0, 3)
    return text + rng.choice(["", "", "*", "+", "?", f"{{{low}}}", f"{{{low},}}", f"{{{low},{low + rng.randint(0, 2)}}}", "*?"])


def matches(language: Language, node: Node, text: str) -> bool:
    return language.follow(node, text.encode()).is_nullable


def some_text(rng: random.Random, language: Language, node: Node) -> str:
    """A random text that the automaton accepts."""
    found = bytearray()
    for _ in range(60):
        if node.is_nullable and rng.random() < 0.3:
            break
        bytes_ = [byte for byte in range(256) if language.derive(node, byte) is not language.none]
        if not bytes_:
            break
        found.append(rng.choice(bytes_))
        node = language.derive(node, found[-1])
    return found.decode(errors="replace") if node.is_nullable else ""


@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=pytest.mark.soak)])
def test_texts_are_those_of_the_expression(count: int) -> None:
    rng = random.Random(0)
    matched = 0
    for i in range(count):
        pattern = random_grammars.regex(i) if i % 3 == 0 else expression(rng)
        language = Language()
        node = read(language, pattern)
        compiled = re.compile(pattern, re.ASCII)
        texts = ["".join(rng.choice(CHARS) for _ in range(rng.randint(0, 8))) for _ in range(10)]
        for text in [*texts, some_text(rng, language, node), some_text(rng, language, node)]:
            expected = compiled.fullmatch(text) is not None
            assert matches(language, node, text) == expected, (pattern, text)
            matched += expected
            clamped = language.clamp(node, len(text.encode()))
            assert matches(language, clamped, text) == expected, (pattern, text)
    assert matched > count / 2


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?i)a", r"\1", r"\bx", r"\p{L}", r"\D", "a**", "a{2", "a{3,2}", "(a", "a)", "[a", "[b-a]", "^a|b", "a$b", "a^",
     "[[:alpha:]]", "[a&&b]", "*a", "\\", "[]", "(?P<n>a)", "a{9999999}", "(" * 200 + ")" * 200, r"\ud800", "x" * 20_000],
)  # fmt: skip
def test_syntax_that_differs_between_dialects_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedSyntaxError):
        read(Language(), pattern)


RUNS = ("", "[ab]{2,30}", "[ab]{0,6}[01]", "(?:[b0]|é|[1a]b){0,5} ", "[^a]*a[ab]{0,3}")  # whose repetitions the masks count


def vocabulary(rng: random.Random) -> Vocabulary:
    words = {"".join(rng.choice("ab01 .-") for _ in range(rng.randint(2, 7))).encode() for _ in range(300)}
    texts = [b"", *(bytes([i]) for i in range(256)), *sorted(words), "é".encode(), b"\x98\x80a", b"a", b""]
    by_text = {text: i for i, text in reversed(list(enumerate(texts)))}

    def tokenize(data: bytes) -> list[int]:
        found = []
        while data:
            max_length = max(end for end in range(1, len(data) + 1) if data[:end] in by_text)
            found.append(by_text[data[:max_length]])
            data = data[max_length:]
        return found

    return Vocabulary(texts, frozenset([0]), tokenize)


def start_fallback() -> Grammar:
    raise AssertionError("the automaton needs no fallback")


def test_masks_hold_the_tokens_that_continue_the_text() -> None:
    rng = random.Random(4)
    known = vocabulary(rng)
    texts = known.tree.texts
    masks = Masks(known, limit=0)  # keeps the minimum
    mask = np.empty(known.tree.words, np.int32)
    forced = 0
    for i in range(60):
        language = Language()
        compiled = AutomatonCompiled(language, read(language, expression(rng) + RUNS[i % len(RUNS)]), masks, start_fallback)
        grammar, node = compiled.start(), compiled.node
        for _ in range(12):
            assert grammar.fill_mask(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            free = [t for t, text in enumerate(texts) if text and language.follow(node, text) is not language.none]
            if len(allowed) == 1 and len(free) > 1:
                forced += 1
                assert allowed[0] in free and only_byte(node) == texts[allowed[0]][0]
            else:
                assert allowed == [0] * node.is_nullable + free
            refused = rng.randrange(1, len(texts))
            assert refused in free or not grammar.accept_token(refused)
            token = rng.choice(allowed)
            assert grammar.accept_token(token)
            if grammar.is_finished():
                break
            node = language.follow(node, texts[token])
    assert forced > 5 and len(masks._cache) == 16


def test_counts_share_masks_and_clearing_caches_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known = vocabulary(random.Random(2))
    language, masks = Language(), Masks(known)
    grammar = AutomatonCompiled(language, read(language, "(a+ ){2,4000}b"), masks, start_fallback).start()
    mask, seen = np.empty(known.tree.words, np.int32), []
    a, space = (next(i for i, text in enumerate(known.tree.texts) if text == each) for each in (b"a", b" "))
    for round_ in range(3):
        monkeypatch.setattr("frame.plugins.grammar_backends.states.regular.MAX_NODES", 60_000 if round_ < 2 else 0)
        for token in [a, a, space] * 300:
            assert grammar.accept_token(token) and grammar.fill_mask(mask)
            seen.append(mask.tobytes())
        if round_ == 1:
            assert len(masks._cache) < 12
    assert len(set(seen[30:])) == 2


def test_work_is_bounded() -> None:
    known = vocabulary(random.Random(3))
    language = Language()
    assert complement([(0, 0x10FFFF)]) == []
    with pytest.raises(ValueError, match="no text at all"):
        AutomatonCompiled(language, language.none, Masks(known), start_fallback)
    long = AutomatonCompiled(language, literal(language, "ab" * 4000), Masks(known), start_fallback).start()
    mask = np.empty(known.tree.words, np.int32)
    assert long.fill_mask(mask) and np.unpackbits(mask.view(np.uint8)).sum() == 1
    deep = language.repeat(literal(language, "ab" * 2000), 3, 3)
    assert AutomatonCompiled(language, deep, Masks(known), start_fallback).start().fill_mask(mask)


def test_masks_are_computed_at_compile_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame_automata.automaton.WARMUP_SECONDS", 60.0)  # however slow the machine is
    known, language = vocabulary(random.Random(5)), Language()
    masks = Masks(known)
    compiled = AutomatonCompiled(language, read(language, r'\[("[ab]{0,20}",){1,9}"b"\]'), masks, start_fallback)
    before, grammar, mask = len(masks._cache), compiled.start(), np.empty(known.tree.words, np.int32)
    for token in known.tokenize(b'["ab","b","b"]'):
        assert grammar.fill_mask(mask) and grammar.accept_token(token)
    assert grammar.is_finished() and before > 8 and len(masks._cache) - before < 4


def test_too_much_work_goes_to_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame_automata.automaton.WARMUP_TEXTS", 0)
    known, language = vocabulary(random.Random(4)), Language()
    compiled = AutomatonCompiled(language, read(language, "[ab]{2}[ab]*a[ab]{20}"), Masks(known), lambda: Script([1] * 9, 300))
    grammar = compiled.start()
    a, mask = known.tree.texts.index(b"a"), np.empty(known.tree.words, np.int32)
    assert grammar.fill_mask(mask) and grammar.accept_token(a) and grammar.fill_mask(mask)
    monkeypatch.setattr("frame_automata.states.MAX_WORK", 2)
    monkeypatch.setattr(Script, "accept_token", lambda self, token: self.taken.append(token) is None)
    assert grammar.accept_token(a) and grammar.fill_mask(mask)
    assert not grammar.is_finished() and np.unpackbits(mask.view(np.uint8)).sum() == 1
    assert isinstance(compiled.start(), Script) and isinstance(grammar._fallback_grammar, Script)
    assert grammar._fallback_grammar.taken == [a, a]
    with pytest.raises(TooMuchWorkError, match="more work"):
        AutomatonCompiled(Language(), read(language, "[ab]*a[ab]{21}"), Masks(known), start_fallback)


def test_many_texts_share_their_prefixes() -> None:
    rng = random.Random(0)
    for count in (0, 1, 2, 40):
        texts = ["".join(rng.choice("ab€") for _ in range(rng.randint(0, 5))) for _ in range(count)]
        language = Language()
        node = literals(language, texts)
        for text in [*texts, "", "a", "ab€", "b" * 6]:
            assert matches(language, node, text) == (text in texts)
    language = Language()
    known = vocabulary(rng)
    compiled = AutomatonCompiled(language, literals(language, [f"b{i:04d}" for i in range(2000)]), Masks(known), start_fallback)
    assert language.num_nodes < 2000 and compiled.start().fill_mask(np.empty(known.tree.words, np.int32))
    with pytest.raises(UnsupportedSyntaxError):
        literals(language, ["x" * 20_000])


def test_many_parallel_counts_go_to_the_fallback() -> None:
    known, language = vocabulary(random.Random(6)), Language()
    wide = "|".join(f"[ab]{{0,{i + 2}}}{i % 2}" for i in range(30))
    with pytest.raises(TooMuchWorkError, match="side by side"):
        AutomatonCompiled(language, read(language, wide), Masks(known), start_fallback)
    later = AutomatonCompiled(language, read(language, f"a({wide})"), Masks(known), lambda: Script([1] * 9, 300))
    assert isinstance(later.start(), Script)
