"""The checks of cache groups, pins and kept blocks find caches and tiers that break them."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.interfaces.cache import Match
from frame.plugins.kv_tiers.host import HostTier
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing import conformance
from frame.testing.kv_tier import kept_checks
from frame.testing.scheduling import prefix_cache_groups
from tests.testing.generated import find_subject


class LosesWindows(RadixCache):
    """Reads the prefix without its window."""

    def read(self, handle: Any) -> Match:
        match = super().read(handle)
        return Match(match.num_tokens, match.pages, match.handle, (0 * match.groups[0], *match.groups[1:]))


class CountsLocksAsEvictable(RadixCache):
    def count_evictable(self, index: int) -> int:
        return super().count_evictable(index) + super().count_locked(index)


class IgnoresPins(RadixCache):
    def pin(self, handle: Any) -> None:
        """Nothing is pinned."""


class KeepsAfterClear(HostTier):
    def clear(self) -> None:
        """The blocks stay."""


class ServesEveryModel(HostTier):
    def __init__(self, context: Any, options: Any = None) -> None:
        object.__setattr__(context, "identity", "")
        super().__init__(context, options)


@pytest.mark.parametrize(
    ("kind", "member", "target", "check"),
    [
        ("prefix_cache", "radix", LosesWindows, prefix_cache_groups.check_groups_are_matched_together),
        ("prefix_cache", "radix", CountsLocksAsEvictable, prefix_cache_groups.check_groups_in_random_calls),
        ("prefix_cache", "radix", IgnoresPins, prefix_cache_groups.check_pins_are_evicted_last),
        ("kv_tier", "host", KeepsAfterClear, kept_checks.check_kept_blocks_are_dropped_by_clear),
        ("kv_tier", "host", ServesEveryModel, kept_checks.check_kept_blocks_are_served_to_their_model),
    ],
)
def test_it_is_found(kind: str, member: str, target: type, check: Any) -> None:
    subject, name = find_subject(kind, member), check.__name__.removeprefix("check_")
    for each, result in ((subject.target, "passed"), (target, "failed")):
        changed = conformance.Subject(subject.record, each, subject.options, subject.setting)
        assert [outcome.result for outcome in conformance.run_suite(changed, only=name)] == [result]
