"""The drafter `ngram` beside a search of the whole text."""

from __future__ import annotations

import random

import numpy as np
import pytest

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.drafter import DrafterContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.drafters import NgramOptions
from frame.plugins.drafters.ngram import NgramDrafter

CONTEXT = DrafterContext(vocab_size=50, max_slots=3, max_context=400, num_steps=4)


def search(tokens: list[int], max_length: int, shortest: int, maximum: int) -> list[int]:
    """The same by a search from the end."""
    for order in range(max_length, shortest - 1, -1):
        for end in range(len(tokens) - 1, order - 1, -1):
            if len(tokens) > order and tokens[end - order : end] == tokens[-order:]:
                return [tokens[end + i % (len(tokens) - end)] for i in range(maximum)]
    return []


@pytest.mark.parametrize(("max_length", "shortest"), [(4, 2), (3, 3), (2, 1)])
def test_drafts_equal_those_of_a_search(max_length: int, shortest: int) -> None:
    numbers = random.Random(max_length)
    drafter = NgramDrafter(CONTEXT, NgramOptions(prompt_lookup_max=max_length, prompt_lookup_min=shortest))
    texts = [[numbers.randrange(5) for _ in range(10 * slot + 3)] for slot in range(3)]
    for slot, text in enumerate(texts):
        drafter.add_slot(SlotSetup(slot, SamplingParams(), 0, len(text), np.array(text, np.int32)))
    num_found = num_equal = 0
    for _ in range(60):
        found = drafter.propose_tokens(np.arange(3), np.array([4, 1, 3], np.int32))
        expected = [search(text, max_length, shortest, maximum) for text, maximum in zip(texts, (4, 1, 3), strict=True)]
        ends = np.cumsum(found.counts)
        drafts = [found.token_ids[end - count : end].tolist() for end, count in zip(ends, found.counts, strict=True)]
        num_equal += sum(draft == wanted for draft, wanted in zip(drafts, expected, strict=True))
        num_found += int(found.counts.sum())
        counts = np.array([numbers.randint(1, 3) for _ in range(3)], np.int32)
        tokens = np.array([[numbers.randrange(5) for _ in range(3)] for _ in range(3)], np.int32)
        drafter.observe_tokens(np.arange(3), tokens, counts)
        for text, row, count in zip(texts, tokens.tolist(), counts.tolist(), strict=True):
            text += row[:count]
    assert num_found > 150
    assert num_equal >= 0.97 * 180  # n-grams with equal hashes hide each other


def test_repetition_is_continued() -> None:
    drafter = NgramDrafter(CONTEXT)
    drafter.add_slot(SlotSetup(0, SamplingParams(), 0, 6, np.array([1, 7, 8, 9, 7, 8], np.int32)))
    assert drafter.propose_tokens(np.array([0]), np.array([4], np.int32)).token_ids.tolist() == [9, 7, 8, 9]


def test_options_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min is above prompt_lookup_max"):
        NgramOptions(prompt_lookup_max=2, prompt_lookup_min=3)
