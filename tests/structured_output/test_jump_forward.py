"""Forced tokens are computed in one step, without a visible change for the client."""

from __future__ import annotations

import random

import numpy as np
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.structured_output.grammar_calls import accept_token
from frame.structured_output.jump_forward import LookaheadGrammar, find_only_token
from frame.testing.contexts import SCHEDULING
from frame.testing.gemm_kernels import load_own_plugins
from frame.testing.scheduler_rig import SchedulerRig
from tests.core.scheduling.scripted_grammar import BreakingScript, Script
from tests.core.scheduling.small_rig import count_steps

FREE = SamplingParams()
VOCAB = 40
RUN = [3, 1, 1, 1, 1, 1, 1, 3, 1, 2, 1, 1, 1]  # 13 tokens: runs of 6, 1 and 3, of which the last ends the grammar


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "page_size": 4, "num_pages": 65, "max_running": 4, "token_budget": 32, "max_context": 100, "vocab_size": VOCAB,
        "growth_reserve": 0, "jump_forward": 2,
    }  # fmt: skip
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def rig(**changes: object) -> SchedulerRig:
    registry = load_own_plugins()
    return SchedulerRig(config(**changes), registry.load(registry.get("scheduling_policy", "fcfs"))(SCHEDULING))


def ask(rig: SchedulerRig, widths: list[int], length: int = 5, **params: object) -> str:
    asked = SamplingParams(**{"max_tokens": 50, "temperature": 0.0, "ignore_eos": True, **params})  # type: ignore[arg-type]
    return rig.add([(7 * i) % VOCAB for i in range(length)], asked, grammar=lambda: Script(widths, VOCAB))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [32, 2])
def test_runs_take_one_step(overlap: bool, budget: int) -> None:
    steps = {}
    for fewest in (0, 2, 4):
        harness = rig(overlap=overlap, jump_forward=fewest, token_budget=budget)
        rid = ask(harness, RUN)
        steps[fewest] = count_steps(harness)
        assert harness.requests[rid].finish == Finish("stop")
        assert len(harness.requests[rid].got) == harness.scheduler.get_load()["generated_tokens"] == 13
        # of the last run only two can be taken ahead: its last token ends the request
        assert harness.scheduler.get_load()["jumped_tokens"] == {0: 0, 2: 5 + 1, 4: 5}[fewest]
    if budget == 32:
        assert (steps[0] - steps[2], steps[0] - steps[4]) == (6, 5)


