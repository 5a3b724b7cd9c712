"""EBNF without recursion becomes an automaton with the same texts; recursive EBNF goes to the
fallback backend."""

from __future__ import annotations

import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.plugins.grammar_backends import ebnf
from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError
from frame.plugins.grammar_backends.states.regular import Language
from frame.text.tokenizer import Tokenizer
from frame_automata.backend import AutomataBackend
from frame_automata.regular_ebnf import read_rules
from tests.plugins.grammar_backends.test_ebnf import EXPRESSIONS, compare_with_xgrammar


@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.soak)])
def test_automata_and_xgrammar_allow_the_same_texts(count: int) -> None:
    backend = AutomataBackend(GrammarContext(Tokenizer.load(find_model(EMBEDDED)), 2048))
    assert compare_with_xgrammar(backend, count) == {"AutomatonCompiled", "LLCompiled"}


def test_regular_rules_become_a_node() -> None:
    assert read_rules(Language(), ebnf.read(EXPRESSIONS)) is None
    language = Language()
    node = read_rules(language, ebnf.read('root ::= a? "!" # the end\na ::= ([0-9]+ | "\\u00e9\\x41")\n  [^a-y]'))
    assert node is not None
    for text, is_right in (("12z!", True), ("!", True), ("éAz!", True), ("éaz!", False), ("12!", True), ("1!", False)):
        assert language.follow(node, text.encode()).is_nullable == is_right, text


def test_a_grammar_with_too_many_states_is_refused() -> None:
    doubling = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "a" | "b"'])
    with pytest.raises(UnsupportedSyntaxError, match="too many"):
        read_rules(Language(), ebnf.read(doubling))
