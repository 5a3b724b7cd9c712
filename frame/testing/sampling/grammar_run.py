"""A grammar backend under test, for the conformance suite of the kind. Must not know a backend by
name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from frame.core.interfaces.sampling import CompiledGrammar, Grammar, GrammarBackend
from frame.testing.conformance import SkipCheck
from frame.testing.sampling.grammar_cases import Language, Vocabulary

Make = Callable[[], GrammarBackend]


class Run:
    """A backend under test: its kinds, and a vocabulary of which each token's bytes are known."""

    def __init__(self, make: Make, kinds: Sequence[str], vocabulary: Vocabulary) -> None:
        self.make, self.kinds, self.vocabulary = make, kinds, vocabulary
        self.backend = make()

    def of(self, cases: Iterable[Language]) -> list[Language]:
        """The cases of the kinds that the backend declares. Raises SkipCheck without one."""
        known = [case for case in cases if case.kind in self.kinds]
        if not known:
            raise SkipCheck(f"no case of the kinds {', '.join(self.kinds)}")
        return known

    def compile(self, case: Language) -> CompiledGrammar:
        try:
            return self.backend.compile(case.kind, case.source)
        except ValueError as error:
            raise AssertionError(f"{case.name} is valid, and is refused: {error}") from error

    def start(self, case: Language, tokens: Iterable[int] = ()) -> Grammar:
        """A constraint after some tokens."""
        grammar = self.compile(case).start()
        for token in tokens:
            assert grammar.accept_token(token), f"{case.name}: accept_token() refuses a token that the mask allows"
        return grammar

    def allowed(self, grammar: Grammar, before: int = 0) -> np.ndarray:
        """bool [vocab]: the tokens of the mask, written over words of `before`."""
        mask = np.full(-(-self.vocabulary.size // 32), before, np.int32)
        if not grammar.fill_mask(mask):
            return np.ones(self.vocabulary.size, np.bool_)
        return np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocabulary.size].astype(np.bool_)

    def continuations(self, allowed: np.ndarray) -> list[int]:
        """The allowed tokens that are text."""
        return [token for token in np.flatnonzero(allowed).tolist() if token in self.vocabulary.tokens]


def takes_text(run: Run, case: Language, text: str) -> bool:
    grammar = run.start(case)
    tokens = run.vocabulary.encode(text)
    for token in (*tokens, run.vocabulary.ends[0]):
        is_allowed = bool(run.allowed(grammar)[token])
        is_taken = grammar.accept_token(token)
        assert is_taken or not is_allowed, f"{case.name}: accept_token() refuses token {token} of {text!r}, which the mask has"
        if not is_taken:
            return False
    return True
