"""How requests end by refusal, deadline, abort or failure, without effect on others."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.messages import Finish, Generate
from frame.testing.scheduler_rig import SchedulerRig
from tests.core.scheduling.small_rig import GREEDY, VOCAB, config, params, policy, prompt, rig


def refusal(message: Generate, **changes: Any) -> str:
    harness = rig(**changes)
    finish = harness.scheduler.add_request(message)
    assert finish is not None
    assert finish.reason == "error"
    assert harness.scheduler.is_idle
    assert finish.error is not None
    return finish.error


def test_refusals_name_the_limits() -> None:
    one = Generate(rid="a", token_ids=prompt(90), params=params(max_tokens=20))
    assert refusal(one) == (
        "the prompt has 90 tokens and max_tokens is 20: 110 together, above the context of 100; "
        "lower max_tokens to 10 or shorten the prompt"
    )
    assert refusal(Generate(rid="a", token_ids=prompt(100), params=params())).startswith("the prompt has 100 tokens, the context holds 100")
    assert refusal(Generate(rid="a", token_ids=prompt(30), params=params(max_tokens=12)), num_pages=11) == (
        "the request needs 11 pages of 4 tokens (30 of prompt plus 12 of output), the KV cache has 10; "
        "lower max_tokens, shorten the prompt or enlarge cache.max_total_tokens"
    )
    assert refusal(Generate(rid="a", token_ids=prompt(41), params=params(max_tokens=None)), num_pages=11).startswith(
        "the request needs 11 pages"
    )
    assert refusal(Generate(rid="a", token_ids=[], params=params())) == "the prompt is empty; it needs at least one token"
    assert "outside the vocabulary (0 to 100)" in refusal(Generate(rid="a", token_ids=[1, VOCAB], params=params()))
    assert "outside the vocabulary" in refusal(Generate(rid="a", token_ids=[-1], params=params()))
    assert "it may have 64" in refusal(Generate(rid="a", token_ids=[1], params=params(stop_token_ids=tuple(range(65)))))


def test_a_request_that_just_fits_runs() -> None:
    for overlap in (False, True):
        harness = rig(num_pages=11, overlap=overlap)
        harness.add(prompt(30), params(max_tokens=11))
        harness.add(prompt(30, 5), params(max_tokens=11))
        harness.run()


def test_queue_is_bounded_and_ids_are_unique() -> None:
    harness = rig(max_running=2, max_queued=2)
    for i in range(4):
        harness.add(prompt(4, i), GREEDY)
    full = harness.scheduler.add_request(Generate(rid="third", token_ids=[1], params=GREEDY))
    assert full is not None
    assert full.error is not None
    assert full.error.startswith("queue full: ")
    assert full.code == "queue_full"
    harness.step()  # two are on the device now
    twin = harness.scheduler.add_request(Generate(rid="request-0", token_ids=[1], params=GREEDY))
    assert twin is not None
    assert twin.error == "request id request-0 is in use; choose another"
    assert (twin.code, twin.param) == ("invalid_request", "rid")
    harness.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_deadlines_end_waiting_and_running_requests(overlap: bool) -> None:
    harness = rig(overlap=overlap, max_running=1, request_timeout=50.0)
    runs = harness.add(prompt(4), params(max_tokens=60), deadline=5.0)
    waits = harness.add(prompt(4), params(max_tokens=60), deadline=3.0)
    last = harness.add(prompt(4), params(max_tokens=30))
    for _ in range(80):
        harness.step()
        harness.now += 1.0
    for rid, seconds in ((runs, 5), (waits, 3)):
        finish = harness.requests[rid].finish
        assert finish is not None
        assert finish.error == f"deadline exceeded: the request took longer than its {seconds} s; allow it more time"
    assert 0 < len(harness.requests[runs].got) < 8
    assert harness.requests[waits].got == []
    assert harness.requests[last].finish == Finish("length")
    harness.run()


def test_a_deadline_counts_from_the_arrival() -> None:
    """It does not count from the time when the request's grammar was compiled."""
    harness = rig(request_timeout=50.0)
    harness.now = 100.0
    message = Generate(rid="late", token_ids=[1], params=params(max_tokens=60), deadline=5.0)
    assert harness.scheduler.add_request(message, None, 96.0) is None
    assert harness.scheduler._requests["late"].deadline == 101.0


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_in_every_state(overlap: bool) -> None:
    harness = rig(overlap=overlap, max_running=2, token_budget=6)
    decoding = harness.add(prompt(4), params(max_tokens=50))
    prefilling = harness.add(prompt(40, 1), params(max_tokens=50))
    waiting = harness.add(prompt(4, 2), params(max_tokens=50))
    for _ in range(3):
        harness.step()
    assert harness.scheduler.get_load()["running"] == 2
    for rid in (decoding, prefilling, waiting):
        harness.abort(rid)
        harness.abort(rid)
        harness.scheduler.check_integrity()
        assert harness.requests[rid].finish == Finish("abort")
    harness.scheduler.abort(["unknown"])
    assert harness.scheduler.drain_outputs() is None
    assert not harness.scheduler.is_idle or not overlap
    harness.run()


