"""Log-probabilities and grammars of requests in the scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from frame.core.messages import Finish, Generate
from tests.core.scheduling.small_rig import GREEDY, params, prompt, rig


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_of_output_and_prompt(overlap: bool) -> None:
    harness = rig(overlap=overlap, token_budget=7, num_pages=16, max_context=50)
    harness.add(prompt(30), params(max_tokens=4))
    while not harness.scheduler.is_idle:
        harness.step()
    asked = harness.add(prompt(30), params(max_tokens=4, logprobs=2, prompt_logprobs=1))
    plain = harness.add(prompt(30, 4), params(max_tokens=20))
    harness.run()
    request = harness.requests[asked]
    assert request.cached == 0  # prompt log-probabilities need every token's logits, so none is read from the cache
    assert [len(each.top[0]) for each in request.logprobs] == [2] * 4
    assert request.logprobs[0].top[0][0] == (request.got[0], request.logprobs[0].logprobs[0])
    assert request.prompt_logprobs is not None
    assert request.prompt_logprobs.top[0] == []
    expected = list(zip(prompt(30)[1:], request.prompt_logprobs.logprobs[1:], strict=True))
    assert [top[0] for top in request.prompt_logprobs.top[1:]] == expected
    assert harness.requests[plain].logprobs == []


@pytest.mark.parametrize("overlap", [False, True])
def test_hidden_states_of_a_prompt(overlap: bool) -> None:
    """Of every token, over chunks and a preemption, with a prompt that is in the prefix cache."""
    harness = rig(overlap=overlap, token_budget=7, num_pages=16, max_context=50)
    harness.add(prompt(30), params(max_tokens=4))
    harness.run()
    asked = harness.add(prompt(30), params(max_tokens=1, return_hidden_states=True))
    for _ in range(3):
        harness.step()
    request = next(each for each in harness.scheduler._running.table.requests if each is not None)
    assert request.hidden_states
    harness.scheduler._planner.preempt(request)
    harness.run()
    assert harness.requests[asked].cached == 0
    assert np.frombuffer(harness.requests[asked].pooled, np.float32).tolist() == prompt(30)  # the fake model's states


class Alternating:
    """Allows even and odd tokens in turn; ends after `count` tokens."""

    def __init__(self, count: int) -> None:
        self.taken: list[int] = []
        self.count = count

    def fill_mask(self, mask: np.ndarray) -> bool:
        mask[:] = 0x55555555 if len(self.taken) % 2 == 0 else np.int32(-0x55555556)
        return True

    def accept_token(self, token_id: int) -> bool:
        if token_id % 2 != len(self.taken) % 2:
            return False
        self.taken.append(token_id)
        return True

    def is_finished(self) -> bool:
        return len(self.taken) == self.count


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [65, 14])
def test_grammars_see_every_token_before_the_next_mask(overlap: bool, pages: int) -> None:
    harness = rig(overlap=overlap, num_pages=pages, max_context=50)
    for i in range(2):
        harness.add(prompt(5, i), params(max_tokens=30))
    grammar = Alternating(20)
    message = Generate(rid="constrained", token_ids=prompt(5, 30), params=params(max_tokens=40))
    assert harness.scheduler.add_request(message, grammar) is None
    finishes = {}
    in_flight: list[Any] = []
    followed = 0
    while not harness.scheduler.is_idle:
        batch = harness.scheduler.schedule_batch(0.0)
        if batch is not None:
            in_flight.append((batch, harness.runner.launch(batch)))
        while len(in_flight) > (overlap and batch is not None):
            done, step = in_flight.pop(0)
            tokens = harness.scheduler.commit(done, step.wait())
            finishes.update({tokens.rids[i]: finish for i, finish in tokens.finishes.items()})
        if batch is not None and batch.has_deferred_grammar_mask:
            followed += 1
            in_flight[-1][1].sample(harness.scheduler.fill_deferred_mask(batch))
        harness.scheduler.check_integrity()
    assert (followed > 15) == overlap
    assert len(grammar.taken) == 20
    assert [token % 2 for token in grammar.taken] == [0, 1] * 10
    assert finishes["constrained"] == Finish("stop")
    assert harness.scheduler.get_load()["preempted"] == 0 or pages == 14


def test_a_token_that_breaks_the_grammar_is_an_error() -> None:
    class Never(Alternating):
        def accept_token(self, token_id: int) -> bool:
            return False

    harness = rig()
    assert harness.scheduler.add_request(Generate(rid="a", token_ids=prompt(5), params=GREEDY), Never(3)) is None
    batch = harness.scheduler.schedule_batch(0.0)
    assert batch is not None
    tokens = harness.scheduler.commit(batch, harness.runner.launch(batch).wait())
    assert tokens.finishes[0].reason == "error"
    assert tokens.token_ids == [[]]
    assert harness.scheduler.is_idle
