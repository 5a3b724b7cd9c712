"""Time to first token with many requests at once. A sixteenth of 400 requests with 1,024 prompt and
192 output tokens each, of which 8 prompts fit into a step."""

from __future__ import annotations

import pytest

from tests.core.scheduling.small_rig import VOCAB, params, rig

REQUESTS, PROMPT, OUTPUT, BUDGET, PAGE = 100, 64, 40, 512, 4
PREFILL_STEPS = -(-REQUESTS * PROMPT // BUDGET)
PAGES_OF_ONE = (PROMPT + OUTPUT) // PAGE


def steps_to_first_tokens(max_running: int, pages: int, overlap: bool) -> list[int]:
    """By order of arrival, the number of the step that yields each request's first token."""
    found = rig(
        max_running=max_running,
        num_pages=1 + pages,
        token_budget=BUDGET,
        max_context=128,
        overlap=overlap,
        page_size=PAGE,
        growth_reserve=4,
    )
    rids = [
        found.add([(17 * i + 5 * place * (1 + i % 7)) % VOCAB for place in range(PROMPT)], params(max_tokens=OUTPUT))
        for i in range(REQUESTS)
    ]
    first: dict[str, int] = {}
    step = 0
    while not found.scheduler.is_idle:
        found.step()
        step += 1
        for rid in rids:
            if found.requests[rid].got:
                first.setdefault(rid, step)
    found.check()
    return [first[rid] for rid in rids]


@pytest.mark.parametrize("overlap", [False, True])
def test_with_slots_for_all_requests_only_prefill_counts(overlap: bool) -> None:
    steps = steps_to_first_tokens(128, REQUESTS * PAGES_OF_ONE, overlap)
    assert steps == sorted(steps)
    assert max(steps) <= PREFILL_STEPS + overlap


@pytest.mark.parametrize("overlap", [False, True])
def test_with_fewer_slots_requests_wait_for_whole_outputs(overlap: bool) -> None:
    """With 256 slots for 400 requests, the last first token comes several times as late."""
    steps = steps_to_first_tokens(64, REQUESTS * PAGES_OF_ONE, overlap)
    assert steps == sorted(steps)
    assert max(steps[:64]) <= 64 * PROMPT // BUDGET + overlap
    assert min(steps[64:]) > OUTPUT
    assert max(steps) > 3 * PREFILL_STEPS


def test_with_fewer_pages_requests_wait_in_order_of_arrival() -> None:
    steps = steps_to_first_tokens(128, REQUESTS * PAGES_OF_ONE // 2, False)
    assert steps[:40] == sorted(steps[:40])
    assert max(steps) < 3 * (PREFILL_STEPS + OUTPUT)
