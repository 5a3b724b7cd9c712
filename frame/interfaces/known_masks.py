"""Masks that grammars know without a computation: what a grammar backend may offer beside
`BatchedGrammar`, so that a token takes a look-up.

Used by grammar backends that keep masks by state and by `frame.structured_output`. Must not know a
library or a request.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from frame.core.interfaces.sampling import BatchedGrammar

FEW_WORDS = 128  # of a mask that are checked first


class KnownMask(Protocol):
    """A mask. `only_token`: the token, where it allows just one; None otherwise."""

    @property
    def only_token(self) -> int | None: ...

    def write(self, mask: np.ndarray) -> None:
        """Write the bits into int32 [words]."""
        ...


class SteppingGrammar(BatchedGrammar, Protocol):
    """A `BatchedGrammar` that may know the masks of its next states. `origin`: the same for
    grammars whose masks one thread computes, during which the others cannot accept tokens."""

    origin: int

    def advance_token(self, token_id: int) -> KnownMask | None:
        """Accept a token after which the grammar is not finished, and return the mask of the next
        one: as `accept_token` and `start_mask`. None: that takes more than a look-up, or the token
        is not allowed; nothing has changed."""
        ...


class OneTokenMask:
    """The mask that allows one token."""

    __slots__ = ("only_token",)

    def __init__(self, token: int) -> None:
        self.only_token: int | None = token

    def write(self, mask: np.ndarray) -> None:
        token = self.only_token
        assert token is not None
        mask.fill(0)
        mask.view(np.uint32)[token // 32] = 1 << token % 32


def find_only_token(mask: np.ndarray) -> int | None:
    """The token of a mask that allows exactly one, else None. mask int32 [words]."""
    if np.count_nonzero(mask[:FEW_WORDS]) > 1 or np.count_nonzero(mask) != 1:  # decides most masks
        return None
    words = mask.view(np.uint32)
    place = int(words.argmax())  # of the only word; `flatnonzero` takes 50 times as long
    word = int(words[place])
    return None if word & (word - 1) else 32 * place + word.bit_length() - 1
