"""`InBatchPrefixSharing`: in-batch prefix sharing. Finds the running request whose prefill computes the prefix of a waiting one, which
then had
better wait and find it in the prefix cache than compute it again.

The planner uses it. It knows no page and no cache: only tokens, and how many of them a request would find cached.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from frame.core.scheduling.request import Request

LEAST = 256  # tokens that two prompts must share at least; for less, waiting a step costs more than it saves
MOST_COMPARED = 4  # prompts with the same first tokens that one is compared with


class InBatchPrefixSharing:
    """The prefills under way, by their first tokens. Made anew for each step that admits anybody. `least`: tokens that must be shared."""

    def __init__(self, prefilling: Iterable[Request], least: int = LEAST) -> None:
        self._least = least
        self._by_start: dict[tuple[str, bytes], list[Request]] = {}
        for request in prefilling:
            self.add(request)

    def add(self, request: Request) -> None:
        """A request whose prefill is under way from now on."""
        if len(request.tokens) > self._least:
            self._by_start.setdefault(self._start(request, request.tokens), []).append(request)

    def find(self, request: Request) -> tuple[Request | None, int]:
        """The request whose prefill has the longest prefix in common with a waiting one, and that prefix's tokens; (None, 0) where there is
        none."""
        if not self._by_start or request.num_tokens <= self._least or request.wants_prompt_logprobs:
            return None, 0
        tokens = request.all_tokens()
        found = self._by_start.get(self._start(request, tokens), ())
        best, longest = None, 0
        for other in found[-MOST_COMPARED:]:
            common = _common(tokens, other.tokens)
            if common > longest:
                best, longest = other, common
        return best, longest

    def is_worth_waiting(self, shared: int, cached: int, length: int) -> bool:
        """Whether `shared` tokens that come soon save a prompt of `length` tokens half of its work or more, with `cached` there already."""
        return shared - cached >= max(self._least, (length - cached) // 2)

    def _start(self, request: Request, tokens: np.ndarray) -> tuple[str, bytes]:
        return request.namespace, tokens[: self._least].tobytes()


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
