"""Tokens that take a look-up: whatever is looked up, rolled back, forced or dropped in between, the
masks and ends are those of the library."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

from frame.plugins.grammar_backends import llguidance
from frame.plugins.grammar_backends.llguidance import LLGuidanceBackend
from frame.plugins.grammar_backends.states import shared_masks
from frame.structured_output.grammar_calls import GrammarMeter, MeteredGrammar
from frame.structured_output.jump_forward import MAX_FEWEST, LookaheadGrammar, MinimumRun
from tests.plugins.grammar_backends.test_shared_masks import GRAMMARS, SIZE, WORDS, draw, start_pair

EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def two_requests_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "SHARING_REQUESTS", 2)


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(GrammarContext(Tokenizer.load(find_model(EMBEDDED)), SIZE))


def accept(grammar: Any, token: int, mask: np.ndarray) -> bool:
    """Accept a token and fill the next mask, by a look-up if that does. -> whether it did."""
    known = grammar.advance_token(token)
    if known is None:
        assert grammar.accept_token(token)
        if not grammar.is_finished():
            grammar.fill_mask(mask)
        return False
    known.write(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert known.only_token == (allowed[0] if len(allowed) == 1 else None)
    return True


@pytest.mark.slow
@EXAMPLES
@given(name=st.sampled_from(sorted(GRAMMARS)), seed=st.integers(0, 1 << 30), layers=st.sampled_from(["none", "ahead", "short runs"]))
def test_looked_up_masks_are_those_of_the_library(backend: LLGuidanceBackend, name: str, seed: int, layers: str) -> None:
    compiled, numbers = backend.compile(*GRAMMARS[name]), random.Random(seed)
    _first = compiled.start()
    found, expected = np.zeros((2, WORDS), np.int32)
    minimum = MinimumRun()
    num_known = num_tokens = 0
    for _ in range(4):
        shared, alone = start_pair(compiled)
        grammar: Any = shared if layers == "none" else LookaheadGrammar(MeteredGrammar(shared, GrammarMeter(1e9)), minimum)
        grammar.fill_mask(found)
        taken: list[int] = []
        for _ in range(70):
            alone.fill_mask(expected)
            assert (found == expected).all(), f"after {backend._tokenizer.decode_str(taken)!r}"
            if layers == "short runs":
                minimum.length = numbers.choice([0, MAX_FEWEST + 1])
            token = draw(numbers, expected)
            forbidden = numbers.randrange(SIZE)
            if not expected[forbidden // 32] >> forbidden % 32 & 1:
                assert grammar.advance_token(forbidden) is None
            num_known += accept(grammar, token, found)
            assert alone.accept_token(token) and grammar.is_finished() == alone.is_finished()
            taken.append(token)
            num_tokens += 1
            if numbers.random() < 0.06 and (count := numbers.randint(0, min(len(taken), 20))):
                grammar.rollback_tokens(count)
                alone.rollback_tokens(count)
                del taken[-count:]
                grammar.fill_mask(found)
            if alone.is_finished():
                break
            if numbers.random() < 0.01 and compiled.shared is not None:
                numbers.choice([compiled.shared._drop_states, compiled.shared._drop_followers, compiled.shared._clear])()
    if name in ("schema", "counts"):
        assert num_known > num_tokens // 8


@EXAMPLES
@given(members=st.binary(min_size=1, max_size=200))
def test_lengths_are_those_of_the_tokens_of_a_set(members: bytes) -> None:
    tokenizer = Tokenizer.load(find_model(EMBEDDED))
    backend = LLGuidanceBackend(GrammarContext(tokenizer, SIZE))
    backend.compile("regex", "a")
    tokens = backend._tokens
    assert tokens is not None
    lengths = tokens.find_lengths(members)
    assert lengths is not None and len(lengths) == SIZE
    for token in range(0, SIZE, 7):
        text = tokens[token]
        assert lengths[token] == (len(text) if text.strip(members) == b"" else 0)


def test_tokens_of_one_class_lead_to_one_state(backend: LLGuidanceBackend) -> None:
    """Of each state that outputs of a grammar pass, tokens of equal class are followed alone."""
    for name in ("schema", "counts", "call"):
        compiled, numbers, mask = backend.compile(*GRAMMARS[name]), random.Random(name), np.zeros(WORDS, np.int32)
        _first = compiled.start()
        grammar, num_checked = compiled.start(), 0
        shared = compiled.shared
        assert shared is not None
        for _ in range(80):
            grammar.fill_mask(mask)
            state = grammar._state
            assert state is not None
            ends: dict[int, Any] = {}
            for token in (draw(numbers, mask) for _ in range(12)):
                if token not in compiled.stop_token_ids:
                    after = shared._language.follow(state.node, shared._tokens[token])
                    assert ends.setdefault(state.find_class(token), after) is after
                    num_checked += state.find_class(token) < 0
            assert grammar.accept_token(draw(numbers, mask))
            if grammar.is_finished():
                break
        assert num_checked > 50 or name == "call"


def test_states_and_followers_are_bounded(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_masks, "MAX_STATES", 30)
    monkeypatch.setattr(shared_masks, "MAX_FOLLOWERS", 40)
    compiled, numbers = backend.compile(*GRAMMARS["schema"]), random.Random(4)
    _first = compiled.start()
    found, expected = np.zeros((2, WORDS), np.int32)
    for _ in range(4):
        shared, alone = start_pair(compiled)
        shared.fill_mask(found)
        for _ in range(100):
            alone.fill_mask(expected)
            assert (found == expected).all()
            token = draw(numbers, expected)
            accept(shared, token, found)
            assert alone.accept_token(token)
            states = compiled.shared
            assert states is not None and len(states._states) <= 31
            assert sum(len(state.followers) for state in states._states.values()) <= 41
            assert sum(len(mask.states) for mask in states._masks.values()) <= 31
