"""In-batch prefix sharing: of prompts with a common prefix one computes it, and the others wait and
read it from the cache."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Generate
from frame.core.scheduling.prefix_dedup import MIN_SHARED_TOKENS, InBatchPrefixSharing
from frame.core.scheduling.request import Request
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.plugins.eviction_policies.lru import Lru
from frame.plugins.prefix_caches.radix import RadixCache
from frame.plugins.scheduling_policies.fcfs import Fcfs
from frame.testing.contexts import EVICTION, SCHEDULING
from frame.testing.fake_runner import FakeRunner, continuation
from frame.testing.local_loop import LocalLoop
from frame.testing.page_allocators import make_allocator

VOCAB, PAGE = 97, 4
SHARED = [(3 * place) % VOCAB for place in range(2 * MIN_SHARED_TOKENS)]


def request(tokens, namespace=""):
    prompt = np.array(tokens, np.int32)
    created = Request("r", prompt, SamplingParams(), 0, 0, 0.0, 0.0, len(tokens) + 8, namespace=namespace)
    created.tokens = prompt
    return created


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (SHARED, SHARED, len(SHARED)),
        (SHARED, [*SHARED, 1, 2], len(SHARED)),
        ([*SHARED, 5, 6], [*SHARED, 5, 7], len(SHARED) + 1),
        ([*SHARED[:MIN_SHARED_TOKENS], 90, 1], [*SHARED[:MIN_SHARED_TOKENS], 91, 1], MIN_SHARED_TOKENS),
        ([1, *SHARED], SHARED, 0),
        (SHARED[:MIN_SHARED_TOKENS], SHARED, 0),
        ([], SHARED, 0),
    ],
)
def test_find_the_longest_common_prefix(one, other, shared):
    running = request(one)
    assert InBatchPrefixSharing([running]).find(request(other)) == ((running, shared) if shared else (None, 0))


def test_tenants_share_nothing():
    assert InBatchPrefixSharing([request(SHARED, "a")]).find(request(SHARED, "b")) == (None, 0)


def test_waiting_must_save_half_of_the_work():
    sharing = InBatchPrefixSharing([])
    assert sharing.is_worth_waiting(4096, 0, 4160)
    assert not sharing.is_worth_waiting(4096, 4000, 4160)
    assert not sharing.is_worth_waiting(MIN_SHARED_TOKENS, 0, 4 * MIN_SHARED_TOKENS)


def make_loop(overlap, budget=2048, page=PAGE):
    config = SchedulerConfig(
        page_size=page, num_pages=4000, max_running=16, token_budget=budget, max_context=4096, vocab_size=VOCAB, overlap=overlap
    )
    scheduler = assemble_scheduler(
        config, RadixCache(PrefixCacheContext(page, 4096, Lru(EVICTION))), make_allocator(4000), Fcfs(SCHEDULING)
    )
    return LocalLoop(scheduler, FakeRunner(4000, page, 16, 4096 // page, VOCAB))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_common_prefix_is_computed_once(overlap):
    prompts = [[*SHARED, *range(row + 1)] for row in range(8)] + [[7, 8, 9]]
    loop = make_loop(overlap)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    assert loop.generate(prompts, params) == [continuation(prompt, params, 0, VOCAB, 6) for prompt in prompts]
    assert loop.stats["cached"] == 7 * len(SHARED)
    loop.scheduler.check_integrity()


def first_tokens(loop, limit=200):
    """By request, the number of the step that yields its first token."""
    scheduler, by_rid, step = loop.scheduler, {}, 0
    while not scheduler.is_idle and step < limit:
        batch = scheduler.schedule_batch()
        tokens = scheduler.commit(batch, loop.runner.launch(batch).wait())
        scheduler.check_integrity()
        step += 1
        for rid in tokens.rids:
            by_rid.setdefault(rid, step)
    return by_rid


def add(loop, rid, tokens, output=0, max_tokens=8):
    params = SamplingParams(temperature=0.0, max_tokens=output + max_tokens, ignore_eos=True)
    assert loop.scheduler.add_request(Generate(rid=rid, token_ids=[*tokens, *[5] * output], params=params, output_len=output)) is None


def test_recovered_requests_do_not_wait_for_each_other_to_end():
    """The prefill of a recovered request covers its output; the shared prefix is cached when that
    prefill is done."""
    loop = make_loop(False, budget=520)
    for number in range(6):
        add(loop, f"r{number}", [*SHARED, number, 2, 3, 4], output=300, max_tokens=300)
    found = first_tokens(loop)
    assert len(found) == 6
    assert max(found.values()) <= 20


def test_a_new_request_does_not_wait_for_the_end_of_a_preempted_one():
    loop = make_loop(False, budget=512)
    scheduler = loop.scheduler
    add(loop, "old", [*SHARED, 1, 2, 3, 4], max_tokens=1500)
    for _ in range(600):
        batch = scheduler.schedule_batch()
        scheduler.commit(batch, loop.runner.launch(batch).wait())
    scheduler._planner.preempt(scheduler._requests["old"])
    scheduler.flush_cache()
    add(loop, "new", [*SHARED, 9, 8, 7, 6])
    assert first_tokens(loop, limit=20)["new"] <= 6


def test_no_request_waits_for_a_prefill_that_is_long_compared_to_the_shared_prefix():
    loop = make_loop(False, budget=640)
    add(loop, "long", [*SHARED[:300], *[7] * 3700])
    add(loop, "short", SHARED[:310])
    found = first_tokens(loop)
    assert found == {"short": 2, "long": 7}


def test_no_request_waits_for_less_than_a_page():
    loop = make_loop(False, page=1024)
    for number in range(2):
        add(loop, f"r{number}", [*SHARED, number])
    assert first_tokens(loop) == {"r0": 1, "r1": 1}
