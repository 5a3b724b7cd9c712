"""Drafts in the scheduler: equal output, the number of steps, pages, and drafters at fault."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from frame.core.interfaces.batch import SlotSetup
from frame.core.messages import Finish, Generate
from frame.core.scheduling.running import StepRecord
from frame.testing.drafters import Script
from frame.testing.fake_runner import continuation
from frame.testing.scheduler_rig import Expected, SchedulerRig
from tests.core.scheduling.scripted_grammar import Script as Grammar
from tests.core.scheduling.small_rig import VOCAB, config, count_steps, params, policy, prompt, rig


def oracle(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    return continuation(tokens, setup.params, setup.seed, VOCAB, maximum)


def adversary(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    return [(token + 1) % VOCAB for token in oracle(setup, tokens, maximum)]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_oracle_needs_one_step_for_each_k_plus_1_tokens(page_size: int, num_steps: int) -> None:
    used = rig(page_size=page_size, num_pages=1 + 256 // page_size)
    used.enable_drafts(oracle, num_steps)
    used.add(prompt(9), params(max_tokens=41))
    assert count_steps(used) == 1 + -(-40 // (num_steps + 1))  # the prompt's step yields one token
    load = used.scheduler.get_load()
    assert load["accepted_tokens"] == load["drafted_tokens"] == 41 - count_drawn(num_steps)
    assert load["generated_tokens"] == 41


def count_drawn(num_steps: int) -> int:
    """Steps of 41 tokens."""
    return 1 + -(-40 // (num_steps + 1))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("script", [oracle, adversary])
def test_several_requests_in_a_small_pool(script: Script, overlap: bool) -> None:
    used = rig(num_pages=15, overlap=overlap)
    used.enable_drafts(script, 4)
    for start in range(6):
        temperature = float(start % 2)
        used.add(prompt(5 + start, start), params(max_tokens=12, temperature=temperature, seed=start, logprobs=2 if start == 3 else None))
    used.run()  # compares the tokens and counts the pages
    load = used.scheduler.get_load()
    assert load["drafted_tokens"] > 30
    assert (load["accepted_tokens"] > 0) == (script is oracle)


def test_stop_token_inside_a_draft_ends_the_run() -> None:
    whole = continuation(prompt(9), params(), 0, VOCAB, 20)
    used = rig()
    used.enable_drafts(oracle, 15)
    stop = next(token for i, token in enumerate(whole) if i > 4 and token not in whole[:i])
    rid = used.add(prompt(9), params(max_tokens=20, stop_token_ids=(stop,)))
    assert count_steps(used) == 2
    assert used.requests[rid].got == whole[: whole.index(stop) + 1]
    finish = used.requests[rid].finish
    assert finish is not None and finish.matched == stop


def test_non_finite_logits_inside_a_draft_end_the_run() -> None:
    whole = continuation(prompt(9), params(), 0, VOCAB, 8)
    used = SchedulerRig(config(), policy(), is_invalid=lambda tokens: list(tokens) == prompt(9) + whole[:4])
    used.enable_drafts(oracle, 7)
    rid = used.add(prompt(9), params(logprobs=1))
    used.run()
    finish = used.requests[rid].finish
    assert finish is not None and finish.code == "non_finite_logits"
    assert used.requests[rid].got == whole[:4]


def test_request_with_a_constrained_draft_length() -> None:
    used = rig()
    drafter = used.enable_drafts(oracle, 5)
    used.add(prompt(5), params(max_tokens=1))
    used.add(prompt(6), params(max_tokens=2))
    used.run()
    assert drafter.num_proposals == 0  # one more token is drawn in any case
    assert not drafter.slots - {0, 1}


@pytest.mark.parametrize("maximum", [0, 1, 2, 9])
def test_request_limits_its_drafts(maximum: int) -> None:
    used = rig()
    asked: list[int] = []
    used.enable_drafts(lambda setup, tokens, room: (asked.append(room), oracle(setup, tokens, room))[1], 3)
    used.add(prompt(9), params(max_tokens=30, num_speculative_tokens=maximum))
    assert count_steps(used) == 1 + -(-29 // (1 + min(maximum, 3)))
    assert max(asked, default=0) == min(maximum, 3)


def test_requests_with_and_without_drafts_share_steps() -> None:
    used = rig(overlap=True)
    used.enable_drafts(oracle, 3)
    used.add(prompt(9), params(max_tokens=20, num_speculative_tokens=0))
    used.add(prompt(8), params(max_tokens=20))
    used.run()
    assert used.scheduler.get_load()["accepted_tokens"] == 19 - -(-19 // 4)


def test_recovered_request_is_drafted_from_its_output_on() -> None:
    whole = continuation(prompt(9), params(), 0, VOCAB, 12)
    used = rig()
    used.enable_drafts(oracle, 3)
    message = Generate(rid="r", token_ids=prompt(9) + whole[:5], output_len=5, params=params(max_tokens=12))
    assert used.scheduler.add_request(message) is None
    used.requests["r"] = Expected(message, whole[5:], cached=0)
    assert count_steps(used) == 1 + 2


def test_slots_of_ended_requests_are_released() -> None:
    used = rig()
    drafter = used.enable_drafts(adversary, 2)
    for start in range(6):
        used.add(prompt(5, start), params())
    used.run()
    used.add(prompt(4), params())
    used.step()
    assert len(drafter.slots) == 1


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (lambda setup, tokens, maximum: [VOCAB], "outside of the vocabulary"),
        (lambda setup, tokens, maximum: [-1], "outside of the vocabulary"),
        (lambda setup, tokens, maximum: [1 // 0], "division by zero"),
    ],
)
def test_drafter_at_fault_is_not_used_any_more(script: Script, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    used = rig()
    drafter = used.enable_drafts(script, 2)
    with caplog.at_level(logging.ERROR):
        used.add(prompt(5), params())
        used.run()
    assert drafter.num_proposals == 1
    assert problem in caplog.text and "ScriptedDrafter" in caplog.text


def test_too_long_a_draft_is_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    used = rig()
    drafter = used.enable_drafts(oracle, 2)
    proposals = drafter.propose_tokens
    drafter.propose_tokens = lambda slots, maximum: proposals(slots, np.full_like(maximum, 9))  # type: ignore[method-assign]
    used.add(prompt(5), params())
    used.run()
    assert "which may have" in caplog.text


def test_counters_by_place() -> None:
    used = rig()
    used.enable_drafts(lambda *given: [*oracle(*given)[:1], *adversary(*given)[1:]], 3)
    used.add(prompt(5), params(max_tokens=9))
    used.run()
    stats = used.scheduler.speculation.stats
    assert stats.accepted_at == [stats.num_drafts, 0, 0]
    assert stats.num_accepted == stats.num_drafts == 4


def test_length_0_is_measured_without_the_drafter() -> None:
    used, measured, one = rig(), [], np.ones(1, np.int32)
    used.enable_drafts(oracle, 3)
    speculation = used.scheduler.speculation
    speculation._lengths.record = lambda *given: measured.append(given)  # type: ignore[method-assign]
    for step, is_followed in enumerate([False, False, True, False]):
        record = StepRecord(step, one, one, one, one, one.astype(np.bool_), 1, is_followed=is_followed)
        speculation.record_step(record, step * (step + 1) / 2)
    assert measured == [(1, 0, 0, 1.0), (1, 0, 0, 3.0)]


# grammars -----------------------------------------------------------------------------------------

WIDTHS = [3, 2, 4, 3, 1, 1, 1, 5, 3, 2, 4, 2, 3, 1, 3]  # of scripted grammars; tokens 4 to 6 and 13 are forced


def known(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    """The output, with the grammar's limits, and tokens after the grammar's end."""
    grammar = Grammar(WIDTHS, VOCAB)
    for token in tokens[setup.prompt_len :]:
        grammar.accept_token(token)
    right = [] if grammar.is_finished() else continuation(tokens, setup.params, setup.seed, VOCAB, maximum, grammar)
    return [*right, *range(VOCAB)][:maximum]


def partly_known(setup: SlotSetup, tokens: Sequence[int], maximum: int) -> list[int]:
    """One token of the output, then others."""
    return [*known(setup, tokens, maximum)[:1], *adversary(setup, tokens, maximum)[1:]]


@pytest.mark.pairwise
@pytest.mark.parametrize("jump_forward", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("script", [known, partly_known, adversary])
def test_output_of_a_grammar_does_not_depend_on_drafts(script: Script, overlap: bool, jump_forward: int) -> None:
    used = rig(num_pages=20, overlap=overlap, jump_forward=jump_forward)
    used.enable_drafts(script, 4)
    for start in range(5):
        is_constrained = start != 2
        asked = params(max_tokens=13 if start == 3 else 40 if is_constrained else 9, temperature=float(start % 2), seed=start)
        used.add(prompt(5 + start, start), asked, grammar=(lambda: Grammar(WIDTHS, VOCAB)) if is_constrained else None)
    used.run()  # compares the tokens with those of the grammar alone, and counts the pages
    load = used.scheduler.get_load()
    assert load["drafted_tokens"] > 0
    assert load["accepted_tokens"] > 10 or script is not known


def test_draft_ends_before_the_end_of_its_grammar() -> None:
    used = rig()
    used.enable_drafts(known, 4)
    rid = used.add(prompt(5), params(max_tokens=40), grammar=lambda: Grammar(WIDTHS, VOCAB))
    steps = count_steps(used)
    assert used.requests[rid].finish == Finish("stop")
    assert len(used.requests[rid].got) == len(WIDTHS)
    assert steps == 1 + -(-(len(WIDTHS) - 1) // 5)  # a step for each 5 tokens after the first


def test_grammar_that_cannot_be_rolled_back_ends_its_request_alone() -> None:
    class Broken(Grammar):
        def rollback_tokens(self, count: int) -> None:
            raise RuntimeError("lost")

    used = rig()
    used.enable_drafts(known, 4)
    rid = used.add(prompt(5), params(max_tokens=40), grammar=lambda: Broken(WIDTHS, VOCAB))
    other = used.add(prompt(6), params(max_tokens=9))
    while not used.scheduler.is_idle:
        used.step()
    finish = used.requests[rid].finish
    assert finish is not None and finish.error is not None and "the grammar backend failed" in finish.error
    assert used.requests[other].finish == Finish("length")
