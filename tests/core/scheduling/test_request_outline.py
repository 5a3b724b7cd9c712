"""What the outline of a scheduler's requests says in each phase, and its sums over schedulers."""

from __future__ import annotations

from frame.core.scheduling.request_outline import join_outlines
from tests.core.scheduling.small_rig import params, prompt, rig


def test_phases_follow_a_request() -> None:
    harness = rig(token_budget=8, max_running=1)
    harness.add(prompt(20), params(max_tokens=3), namespace="one:")
    harness.add(prompt(6, 50), params(max_tokens=3), namespace="two:")
    outline = harness.scheduler.outline_requests(10)
    assert {phase: count for phase, count in outline["phases"].items() if count} == {"queued": 2}
    harness.now += 2.0
    harness.step()
    outline = harness.scheduler.outline_requests(10)
    first, second = outline["requests"]
    assert (first["phase"], first["prompt"], first["computed"], first["output"], first["age"]) == ("prefill", 20, 8, 0, 2.0)
    assert (second["phase"], second["pages"]) == ("queued", 0)
    assert outline["tenants"] == [
        {"tenant": "one", "running": 1, "waiting": 0, "pages": first["pages"]},
        {"tenant": "two", "running": 0, "waiting": 1, "pages": 0},
    ]
    assert first["pages"] >= 2
    while not harness.scheduler.outline_requests(1)["phases"]["decode"]:
        harness.step()
    assert harness.scheduler.outline_requests(1)["requests"][0]["computed"] == 20
    assert len(harness.scheduler.outline_requests(1)["requests"]) == 1
    while not harness.scheduler.is_idle:
        harness.step()
    assert not any(harness.scheduler.outline_requests(10)["phases"].values())


def test_preempted_requests_say_so() -> None:
    harness = rig()
    harness.add(prompt(20), params())
    harness.step()
    harness.commit()
    harness.scheduler.preempt_all()
    (request,) = harness.scheduler.outline_requests(10)["requests"]
    assert (request["phase"], request["preemptions"]) == ("preempted", 1)


def test_outlines_of_several_schedulers_are_added() -> None:
    one, two = rig(), rig()
    for number, harness in enumerate((one, two)):
        harness.add(prompt(12), params(), namespace="tenant:")
        harness.now += number
        harness.step()
    joined = join_outlines([harness.scheduler.outline_requests(10) for harness in (one, two)], 1)
    assert sum(joined["phases"].values()) == 2
    assert joined["tenants"][0]["running"] == 2
    assert [request["age"] for request in joined["requests"]] == [1.0]
