"""Every grammar backend passes its suite, and the suite's own cases are what they say."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from frame.core.interfaces.sampling import CompiledGrammar, Grammar, GrammarContext
from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.conformance import run_suite
from frame.testing.sampling.grammar_backend import check_masks_equal_a_reference
from frame.testing.sampling.grammar_cases import FINITE, OPEN, Vocabulary
from frame.testing.sampling.grammar_requests import REQUESTS, check_many_requests_have_the_masks_of_one, check_masks_are_filled_together
from frame.testing.sampling.grammar_run import Run
from tests.testing.mutants import Mutant
from tests.testing.mutants.grammar_backend import Wrapped

REGISTRY = load_registry(installed=False)


# `combined` calls the two others; in `make test`, tests/plugins/grammar_backends has its choice
# between them (test_backends.py) and its outputs (test_validity.py)
COMBINED = pytest.param("combined", marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize("name", [COMBINED if record.name == "combined" else record.name for record in REGISTRY.records("grammar_backend")])
def test_in_tree(name: str) -> None:
    for library in ("xgrammar", "llguidance"):
        pytest.importorskip(library)
    subject = conformance.find(REGISTRY, f"grammar_backend:{name}", conformance.Setting())
    for check in conformance.checks("grammar_backend", subject):
        check.run()


def test_tokens_spell_their_bytes() -> None:
    vocabulary = Vocabulary.load()
    assert len(vocabulary.single_bytes) == 256
    for text in ("naïve 😀 日本", "\n\t x", "a.b"):
        assert b"".join(vocabulary.tokens[token] for token in vocabulary.encode(text)) == text.encode()
    allowed = vocabulary.allowed({b"ab", b""})
    assert set(np.flatnonzero(allowed)) == {*vocabulary.ends, *(i for i, text in vocabulary.tokens.items() if text in (b"a", b"ab"))}


def test_cases_hold_what_they_say() -> None:
    for case in FINITE:
        assert case.texts
        if case.kind == "regex":
            assert all(re.fullmatch(case.source, text.decode()) for text in case.texts), case.name
    for case in OPEN:
        assert all(case.holds(text) for texts in case.valid for text in texts), case.name
        assert not any(case.holds(text) for text in case.invalid), case.name


def test_a_kind_that_no_case_covers_is_skipped() -> None:
    vocabulary = Vocabulary.load()
    run = Run(lambda: Wrapped(GrammarContext(vocabulary.tokenizer, vocabulary.size)), ("json_object",), vocabulary)
    with pytest.raises(conformance.SkipCheck, match="json_object"):
        check_masks_equal_a_reference(run)


@pytest.mark.slow
def test_the_record_decides_which_kinds_are_checked() -> None:
    """A backend that compiles a kind beyond its record is found."""
    from frame.core.interfaces.sampling import GrammarCapabilities

    mutant = Mutant("regex", "grammar_backend", lambda: Wrapped, "", capabilities=GrammarCapabilities(("regex", "choice")))
    failed = {outcome.check: outcome.message for outcome in run_suite(mutant.subject()) if outcome.result == "failed"}
    assert set(failed) == {"invalid_grammars_are_refused"}
    assert json.dumps(failed).count("compiles") == 1


def test_masks_that_change_among_many_requests_are_found() -> None:
    class Crowded(Wrapped):
        """From the last request of a crowd on, each has the masks of an unlimited one."""

        def compile(self, kind: str, source: str) -> CompiledGrammar:
            compiled, started = super().compile(kind, source), []

            class Compiled:
                num_bytes = compiled.num_bytes

                def start(self) -> Grammar:
                    started.append(None)
                    grammar = compiled.start()
                    if len(started) == REQUESTS:
                        grammar.fill_mask = lambda mask: False  # type: ignore[method-assign]
                    return grammar

            return Compiled()

    vocabulary = Vocabulary.load()
    run = Run(lambda: Crowded(GrammarContext(vocabulary.tokenizer, vocabulary.size)), ("choice",), vocabulary)
    with pytest.raises(AssertionError, match=f"with {REQUESTS} requests"):
        check_many_requests_have_the_masks_of_one(run)


def test_known_masks_of_another_state_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that returns the mask of the state before."""
    pytest.importorskip("llguidance")
    from frame.plugins.grammar_backends import llguidance

    plain = llguidance.LLGrammar.advance_token

    def advance(self: Any, token: int) -> Any:
        before = self._mask
        return plain(self, token) and before

    monkeypatch.setattr(llguidance, "SHARING_REQUESTS", 2)
    vocabulary = Vocabulary.load()
    context = GrammarContext(vocabulary.tokenizer, vocabulary.size)
    run = Run(lambda: llguidance.LLGuidanceBackend(context), ("regex", "json_schema"), vocabulary)
    check_masks_are_filled_together(run)
    monkeypatch.setattr(llguidance.LLGrammar, "advance_token", advance)
    with pytest.raises(AssertionError, match="after advance_token"):
        check_masks_are_filled_together(run)
