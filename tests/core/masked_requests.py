"""Requests with a grammar that depends on its place in the output, for tests of grammar masks that
a step gets after it was launched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frame.core.interfaces.sampling_params import SamplingParams
from frame.testing.local_loop import LocalLoop


class EveryThird:
    """Allows the tokens whose sum with `first` and their place in the output is a multiple of 3; at
    each fifth place all tokens."""

    def __init__(self, vocab_size: int, first: int) -> None:
        self._vocab_size, self._first = vocab_size, first
        self._tokens: list[int] = []

    def fill_mask(self, mask: np.ndarray) -> bool:
        allowed = np.zeros(32 * len(mask), np.uint8)
        allowed[: self._vocab_size] = [self.allows(token, len(self._tokens)) for token in range(self._vocab_size)]
        mask[:] = np.packbits(allowed, bitorder="little").view(np.int32)
        return len(self._tokens) % 5 != 4

    def allows(self, token: int, place: int) -> bool:
        return place % 5 == 4 or (token + self._first + place) % 3 == 0

    def accept_token(self, token_id: int) -> bool:
        is_allowed = self.allows(token_id, len(self._tokens))
        self._tokens.append(token_id)
        return is_allowed

    def is_finished(self) -> bool:
        return False

    def rollback_tokens(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]

    def start(self) -> EveryThird:
        return EveryThird(self._vocab_size, self._first)


def generate_with(
    loop: LocalLoop, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], grammars: Sequence[EveryThird | None]
) -> list[list[int]]:
    """The outputs of requests of which some have a grammar."""
    add, started = loop.scheduler.add_request, iter([None if grammar is None else grammar.start() for grammar in grammars])
    loop.scheduler.add_request = lambda message: add(message, next(started))  # type: ignore[method-assign,assignment]
    try:
        return loop.generate(prompts, params)
    finally:
        loop.scheduler.add_request = add  # type: ignore[method-assign]
