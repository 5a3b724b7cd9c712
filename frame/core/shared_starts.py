"""`SharedStarts`: which waiting prompts begin like one that is being computed, and had better wait for it than compute the same again.

Knows no page and no cache: only tokens, and how many of them a request would find cached.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from frame.core.request import Request

LEAST = 256  # tokens that two prompts must share at least; for less, waiting a step costs more than it saves
MOST_COMPARED = 4  # prompts with the same first tokens that one is compared with


class SharedStarts:
    """The prompts under way, by their first tokens. Made anew for each step that admits anybody."""

    def __init__(self, underway: Iterable[Request]) -> None:
        self._by_start: dict[tuple[str, bytes], list[Request]] = {}
        for request in underway:
            self.add(request)

    def add(self, request: Request) -> None:
        """A prompt that is being computed from now on."""
        if len(request.tokens) > LEAST:
            self._by_start.setdefault(_start(request, request.tokens), []).append(request)

    def alike(self, request: Request) -> int:
        """How many tokens of a waiting request are being computed for another, as far as it is worth to wait for them; else 0."""
        if not self._by_start or request.num_tokens <= LEAST or request.wants_prompt_logprobs:
            return 0
        tokens = request.all_tokens()
        found = self._by_start.get(_start(request, tokens), ())
        return max((_common(tokens, other.tokens) for other in found[-MOST_COMPARED:]), default=0)


def is_worth_waiting(shared: int, cached: int, length: int) -> bool:
    """Whether `shared` tokens that come soon save a prompt of `length` tokens at least half of its work, with `cached` there already."""
    return shared - cached >= max(LEAST, (length - cached) // 2)


def _start(request: Request, tokens: np.ndarray) -> tuple[str, bytes]:
    return request.namespace, tokens[:LEAST].tobytes()


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
