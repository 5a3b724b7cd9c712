"""EBNF allows the same texts in llguidance, which gets a translation, as in xgrammar, which reads
EBNF itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import Grammar, GrammarBackend, GrammarContext
from frame.plugins.grammar_backends import ebnf
from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError
from frame.text.tokenizer import Tokenizer

EXPRESSIONS = 'root ::= expr\nexpr ::= term (("+" | "-") term)*  # sums\nterm ::= [0-9]+ | "(" expr ")" | [a-z]+'
CLASSES = ("[a-c]", "[0-1]", "[^a-c0-1()+\\n]", "[x]", "[a-b0]")
SPECIAL = 5  # first ids of frame-tiny's vocabulary
TEXTS = ('"("', '")"', '"+"', '"ab"', '"é\\n"', '""', '"x"')


def random_grammar(rng: random.Random) -> str:
    """Four rules; the last is recursive in every other grammar."""

    def expression(depth: int, names: list[str]) -> str:
        if depth == 2 or rng.random() < 0.3:
            atom = rng.choice((*CLASSES, *CLASSES, *TEXTS, *names))
            return atom + (rng.choice(("", "+", "*", "?")) if atom in CLASSES else rng.choice(("", "", "", "?")))
        parts = [expression(depth + 1, names) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.5:
            return f"({' | '.join(parts)})"
        return f"({' '.join(parts)}){rng.choice(('', '', '*', '+', '?'))}"

    rules = [f"r0 ::= {expression(0, [])}", f"r1 ::= {expression(0, ['r0'])}", f"r2 ::= {expression(0, ['r0', 'r1'])}"]
    nest = rng.choice(('"<" root ">"', '"<" r2 root?', "r1"))
    return "\n".join(["root ::= r2 | " + nest, *rules])


def walk(grammar: Grammar, rng: random.Random, stops: tuple[int, ...]) -> tuple[list[int], bool]:
    """Tokens that the grammar allows, and whether it may end after them."""
    mask, tokens = np.zeros(64, np.int32), []
    for _ in range(12):
        grammar.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        going_on = [token for token in allowed if token not in stops]
        if not going_on or (len(going_on) < len(allowed) and rng.random() < 0.2):
            return tokens, True
        tokens.append(rng.choice(going_on))
        assert grammar.accept_token(tokens[-1])
    grammar.fill_mask(mask)
    return tokens, any(mask[stop // 32] >> stop % 32 & 1 for stop in stops)


def compare_with_xgrammar(backend: GrammarBackend, count: int) -> set[str]:
    """Random grammars allow the same texts in `backend` and in xgrammar. Returns the class names of
    what `backend` compiled."""
    from frame.plugins.grammar_backends.xgrammar import XGrammarBackend

    tokenizer = Tokenizer.load(find_model(EMBEDDED))
    backends = [backend, XGrammarBackend(GrammarContext(tokenizer, 2048))]
    rng, tried, kinds = random.Random(0), 0, set()
    for _ in range(count):
        source = random_grammar(rng)
        try:
            compiled = [each.compile("ebnf", source) for each in backends]
        except ValueError:
            continue  # no text at all, or no end
        kinds.add(type(compiled[0]).__name__)
        for i in range(10):
            try:
                tokens, may_end = walk(compiled[i % 2].start(), rng, tokenizer.eos_token_ids)
            except ValueError:  # beyond llguidance's limits
                continue
            if min(tokens, default=9) < SPECIAL or "\ufffd" in tokenizer.decode(tokens):
                continue  # xgrammar allows special tokens, and bytes that are not UTF-8
            other = compiled[1 - i % 2].start()
            assert all(other.accept_token(token) for token in tokens), (source, tokenizer.decode(tokens))
            if i % 2 or may_end:  # xgrammar may report that only the end may follow one token late
                assert other.accept_token(tokenizer.eos_token_ids[0]) == may_end, (source, tokenizer.decode(tokens))
            tried += 1
    assert tried > 6 * count
    return kinds


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.soak)])
def test_llguidance_and_xgrammar_allow_the_same_texts(count: int) -> None:
    pytest.importorskip("xgrammar")
    from frame.plugins.grammar_backends.llguidance import LLGuidanceBackend

    assert compare_with_xgrammar(LLGuidanceBackend(GrammarContext(Tokenizer.load(find_model(EMBEDDED)), 2048)), count) == {"LLCompiled"}


def test_runs_are_lexemes_where_that_is_equivalent() -> None:
    assert ebnf.find_lexemes(ebnf.read(EXPRESSIONS)) == {((48, 57),), ((97, 122),)}
    assert "/[\\x{30}-\\x{39}]+/" in ebnf.to_lark(ebnf.read(EXPRESSIONS))
    for source in (
        'root ::= "(" root ")" | [0-9]+ [0-9]*',  # followed by itself
        'root ::= "(" root ")" | ([0-9]+)*',
        'root ::= "(" root ")" | a a\na ::= [0-9]+ | "x"',
        'root ::= "(" root ")" | [0-9]+ | "0x"',  # a character of it elsewhere
        'root ::= "(" root ")" | [0-9]+ | [0-9] "x"',
        'root ::= "(" root ")" | [0-9]+ | [5-7]+ "x"',
        'root ::= "(" root ")" | [0]+ | "0"',
    ):
        assert not ebnf.find_lexemes(ebnf.read(source)) & {((48, 57),), ((48, 48),)}, source


UNREADABLE = (
    *("", "a ::= b", "root ::= x", 'root ::= "a', 'root ::= "a"{2}', "root ::= [b-a]", "root ::= [", "root ::= (a", 'start: "a"'),
    *('root ::= "\\ud800"', 'root ::= "a"**', 'root ::= "a"\nroot ::= "b"', 'root ::= "\\q"', "root ::= []"),
    *("root ::= " + "(" * 70 + '"a"' + ")" * 70, "root ::= " + '"a" ' * 3000),
)


@pytest.mark.parametrize("source", UNREADABLE)
def test_unsupported_syntax_is_refused(source: str) -> None:
    with pytest.raises(UnsupportedSyntaxError):
        ebnf.read(source)