def test_abort_all_and_abort_with_a_reason() -> None:
    harness = rig(max_running=1)
    for i in range(3):
        harness.add(prompt(4, i), GREEDY)
    harness.step()
    harness.scheduler.abort(["request-0"], "stop")
    harness.scheduler.abort_all()
    tokens = harness.scheduler.drain_outputs()
    assert tokens is not None
    assert tokens.finishes == {0: Finish("stop"), 1: Finish("abort"), 2: Finish("abort")}
    assert tokens.token_ids == [[], [], []]
    assert harness.scheduler.is_idle


@pytest.mark.parametrize("overlap", [False, True])
def test_non_finite_logits_end_only_their_request(overlap: bool) -> None:
    bad = prompt(9, 3)
    harness = SchedulerRig(config(overlap=overlap), policy(), is_invalid=lambda tokens: tokens[:9] == bad and len(tokens) == 12)
    fine, broken = harness.add(prompt(9), GREEDY), harness.add(bad, GREEDY)
    harness.run()
    assert harness.requests[fine].finish == Finish("length")
    finish = harness.requests[broken].finish
    assert finish is not None
    assert finish.error is not None
    assert finish.error.startswith("the model's logits were not finite")
    assert finish.code == "non_finite_logits"
    assert len(harness.requests[broken].got) == 3


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        (
            {"regex": "a+", "min_tokens": 7},
            "after 3 tokens of output no token is allowed by regex and min_tokens; lower min_tokens to 3",
            "min_tokens",
        ),
        ({"choice": ("a",), "min_tokens": 2}, "after 3 tokens of output no token is allowed by choice; change choice", "choice"),
        (
            {"min_tokens": 7, "bad_words_ids": ((1,),)},
            "after 3 tokens of output no token is allowed by min_tokens and bad_words_ids; lower min_tokens to 3 or shorten bad_words_ids",
            "min_tokens",
        ),
        ({}, "the model's logits were not finite; the request was ended, others are not affected", None),
    ],
)
def test_a_request_that_bans_all_tokens_ends_with_the_fields_that_do(fields: dict[str, Any], error: str, param: str | None) -> None:
    bad = prompt(9, 3)
    harness = SchedulerRig(config(), policy(), is_invalid=lambda tokens: tokens[:9] == bad and len(tokens) == 12)
    harness.runner.bans_all = True
    fine, banned = harness.add(prompt(9), GREEDY), harness.add(bad, params(**fields))
    harness.run()
    assert harness.requests[fine].finish == Finish("length")
    finish = harness.requests[banned].finish
    assert finish is not None
    assert (finish.error, finish.param) == (error, param)


def test_a_step_with_non_finite_logits_caches_nothing() -> None:
    bad = prompt(9, 3)
    harness = SchedulerRig(config(), policy(), is_invalid=lambda tokens: len(tokens) == 13)
    broken = harness.add(bad, GREEDY)
    while not harness.scheduler.is_idle:
        harness.step()
    assert len(harness.requests[broken].got) == 4
    again = harness.add([*bad, *harness.requests[broken].whole], params(max_tokens=1))
    while not harness.scheduler.is_idle:
        harness.step()
    assert harness.requests[again].cached == 8  # the prompt's pages; the third page was computed in the last step
    harness.check()