def test_large_steps_need_longer_runs() -> None:
    for others, jumped in ((0, 6), (11, 5), (27, 0)):
        harness = rig(max_running=32, num_pages=600, token_budget=300, jump_rows=4)
        for i in range(others):
            harness.add([i % VOCAB, 1], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
        ask(harness, RUN)
        harness.run()
        assert harness.scheduler.get_load()["jumped_tokens"] == jumped


@pytest.mark.parametrize(("tokens", "max_length"), [(0, 6), (300, 6), (4, 3), (2, 1)])
def test_steps_with_runs_respect_the_token_limit(tokens: int, max_length: int) -> None:
    harness = rig(jump_tokens=tokens)
    rid, lengths = ask(harness, RUN), []
    while not harness.scheduler.is_idle:
        before = harness.scheduler.get_load()["jumped_tokens"]
        harness.step()
        lengths.append(1 + harness.scheduler.get_load()["jumped_tokens"] - before)
    assert max(lengths) == max_length and len(harness.requests[rid].got) == 13


@pytest.mark.parametrize("overlap", [False, True])
def test_runs_end_with_the_request(overlap: bool) -> None:
    whole = rig()
    ask(whole, RUN)
    whole.run()
    tokens = whole.requests["request-0"].got
    for count in range(1, 13):
        harness = rig(overlap=overlap)
        rid = ask(harness, RUN, max_tokens=count)
        stopped = ask(harness, RUN, stop_token_ids=(tokens[count],), ignore_eos=False)
        harness.run()
        assert harness.requests[rid].finish == Finish("length") and len(harness.requests[rid].got) == count
        first = tokens.index(tokens[count])
        end = Finish("stop", matched=tokens[count])
        assert harness.requests[stopped].got == tokens[: first + 1] and (harness.requests[stopped].finish == end or first == 12)


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_with_log_probabilities_sample_every_token(overlap: bool) -> None:
    harness = rig(overlap=overlap)
    ask(harness, RUN, logprobs=2)
    ask(harness, RUN, prompt_logprobs=1)
    harness.run()
    assert harness.scheduler.get_load()["jumped_tokens"] == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fewest", [2, 5])
def test_random_requests(overlap: bool, fewest: int) -> None:
    """Preemption, eviction and aborts all the time: every token is that of a run without jumps,
    alone."""
    rng = random.Random(1)
    harness = rig(overlap=overlap, jump_forward=fewest, num_pages=1 + 16, max_running=8, token_budget=10, max_context=64)
    for i in range(80):
        widths = [rng.choice((1, 1, 1, 3)) for _ in range(rng.randint(1, 30))]
        params = {"temperature": rng.choice((0.0, 1.0)), "seed": i, "max_tokens": rng.randint(1, 30)}
        if rng.random() < 0.7:
            rid = ask(harness, widths, rng.randint(1, 12), **params)
        else:
            rid = harness.add([i % VOCAB], SamplingParams(**params))  # type: ignore[arg-type]
        for _ in range(rng.choice((0, 0, 2))):
            harness.step()
        if rng.random() < 0.1:
            harness.abort(rid)
    harness.run()
    assert harness.scheduler.get_load()["preempted"] > 0 and harness.scheduler.get_load()["jumped_tokens"] > 20


def test_lookahead_does_not_change_the_grammar() -> None:
    rng = random.Random(0)
    for _ in range(30):
        widths = [rng.choice((1, 1, 2, 5)) for _ in range(rng.randint(1, 20))]
        plain, ahead = Script(widths, VOCAB), LookaheadGrammar(Script(widths, VOCAB))
        masks = np.zeros((2, 2), np.int32)
        is_finished = False
        while not is_finished:
            for _ in range(rng.randint(1, 2)):  # a preempted row's mask is made again
                assert plain.fill_mask(masks[0]) and ahead.fill_mask(masks[1])
                assert (masks[0] == masks[1]).all()
            if rng.random() < 0.3:
                for token in ahead.take_forced(2, rng.randint(2, 9), ()):
                    assert plain.fill_mask(masks[0]) and find_only_token(masks[0]) == token
                    assert plain.accept_token(token) and not plain.is_finished()
                continue
            token = rng.choice(plain.allowed())
            finish = accept_token(ahead, token, FREE)
            is_finished = finish is not None
            assert finish in (None, Finish("stop")) and accept_token(plain, token, FREE) == finish
    assert LookaheadGrammar(Script([1, 2], VOCAB)).is_finished() is False


def test_an_error_ahead_is_raised_after_the_forced_tokens() -> None:
    grammar, mask = LookaheadGrammar(BreakingScript([1] * 9, VOCAB, 3)), np.zeros(2, np.int32)
    for _ in range(3):
        assert grammar.fill_mask(mask)
        token = find_only_token(mask)
        assert token is not None and not grammar.accept_token(token + 1) and accept_token(grammar, token, FREE) is None
    with pytest.raises(ValueError, match="too much work"):
        grammar.fill_mask(mask)
    harness = rig()
    harness.add([1], SamplingParams(max_tokens=20, temperature=0.0), grammar=lambda: Script([1], VOCAB))
    harness.scheduler._requests["request-0"].grammar = LookaheadGrammar(BreakingScript([1] * 9, VOCAB, 3))
    harness.requests.clear()
    ends = []
    while not harness.scheduler.is_idle:
        batch = harness.scheduler.schedule_batch(0.0)
        assert batch is not None
        ends.append(harness.scheduler.commit(batch, harness.runner.launch(batch).wait()))
    assert [len(each.token_ids[0]) for each in ends] == [3, 0]  # a run, and the token that no request can allow
    assert ends[-1].finishes[0].error == "invalid grammar: too much work"


@pytest.mark.parametrize(("words", "token"), [([0, 4], 34), ([-(2**31), 0], 31), ([3, 0], None), ([1, 1], None), ([0, 0], None)])
def test_only_token(words: list[int], token: int | None) -> None:
    assert find_only_token(np.array(words, np.int32)) == token
