"""`GuardedEvictionPolicy`: isolates faults in eviction-policy plugins. After an error the least
recently used prefixes are evicted first.

Used where the scheduler is built. It must not know the prefix cache.
"""

from __future__ import annotations

import logging
from numbers import Real

from frame.core.blame import describe, remedy
from frame.core.interfaces.cache import EvictableNode, EvictionPolicy

log = logging.getLogger(__name__)


class GuardedEvictionPolicy(EvictionPolicy):
    """Calls an `EvictionPolicy`. At its first fault, logs the policy's name; from then on orders
    nodes by `last_access`.

    A fault is an exception, or a key that is not a tuple of numbers. The first element of a key is
    0 before the fault and 1 after it, so that keys of both orders compare. Nodes with an earlier
    key were accessed earlier, and are evicted first.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._has_failed = False

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        if not self._has_failed:
            try:
                key = self._policy.key(node)
                # NaN is unequal to itself; one in a heap breaks the order of all its entries
                if isinstance(key, tuple) and all(isinstance(number, Real) and number == number for number in key):
                    return (0, *key)
                self._log_fault(f"returned {key!r}, which is not a tuple of numbers")
            except Exception as error:  # noqa: BLE001 - third-party code must not end the requests
                self._log_fault(f"failed ({type(error).__name__}: {error})", error)
        return (1, node.last_access)

    def _log_fault(self, sentence: str, error: Exception | None = None) -> None:
        self._has_failed = True
        log.error(
            "%s, asked for a key, %s; the least recently used prefixes are evicted first from now on; %s",
            describe(self._policy), sentence, remedy(self._policy), exc_info=error,
        )  # fmt: skip
