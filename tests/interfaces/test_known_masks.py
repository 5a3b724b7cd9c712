"""The only token of a mask, and the mask of an only token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from frame.interfaces.known_masks import OneTokenMask, find_only_token

WORDS = 200


@given(st.sets(st.integers(0, 32 * WORDS - 1), max_size=4))
def test_only_token_is_that_of_a_mask_that_allows_one(tokens: set[int]) -> None:
    bits = np.zeros(32 * WORDS, np.uint8)
    bits[list(tokens)] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    assert find_only_token(mask) == (next(iter(tokens)) if len(tokens) == 1 else None)


@given(st.integers(0, 32 * WORDS - 1))
def test_mask_of_one_token_allows_it_alone(token: int) -> None:
    mask = np.full(WORDS, -1, np.int32)
    OneTokenMask(token).write(mask)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [token]
