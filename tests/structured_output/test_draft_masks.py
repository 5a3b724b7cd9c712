"""Masks along a drafted path."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from frame.core.interfaces.sampling import Grammar
from frame.structured_output.draft_masks import fill_draft_masks
from frame.structured_output.grammar_calls import GrammarMeter, MeteredGrammar
from frame.structured_output.jump_forward import LookaheadGrammar
from tests.core.scheduling.scripted_grammar import BreakingScript, Script

VOCAB = 40
WIDTHS = [3, 2, 4, 1, 1, 3, 1]


def mask_of(grammar: Grammar) -> np.ndarray:
    mask = np.full(2, 7, np.int32)
    grammar.fill_mask(mask)
    return mask


def first_allowed(grammar: Grammar) -> int:
    bits = np.unpackbits(mask_of(grammar).view(np.uint8), bitorder="little")
    return int(np.flatnonzero(bits)[0])


def walk(tokens: list[int]) -> list[np.ndarray]:
    """The masks before each token and after the last, of a grammar of its own."""
    grammar, masks = Script(WIDTHS, VOCAB), []
    for token in tokens:
        masks.append(mask_of(grammar))
        grammar.accept_token(token)
    return masks if grammar.is_finished() else [*masks, mask_of(grammar)]


def text() -> list[int]:
    grammar, tokens = Script(WIDTHS, VOCAB), []
    while not grammar.is_finished():
        tokens.append(first_allowed(grammar))
        grammar.accept_token(tokens[-1])
    return tokens


@pytest.mark.pairwise
@pytest.mark.parametrize("wrap", [lambda inner: inner, LookaheadGrammar, lambda inner: MeteredGrammar(inner, GrammarMeter(5.0))])
@pytest.mark.parametrize("start", range(len(WIDTHS)))
@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_masks_equal_those_of_the_tokens_and_nothing_is_accepted(wrap: type, start: int, count: int) -> None:
    whole = text()
    grammar, draft = wrap(Script(WIDTHS, VOCAB)), whole[start : start + count]
    for token in whole[:start]:
        mask_of(grammar)
        grammar.accept_token(token)
    masks = np.full((len(draft) + 1, 2), 9, np.int32)
    allowed, is_known = fill_draft_masks(grammar, draft, None, masks)
    assert is_known and allowed == min(len(draft), len(WIDTHS) - 1 - start)  # the last token ends the grammar
    for mask, expected in zip(masks[: allowed + 1], walk(whole[: start + allowed])[start:], strict=True):
        assert np.array_equal(mask, expected)
    for token in whole[start:]:  # as if nothing had been drafted
        assert not grammar.is_finished()
        mask = mask_of(grammar)
        assert mask[token // 32] >> token % 32 & 1 and grammar.accept_token(token)
    assert grammar.is_finished()


@pytest.mark.parametrize("place", range(4))
def test_draft_is_cut_before_a_token_that_the_grammar_refuses(place: int) -> None:
    whole = text()
    draft = [*whole[:place], (whole[place] + 20) % VOCAB, *whole[place + 1 : 5]]
    grammar, masks = Script(WIDTHS, VOCAB), np.empty((6, 2), np.int32)
    assert fill_draft_masks(grammar, draft, walk([])[0], masks) == (place, True)
    assert grammar.taken == []


def test_mask_that_cannot_be_filled_cuts_the_draft() -> None:
    grammar, masks = BreakingScript(WIDTHS, VOCAB, 2), np.empty((5, 2), np.int32)
    assert fill_draft_masks(grammar, text()[:4], None, masks) == (1, False)
    assert grammar.taken == []


@pytest.mark.parametrize("wrap", [lambda inner: inner, LookaheadGrammar])
@pytest.mark.parametrize("place", range(4))
def test_a_budget_that_a_draft_exceeds_leaves_no_drafted_token(wrap: Callable[[Grammar], Grammar], place: int) -> None:
    meter, whole = GrammarMeter(0.5), text()

    class Costly(Script):
        def accept_token(self, token_id: int) -> bool:
            meter.spent += 1.0 if len(self.taken) == place else 0.0
            return super().accept_token(token_id)

    inner = Costly(WIDTHS, VOCAB)
    grammar, masks = wrap(MeteredGrammar(inner, meter)), np.empty((6, 2), np.int32)
    assert fill_draft_masks(grammar, whole[:5], None, masks) == (place, False)
    assert (inner.taken, meter.num_tokens) == ([], 0)


def test_lookahead_is_rolled_back_past_its_forced_tokens() -> None:
    whole = text()
    grammar = LookaheadGrammar(Script(WIDTHS, VOCAB))
    for token in whole[:5]:  # tokens 3 and 4 are forced
        mask_of(grammar)
        grammar.accept_token(token)
    grammar.rollback_tokens(4)
    for place, token in enumerate(whole[1:], 1):
        assert np.array_equal(mask_of(grammar), walk(whole[:place])[-1])
        assert grammar.accept_token(token)
    assert grammar.is_finished()
