"""The drafter `suffix` beside a search of all texts of the tenant."""

from __future__ import annotations

import random

import numpy as np
import pytest

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.drafter import DrafterContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.drafters import SuffixOptions
from frame.plugins.drafters.suffix import ORDERS, SuffixDrafter

CONTEXT = DrafterContext(vocab_size=50, max_slots=4, max_context=4000, num_steps=6)


def add(drafter: SuffixDrafter, slot: int, tokens: list[int], tenant: str = "") -> None:
    drafter.add_slot(SlotSetup(slot, SamplingParams(), 0, len(tokens), np.array(tokens, np.int32), tenant=tenant))


def draft(drafter: SuffixDrafter, slot: int, maximum: int = 6) -> list[int]:
    found = drafter.propose_tokens(np.array([slot]), np.array([maximum], np.int32))
    assert found.counts.tolist() == [len(found.token_ids)]
    return found.token_ids.tolist()


def search(texts: list[list[int]], tokens: list[int], maximum: int) -> list[int]:
    """What followed the longest suffix last, token by token. texts: in the order of their
    tokens."""
    tokens, found, limit = list(tokens), [], maximum
    while len(found) < limit:
        for order in (order for order in ORDERS.tolist() if order <= len(tokens)):
            followed = [text[end] for text in texts for end in range(order, len(text)) if text[end - order : end] == tokens[-order:]]
            if followed:
                limit = limit if found else min(limit, order)
                found.append(followed[-1])
                tokens.append(followed[-1])
                break
        else:
            return found
    return found


@pytest.mark.parametrize("variety", [3, 8])
def test_drafts_equal_those_of_a_search(variety: int) -> None:
    numbers = random.Random(variety)
    drafter, ended = SuffixDrafter(CONTEXT), []
    for _ in range(3):  # requests, one after the other
        text = [numbers.randrange(variety) for _ in range(numbers.randint(1, 60))]
        add(drafter, 1, text)
        for _ in range(25):
            assert draft(drafter, 1) == search([*ended, text], text, 6)
            run = [numbers.randrange(variety) for _ in range(numbers.randint(1, 3))]
            drafter.observe_tokens(np.array([1]), np.array([run], np.int32), np.array([len(run)], np.int32))
            text += run
        drafter.remove_slot(1)
        ended.append(text)


def test_texts_of_other_requests_serve_their_tenant_alone() -> None:
    drafter = SuffixDrafter(CONTEXT)
    add(drafter, 0, list(range(40)), "a")
    drafter.remove_slot(0)
    add(drafter, 1, [9, 10, 11, 12], "a")
    add(drafter, 2, [9, 10, 11, 12], "b")
    assert draft(drafter, 1) == [13, 14, 15, 16]  # as long as the match
    assert draft(drafter, 2) == []


def test_memory_is_bounded_and_new_texts_overwrite_old_ones() -> None:
    drafter = SuffixDrafter(CONTEXT, SuffixOptions(cache_mib=1))
    assert drafter._tags.nbytes + drafter._tokens.nbytes == 1 << 20
    numbers = np.random.default_rng(0)
    old = numbers.integers(0, 50, 200).tolist()
    add(drafter, 0, old)
    for _ in range(60):
        add(drafter, 1, numbers.integers(0, 50, 4000).tolist())
    add(drafter, 2, (new := numbers.integers(0, 50, 300).tolist())[:200])
    add(drafter, 2, new)
    add(drafter, 3, new[:100])
    assert draft(drafter, 3) == new[100:106]
    add(drafter, 3, old[:100])
    assert draft(drafter, 3) != old[100:106]
