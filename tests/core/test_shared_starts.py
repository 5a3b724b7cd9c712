"""Prompts that begin alike and arrive together: one computes what they share, the others wait for it and find it cached."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.allocator import PagedAllocator
from frame.core.radix_cache import RadixCache
from frame.core.request import Request
from frame.core.sampling_params import SamplingParams
from frame.core.scheduler import Scheduler, SchedulerConfig
from frame.core.shared_starts import LEAST, SharedStarts, is_worth_waiting
from frame.plugins.eviction_policies.lru import Lru
from frame.plugins.scheduling_policies.fcfs import Fcfs
from frame.testing.fake_runner import FakeRunner, continuation
from frame.testing.local_loop import LocalLoop

VOCAB, PAGE = 97, 4
SHARED = [(3 * place) % VOCAB for place in range(2 * LEAST)]


def request(tokens, namespace=""):
    prompt = np.array(tokens, np.int32)
    made = Request("r", prompt, SamplingParams(), 0, 0, 0.0, 0.0, len(tokens) + 8, namespace=namespace)
    made.tokens = prompt
    return made


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (SHARED, SHARED, len(SHARED)),
        (SHARED, [*SHARED, 1, 2], len(SHARED)),
        ([*SHARED, 5, 6], [*SHARED, 5, 7], len(SHARED) + 1),
        ([*SHARED[:LEAST], 90, 1], [*SHARED[:LEAST], 91, 1], LEAST),
        ([1, *SHARED], SHARED, 0),
        (SHARED[:LEAST], SHARED, 0),
        ([], SHARED, 0),
    ],
)
def test_common_tokens(one, other, shared):
    assert SharedStarts([request(one)]).alike(request(other)) == shared


def test_tenants_share_nothing():
    assert SharedStarts([request(SHARED, "a")]).alike(request(SHARED, "b")) == 0


def test_waiting_must_save_half_of_the_work():
    assert is_worth_waiting(4096, 0, 4160)
    assert not is_worth_waiting(4096, 4000, 4160)
    assert not is_worth_waiting(LEAST, 0, 4 * LEAST)


def make_loop(overlap):
    config = SchedulerConfig(
        page_size=PAGE, num_pages=4000, max_running=16, token_budget=2048, max_context=2048, vocab_size=VOCAB, overlap=overlap
    )
    scheduler = Scheduler(config, RadixCache(PAGE, Lru()), PagedAllocator(4000), Fcfs())
    return LocalLoop(scheduler, FakeRunner(4000, PAGE, 16, 2048 // PAGE, VOCAB))


@pytest.mark.parametrize("overlap", [False, True])
def test_what_prompts_share_is_computed_once(overlap):
    prompts = [[*SHARED, *range(row + 1)] for row in range(8)] + [[7, 8, 9]]
    loop = make_loop(overlap)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    assert loop.generate(prompts, params) == [continuation(prompt, params, 0, VOCAB, 6) for prompt in prompts]
    assert loop.stats["cached"] == 7 * len(SHARED)
    loop.scheduler.check_integrity()
