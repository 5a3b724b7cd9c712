"""In-batch prefix sharing: finds the running request whose prefill computes the prefix of a waiting
one (SGLang: in-batch prefix caching).

The waiting request then waits and reads the prefix from the cache, instead of computing it a second
time. Used by the step planner. It must not know pages or the prefix cache, only tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from frame.core.scheduling.request import Request

MIN_SHARED_TOKENS = 256  # shortest common prefix; below it, waiting a step costs more than it saves
MAX_COMPARED = 4  # most prefills with the same first tokens that a waiting request is compared with


class InBatchPrefixSharing:
    """The prefills of running requests, by the cache keys of their first `min_shared` tokens. Built
    for each step that admits requests."""

    def __init__(self, prefilling: Iterable[Request], min_shared: int = MIN_SHARED_TOKENS) -> None:
        self._min_shared = min_shared
        self._by_start: dict[tuple[str, bytes], list[Request]] = {}
        for request in prefilling:
            self.add(request)

    def add(self, request: Request) -> None:
        """Add a request whose prefill a step computes."""
        if len(request.tokens) > self._min_shared:
            self._by_start.setdefault(self._start(request, request.cache_keys(request.tokens)), []).append(request)

    def find(self, request: Request) -> tuple[Request | None, int]:
        """The request whose prefill has the longest common prefix with `request`, and that prefix's
        length in tokens; (None, 0) if there is none."""
        if not self._by_start or request.num_tokens <= self._min_shared or request.wants_prompt_logprobs:
            return None, 0
        tokens = request.cache_keys(request.all_tokens())
        candidates = self._by_start.get(self._start(request, tokens), ())
        best, max_length = None, 0
        for other in candidates[-MAX_COMPARED:]:
            common = _common(tokens, other.cache_keys(other.tokens))
            if common > max_length:
                best, max_length = other, common
        return best, max_length

    def is_worth_waiting(self, shared: int, cached: int, length: int) -> bool:
        """Whether `shared` tokens, once computed, save at least half of the uncached work of a
        prompt of `length` tokens, of which `cached` are in the prefix cache now."""
        return shared - cached >= max(self._min_shared, (length - cached) // 2)

    def _start(self, request: Request, tokens: np.ndarray) -> tuple[str, bytes]:
        return request.namespace, tokens[: self._min_shared].tobytes()


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix, in tokens."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
