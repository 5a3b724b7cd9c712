"""Prefix sharing between requests, and preemption when pages run out: neither changes a token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from frame.core.interfaces.scheduling import SchedulerView
from frame.core.scheduling.request import Request
from frame.testing.scheduler_rig import SchedulerRig
from tests.core.scheduling.small_rig import GREEDY, Recorder, config, params, policy, prompt, rig


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_shares_the_prefix_of_a_running_one(overlap: bool) -> None:
    harness = rig(overlap=overlap)
    first = harness.add(prompt(21), params(max_tokens=30))
    for _ in range(3):
        harness.step()
    sibling = harness.add(prompt(21), GREEDY)
    for _ in range(3):
        harness.step()
    assert harness.requests[first].finish is None
    assert harness.requests[sibling].cached == 20
    harness.run()


def test_output_is_cached_and_the_last_token_is_always_computed() -> None:
    harness = rig()
    first = harness.add(prompt(9), params(max_tokens=8))
    while not harness.scheduler.is_idle:
        harness.step()
    turn = harness.add(prompt(9) + harness.requests[first].got, GREEDY)
    whole = harness.add(prompt(8), GREEDY)
    elsewhere = harness.add(prompt(9), GREEDY, namespace="another tenant")
    while not harness.scheduler.is_idle:
        harness.step()
    assert harness.requests[turn].cached == 16  # of 17 tokens; K and V of the last one were not computed
    assert harness.requests[whole].cached == 7  # 8 are cached, but the last one is computed for its logits
    assert harness.requests[elsewhere].cached == 0
    assert harness.scheduler.get_load()["cached_tokens"] == 23
    harness.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_equal_prompts_that_start_together_end_up_sharing_pages(overlap: bool) -> None:
    harness = rig(overlap=overlap, token_budget=64)
    for _ in range(2):
        harness.add(prompt(16), params(max_tokens=12))
    for _ in range(4):
        harness.step()
    # 4 shared pages of the prompt, and one private page each
    assert harness.scheduler.get_load()["used_pages"] == 6
    harness.run()


def test_flush_keeps_pages_in_use() -> None:
    harness = rig()
    for start in (10, 50):
        harness.add(prompt(16, start), params(max_tokens=1))
    while not harness.scheduler.is_idle:
        harness.step()
    running = harness.add(prompt(16), params(max_tokens=9))
    harness.step()
    assert harness.scheduler.flush_cache() == 4  # of the unused prompt; the running request's 4 pages are locked
    harness.run()
    assert harness.requests[running].cached == 15


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_fully_cached_prompt_computes_one_token_and_stores_none(overlap: bool, page_size: int) -> None:
    harness = rig(overlap=overlap, page_size=page_size)
    harness.add(prompt(16), params(max_tokens=9))
    while not harness.scheduler.is_idle:
        harness.step()
    again = [harness.add(prompt(16), params(max_tokens=9)) for _ in range(3)]  # which read the same pages in one step
    computed = harness.runner.num_tokens
    harness.step()
    assert harness.runner.num_tokens == computed + 3
    assert harness.scheduler.get_load()["used_pages"] == 16 // page_size
    harness.run()
    assert [harness.requests[rid].cached for rid in again] == [15, 15, 15]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_preemption_changes_no_token_and_spares_the_oldest(overlap: bool, page_size: int) -> None:
    recorder = Recorder()
    harness = SchedulerRig(config(page_size=page_size, num_pages=1 + 48 // page_size, max_context=40, overlap=overlap), recorder)
    for i in range(6):
        harness.add(prompt(8, i), params(max_tokens=28, temperature=float(i % 2), seed=i, logprobs=1))
    harness.run()
    assert recorder.victims
    assert all(victim != oldest for victim, oldest in recorder.victims)
    assert harness.scheduler.get_load()["preempted"] == len(recorder.victims)
    # a preempted request recomputes little: its prefix stays cached unless it is evicted
    recomputed = harness.runner.num_tokens - 6 * (8 + 27)
    assert recomputed < 30 * len(recorder.victims)


@pytest.mark.parametrize("reserve", [0, 32])
def test_the_growth_reserve_prevents_preemption(reserve: int) -> None:
    harness = rig(num_pages=13, max_context=40, growth_reserve=reserve)
    for i in range(6):
        harness.add(prompt(8, i), params(max_tokens=16))
    harness.run()
    assert (harness.scheduler.get_load()["preempted"] == 0) == (reserve == 32)


def test_long_outputs() -> None:
    harness = rig(num_pages=200, max_context=400)
    for i in range(3):
        harness.add(prompt(6, i), params(max_tokens=150 + 50 * i))
    harness.run()


def test_a_preempted_request_resumes_before_waiting_ones() -> None:
    ended: list[str] = []
    harness = SchedulerRig(config(num_pages=13, max_running=3, max_context=41), policy())
    harness.scheduler._on_finish = lambda request, finish: ended.append(request.rid)
    for i in range(5):
        harness.add(prompt(8, i), params(max_tokens=30))
    harness.run()
    assert harness.scheduler.get_load()["preempted"] > 0
    assert ended == [f"request-{i}" for i in range(5)]


def test_a_policy_without_a_victim_does_not_stall_the_engine() -> None:
    class NoVictim(Recorder):
        def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
            return None

    harness = SchedulerRig(config(num_pages=11, max_context=40), NoVictim())
    for i in range(4):
        harness.add(prompt(8, i), params(max_tokens=28))
    harness.run()
    assert harness.scheduler.get_load()["preempted"] > 0


def test_a_policy_that_chooses_the_oldest_is_logged_and_the_newest_is_preempted(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Recorder):
        def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
            return running[0]

    harness = SchedulerRig(config(num_pages=11, max_context=40), Wrong())
    for i in range(4):
        harness.add(prompt(8, i), params(max_tokens=28))
    harness.run()
    assert harness.scheduler.get_load()["preempted"] > 0
    assert "Wrong, asked for a victim, returned the oldest request" in caplog.records[0].getMessage()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_higher_priority_preempts_lower_ones(overlap: bool) -> None:
    ended: list[str] = []
    harness = SchedulerRig(config(max_running=2, overlap=overlap), policy("priority"))
    harness.scheduler._on_finish = lambda request, finish: ended.append(request.rid)
    for i in range(3):
        harness.add(prompt(8, i), params(max_tokens=30), priority=0)
    for _ in range(4):
        harness.step()
    urgent = harness.add(prompt(8, 90), params(max_tokens=3), priority=5)
    harness.run()
    assert ended[0] == urgent
    assert harness.scheduler.get_load()["preempted"] == 1
    assert ended[1] == "request-0"  # the oldest was not preempted
