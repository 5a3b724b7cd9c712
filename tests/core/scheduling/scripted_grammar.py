"""A grammar with known masks: each allows a given number of tokens, starting at one that depends on
the last token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Script:
    """`widths[i]` tokens are allowed at output position i; the grammar ends with the list."""

    def __init__(self, widths: Sequence[int], vocab_size: int) -> None:
        self.widths = widths
        self.vocab_size = vocab_size
        self.taken: list[int] = []

    def allowed(self) -> list[int]:
        start = 7 * len(self.taken) + (self.taken[-1] if self.taken else 3)
        return [(start + i) % self.vocab_size for i in range(self.widths[len(self.taken)])]

    def fill_mask(self, mask: np.ndarray) -> bool:
        bits = np.zeros(32 * len(mask), np.uint8)
        bits[self.allowed()] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def accept_token(self, token_id: int) -> bool:
        is_allowed = token_id in self.allowed()
        self.taken.append(token_id)
        return is_allowed

    def is_finished(self) -> bool:
        return len(self.taken) == len(self.widths)

    def rollback_tokens(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]


class BreakingScript(Script):
    """Raises ValueError for the mask of the token at position `limit`."""

    def __init__(self, widths: Sequence[int], vocab_size: int, limit: int) -> None:
        super().__init__(widths, vocab_size)
        self.limit = limit

    def fill_mask(self, mask: np.ndarray) -> bool:
        if len(self.taken) == self.limit:
            raise ValueError("too much work")
        return super().fill_mask(mask)


class Free:
    """Allows everything, and refuses token 7."""

    def fill_mask(self, mask: np.ndarray) -> bool:
        return False

    def accept_token(self, token_id: int) -> bool:
        return token_id != 7

    def is_finished(self) -> bool:
        return False
