"""A faulty eviction policy is logged once by name, and the least recently used prefixes are
evicted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frame.core.interfaces.cache import EvictionContext, EvictionPolicy, PrefixCacheContext, check_integrity
from frame.plugins.eviction_guard import GuardedEvictionPolicy
from frame.plugins.prefix_caches.radix import RadixCache


class Replies(EvictionPolicy):
    """Gives the key of a function."""

    def __init__(self, reply: Callable[[Any], Any]) -> None:
        super().__init__(EvictionContext(1, 64))
        self.reply = reply
        self.calls = 0

    def key(self, node: Any) -> tuple[float, ...]:
        self.calls += 1
        found: tuple[float, ...] = self.reply(node)
        return found


def raises(node: Any) -> Any:
    raise KeyError("no such tenant")


def fails_later(node: Any) -> Any:
    return (-node.created,) if node.created < 3 else raises(node)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": raises,
    "none": lambda node: None,
    "a number": lambda node: node.last_access,
    "a list": lambda node: [node.last_access],
    "words": lambda node: ("late",),
    "nan": lambda node: (float("nan"),),
    "fails later": fails_later,
}


def fill(policy: EvictionPolicy) -> RadixCache:
    """A cache of five prefixes of one page each, page n holding prefix n."""
    cache = RadixCache(PrefixCacheContext(page_size=1, num_pages=64, eviction_policy=policy))
    for number in range(1, 6):
        cache.insert(np.array([number], np.int32), np.array([number], np.int32))
    return cache


@pytest.mark.parametrize("reply", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_logged_once_and_all_pages_stay_evictable(reply: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    policy = Replies(reply)
    with caplog.at_level(logging.ERROR):
        cache = fill(GuardedEvictionPolicy(policy))
        calls = policy.calls
        evicted = [int(page) for _ in range(5) for page in cache.evict(1)]
    (record,) = caplog.records
    assert "test_eviction_guard.Replies, asked for a key, " in record.getMessage()
    assert "least recently used prefixes are evicted first" in record.getMessage()
    assert policy.calls == calls, "a policy that failed is not called again"
    assert evicted == ([2, 1, 3, 4, 5] if reply is fails_later else [1, 2, 3, 4, 5])
    check_integrity(cache)


def test_a_working_policy_keeps_its_order(caplog: pytest.LogCaptureFixture) -> None:
    cache = fill(GuardedEvictionPolicy(Replies(lambda node: (np.int64(-node.last_access), 0.5, True))))
    assert [int(page) for _ in range(5) for page in cache.evict(1)] == [5, 4, 3, 2, 1]
    assert caplog.records == []


def test_keys_before_and_after_a_fault_compare() -> None:
    policy = Replies(lambda node: (100.0,) if node.last_access < 3 else raises(node))
    guarded = GuardedEvictionPolicy(policy)
    keys = [guarded.key(SimpleNamespace(last_access=number, created=0, hits=0, priority=0)) for number in range(1, 6)]
    assert keys == sorted(keys)
    assert policy.calls == 3
