"""Fair sharing of slots, prompt budget and pages between tenants; a single tenant is served as
without tenants."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.interfaces.cache import owner_of
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.core.scheduling.waiting_queue import TenantUsage
from frame.plugins.loader import load_registry
from frame.testing.contexts import SCHEDULING
from frame.testing.scheduler_rig import SchedulerRig
from frame.testing.scheduling.scheduling_policy import example_requests

REGISTRY = load_registry(installed=False)
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")


def rig(policy: str = "fcfs", **changes: Any) -> SchedulerRig:
    values: dict[str, Any] = {
        "page_size": 16, "num_pages": 1025, "max_running": 8, "token_budget": 64, "max_context": 4096, "vocab_size": 101,
    }  # fmt: skip
    return SchedulerRig(SchedulerConfig(**{**values, **changes}), REGISTRY.load(REGISTRY.get("scheduling_policy", policy))(SCHEDULING))


def add(harness: SchedulerRig, tenant: str, length: int, start: int, tokens: int, salt: str = "") -> str:
    prompt = [(start + 7 * i) % 101 for i in range(length)]
    return harness.add(prompt, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), namespace=f"{tenant}:{salt}")


def steps_until(harness: SchedulerRig, rid: str, maximum: int = 60, count: int = 1) -> int:
    for step in range(1, maximum):
        harness.step()
        if len(harness.requests[rid].got) >= count:
            return step
    raise AssertionError(f"{rid} has {len(harness.requests[rid].got)} tokens after {maximum} steps")


@pytest.mark.parametrize(("policy", "overlap"), [("fcfs", False), *((name, True) for name in POLICIES)])
def test_a_tenant_is_served_beside_one_with_many_requests(policy: str, overlap: bool) -> None:
    harness = rig(policy, overlap=overlap)
    for i in range(140):  # more than a policy sees of the queue
        add(harness, "greedy", 30, i, 90, salt=str(i))  # each salt is a namespace of its own, of one tenant
    for _ in range(10):
        harness.step()
    first = add(harness, "modest", 20, 50, 20)
    assert steps_until(harness, first) <= 3 + overlap
    assert steps_until(harness, first, count=20) <= 22
    rids = [add(harness, "modest", 20, 60 + i, 100) for i in range(10)]
    for _ in range(30):
        harness.step()
    assert sum(len(harness.requests[rid].got) > 0 for rid in rids) == 4  # half of the slots


def test_long_prompts_of_one_tenant_do_not_take_the_budget() -> None:
    harness = rig(short_prompt_share=0.0)
    for i in range(6):
        add(harness, "greedy", 3000, i, 10)
    for _ in range(3):
        harness.step()
    assert steps_until(harness, add(harness, "modest", 100, 50, 5)) <= 4  # two steps' budget


def test_the_tenant_with_most_running_requests_is_preempted() -> None:
    harness = rig(num_pages=65, max_running=8, growth_reserve=16)
    greedy = [add(harness, "greedy", 100, i, 300) for i in range(6)]
    harness.step()
    modest = add(harness, "modest", 100, 50, 300)
    for _ in range(250):
        harness.step()
    assert len(harness.requests[modest].got) >= 200
    harness.run()
    assert all(len(harness.requests[rid].got) == 300 for rid in greedy)


def test_a_single_tenant_is_served_as_without_tenants() -> None:
    def order(namespace: str) -> list[str]:
        harness = rig()
        for i in range(40):
            add(harness, namespace, 20 + i, i, 5 + i % 3)
        seen: list[str] = []
        while len(seen) < 40:
            harness.step()
            seen += [rid for rid, one in harness.requests.items() if one.got and rid not in seen]
        return seen

    assert order("tenant") == order("")


def test_usage_is_removed_with_the_last_request() -> None:
    harness = rig()
    for tenant in "abc":
        add(harness, tenant, 20, 0, 5)
    harness.step()
    usage = harness.scheduler._queue.usage
    assert usage.is_shared
    harness.run()
    assert not usage.is_shared
    assert (usage._served, usage.num_running, usage._num_alive) == ({}, {}, {})


def test_a_new_tenant_starts_at_the_lowest_counter() -> None:
    usage = TenantUsage()
    usage.add_request("old")
    usage.add_tokens("old", 500)
    usage.add_request("new")
    assert usage.get_tokens("new") == usage.get_tokens("old") == 500
    usage.add_request("new")
    usage.remove_request("new")
    usage.add_tokens("new", 1)
    assert usage.get_tokens("new") == 501


def test_interleaving_counts_running_requests() -> None:
    usage, requests = TenantUsage(), example_requests(9)
    queues: dict[str, list[Any]] = {"a": requests[:4], "b": requests[4:7], "c": requests[7:]}
    for tenant, queue in queues.items():
        for request in queue:
            request.tenant = tenant
    usage.num_running.update({"a": 3, "b": 1})
    taken = [request.tenant for request in usage.interleave_tenants(queues.values())]
    assert taken == ["c", "b", "c", "b", "a", "b", "a", "a", "a"]


def test_owners() -> None:
    assert [owner_of(name) for name in ("", "salt", "key:", "key:salt:more", ":salt:more")] == ["", "", "key", "key", ""]
