"""Fairness: short prompts beside long ones, preemption by priority, and policies that must not
starve a request."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.scheduling import PATIENCE, SchedulerView
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.plugins.loader import load_registry
from frame.testing.contexts import SCHEDULING
from frame.testing.scheduler_rig import SchedulerRig

REGISTRY = load_registry(installed=False)
VOCAB = 101


def rig(policy: str = "fcfs", **changes: Any) -> SchedulerRig:
    values: dict[str, Any] = {
        "page_size": 16, "num_pages": 1025, "max_running": 16, "token_budget": 64, "max_context": 8192, "vocab_size": VOCAB,
    }  # fmt: skip
    return SchedulerRig(SchedulerConfig(**{**values, **changes}), REGISTRY.load(REGISTRY.get("scheduling_policy", policy))(SCHEDULING))


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def prompt(length: int, start: int) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(length)]


def steps_to_first_token(harness: SchedulerRig, rid: str, maximum: int = 1000) -> int:
    for step in range(1, maximum):
        harness.step()
        if harness.requests[rid].got:
            return step
    raise AssertionError(f"{rid} got no token in {maximum} steps")


def short_beside_long(share: float, long: int, count: int, **changes: Any) -> list[int]:
    """Steps until the first token of each of ten short prompts, sent one by one while `count` long
    prompts are computed."""
    harness = rig(short_prompt_share=share, **changes)
    for i in range(count):
        harness.add(prompt(long, i), params(2))
    harness.step()
    waits = [steps_to_first_token(harness, harness.add(prompt(16, 40 + i), params(2))) for i in range(10)]
    harness.run()
    return waits


@pytest.mark.parametrize("overlap", [False, True])
def test_short_prompts_do_not_wait_for_long_ones(overlap: bool) -> None:
    waits = short_beside_long(0.5, 3000, 4, overlap=overlap)
    assert max(waits) <= 2 + overlap
    assert short_beside_long(0.0, 3000, 4, overlap=overlap)[0] > 100  # without the share it waits for all four


@pytest.mark.soak
def test_short_prompts_beside_100k() -> None:
    size = {"max_context": 102_400, "num_pages": 32_768, "token_budget": 2048}
    kept, none = short_beside_long(0.5, 100_000, 4, **size), short_beside_long(0.0, 100_000, 4, **size)
    print(f"steps until the first token of ten short prompts beside four of 100,000 tokens: {kept}, without a share {none}")
    assert max(kept) <= 2


def test_a_long_prompt_with_a_cached_prefix_counts_as_short() -> None:
    harness = rig()
    history = prompt(2048, 0)
    steps_to_first_token(harness, harness.add(history, params(2)))
    while harness.step():
        pass
    harness.add(prompt(3000, 1), params(2))
    harness.step()
    assert steps_to_first_token(harness, harness.add([*history, *prompt(16, 5)], params(2))) <= 2
    harness.run()


def test_a_long_prompt_keeps_half_of_the_budget() -> None:
    harness = rig()
    rid = harness.add(prompt(640, 0), params(1))  # ten whole steps
    steps = 0
    while harness.requests[rid].finish is None:
        for i in range(4):  # more short prompts than fit in the other half
            harness.add(prompt(16, steps * 4 + i), params(1))
        harness.step()
        steps += 1
    assert steps <= 22
    harness.run()


def test_a_long_prompt_alone_gets_the_whole_budget() -> None:
    harness = rig()
    assert steps_to_first_token(harness, harness.add(prompt(640, 0), params(1))) == 10
    harness.add(prompt(640, 1), params(1))
    harness.add(prompt(640, 2), params(1))
    steps = 0
    while harness.step():
        steps += 1
    assert steps == 20  # one after the other, each with the whole budget
    harness.check()


def test_skipped_long_prompts_run_in_order() -> None:
    harness = rig(max_running=4)
    first, second, third = (harness.add(prompt(1000, i), params(1)) for i in range(3))
    for i in range(40):
        harness.add(prompt(16, 50 + i), params(3))
    ends: list[str] = []
    while harness.step():
        ends += [rid for rid in (first, second, third) if harness.requests[rid].finish is not None and rid not in ends]
    assert ends == [first, second, third]
    harness.check()


# priorities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preemption", [False, True])
def test_a_high_priority_preempts_low_ones_whose_tokens_do_not_change(preemption: bool, overlap: bool) -> None:
    harness = rig("priority", max_running=4, preemption=preemption, overlap=overlap)
    low = [harness.add(prompt(20, i), params(60)) for i in range(4)]
    for _ in range(5):
        harness.step()
    high = [harness.add(prompt(20, 50 + i), params(5), priority=5) for i in range(2)]
    waits = steps_to_first_token(harness, high[0])
    assert (waits <= 4) == preemption
    assert (harness.scheduler.get_load()["preempted"] > 0) == preemption
    harness.run()  # every token is what an undisturbed run yields
    assert all(len(harness.requests[rid].got) == 60 for rid in low)


def test_no_preemption_for_a_request_that_would_not_fit() -> None:
    harness = rig("priority", page_size=16, num_pages=101, max_running=8, token_budget=2048, max_context=4096, growth_reserve=1)
    harness.add([1] * 900, params(400))  # the oldest, which is never preempted
    harness.step()
    small = [harness.add([token] * 64, params(100)) for token in (2, 3)]
    harness.step()
    large = harness.add([4] * 1200, params(10), priority=10)
    for _ in range(120):
        harness.step()
    assert harness.scheduler.get_load()["preempted"] == 0
    assert all(len(harness.requests[rid].got) == 100 for rid in small)
    assert not harness.requests[large].got
    harness.run()


def test_no_more_requests_are_preempted_than_necessary() -> None:
    harness = rig("priority", page_size=4, num_pages=41, token_budget=256, growth_reserve=0)
    for i in range(4):
        harness.add(prompt(28, 10 * i), params(8))
    harness.step()
    harness.add(prompt(48, 90), params(3), priority=1)
    harness.run()
    assert harness.scheduler.get_load()["preempted"] == 1


def test_pages_shared_with_other_requests_do_not_count_as_freed() -> None:
    harness = rig("priority", page_size=4, num_pages=40, max_running=8, token_budget=256, max_context=160)
    shared = prompt(96, 0)
    for i in range(3):  # 24 common pages, and one or two private ones each
        harness.add([*shared, i], params(6))
        harness.step()
    harness.add(prompt(60, 50), params(2), priority=1)  # needs 15 pages: 9 are free, and preempting two would free 4
    for _ in range(3):
        harness.step()
        assert harness.scheduler.get_load()["preempted"] == 0
    harness.run()


def test_a_preemption_for_priority_does_not_raise_the_growth_reserve() -> None:
    harness = rig("priority", max_running=2, growth_reserve=8)
    for i in range(2):
        harness.add(prompt(20, i), params(30))
    harness.step()
    harness.add(prompt(20, 7), params(2), priority=1)
    harness.step()
    assert harness.scheduler.get_load()["preempted"] == 1
    assert harness.scheduler._planner._growth_reserve == 8


def test_equal_priorities_preempt_none() -> None:
    harness = rig("priority", max_running=2)
    for i in range(4):
        harness.add(prompt(20, i), params(30), priority=3)
    harness.run()
    assert harness.scheduler.get_load()["preempted"] == 0


# ageing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "lof"])
def test_no_request_starves(policy: str) -> None:
    harness = rig(policy, max_running=1, token_budget=64)
    stem = prompt(64, 0)
    harness.add(stem, params(2))
    while harness.step():
        pass
    unlucky = harness.add(prompt(40, 77), params(1))  # no cached prefix, short output: last in all three orders
    for i in range(200):
        harness.add([*stem, i % VOCAB], params(4))
        harness.now += 0.5
        harness.step()
        if harness.requests[unlucky].got:
            break
    assert harness.requests[unlucky].got
    assert harness.now <= 2 * PATIENCE
    harness.run()


def test_late_requests_go_first() -> None:
    from frame.core.interfaces.scheduling import late_first
    from frame.core.scheduling.request import Request

    def request(index: int, arrival: float) -> Request:
        return Request(str(index), None, params(1), 0, index, arrival, 100.0, 10)  # type: ignore[arg-type]

    view = SchedulerView(now=20.0, num_running=0, token_budget=1, free_pages=1, evictable_pages=0, page_size=1)
    fresh, late, later = request(2, 15.0), request(1, 1.0), request(0, 0.5)
    assert late_first([fresh], view) == [fresh]
    assert late_first([fresh, late, later], view) == [later, late, fresh]


def test_excess_requests_of_a_higher_priority_are_not_preempted_in_every_step() -> None:
    """They would be admitted again before the other tenant's request."""
    harness = rig("priority", max_running=2, token_budget=3)
    for start in (1, 20):
        harness.add(prompt(20, start), params(2), priority=1, namespace="one:")
    harness.step()
    harness.add(prompt(20, 60), params(2), namespace="two:")
    harness.run(max_steps=200)
    assert harness.scheduler.get_load()["preempted"] == 0
