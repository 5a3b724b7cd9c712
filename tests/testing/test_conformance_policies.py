"""Every in-tree policy passes the conformance checks, and each check fails for a policy that breaks
its law."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from frame.core.interfaces.cache import EvictableNode, EvictionPolicy
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.request import Request
from frame.plugins.loader import load_registry
from frame.testing.conformance_policies import Check, check_eviction_policy, check_scheduling_policy

REGISTRY = load_registry(installed=False)


def in_tree() -> list[tuple[str, Check]]:
    found: list[tuple[str, Check]] = []
    kinds: tuple[tuple[str, Callable[..., Iterable[Check]]], ...] = (
        ("scheduling_policy", check_scheduling_policy),
        ("eviction_policy", check_eviction_policy),
    )
    for kind, checks in kinds:
        for record in REGISTRY.records(kind):
            found += [(f"{record.name}-{check.name}", check) for check in checks(REGISTRY.load(record))]
    return found


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in in_tree()])
def test_in_tree(check: Check) -> None:
    check.run()


class Loses(SchedulingPolicy):
    def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return waiting[1:]


class Changes(SchedulingPolicy):
    def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        for request in waiting:
            request.priority += 1
        return waiting


class Invents(SchedulingPolicy):
    def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return [*waiting, None]  # type: ignore[list-item]


class KillsTheOldest(SchedulingPolicy):
    def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return waiting

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        return running[0]

    def can_preempt(self, waiting: Request, running: Request) -> bool:
        return True


class Moody(EvictionPolicy):
    def __init__(self) -> None:
        self.calls = 0

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        self.calls += 1
        return (self.calls,)


class Ragged(EvictionPolicy):
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (1.0,) * (1 + node.hits % 2)


def failing(checks: Iterable[Check]) -> set[str]:
    found = set()
    for check in checks:
        try:
            check.run()
        except (AssertionError, RuntimeError, AttributeError):
            found.add(check.name)
    return found


@pytest.mark.parametrize(
    ("policy", "check"),
    [
        (Loses, "order_is_a_permutation"),
        (Invents, "order_of_nothing"),
        (Changes, "order_changes_nothing"),
        (KillsTheOldest, "victim_is_never_the_oldest"),
        (KillsTheOldest, "preemption_has_no_cycle"),
        (KillsTheOldest, "runs_plain_with_pages_of_1"),
    ],
)
def test_a_scheduling_law_broken_is_found(policy: type[SchedulingPolicy], check: str) -> None:
    assert check in failing(each for each in check_scheduling_policy(policy) if each.name == check)


@pytest.mark.parametrize(("policy", "check"), [(Moody, "key_depends_on_the_node_alone"), (Ragged, "key_is_an_ordered_tuple")])
def test_an_eviction_law_broken_is_found(policy: type[EvictionPolicy], check: str) -> None:
    assert check in failing(check_eviction_policy(policy))
