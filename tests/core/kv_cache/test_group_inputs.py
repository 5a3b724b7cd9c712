"""Scheduler and runner over a model with three cache groups: every token depends on the pages and
the state of each group."""

from __future__ import annotations

import random

import pytest
import torch

from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.cache_groups import Capacity, PagePool
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.forward.declared_caches import model_geometry
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.local_loop import LocalLoop
from frame.testing.page_allocators import make_grouped_allocator
from frame.testing.scheduler_rig import OldestFirst
from tests.core.execution.test_model_runner import LocalGroup
from tests.core.fake_model import FakeAttention, fake_model_config
from tests.core.kv_cache.fake_hybrid import FakeHybrid, continue_hybrid
from tests.core.scheduling.small_rig import policy

VOCAB, CONTEXT, WINDOW, SLOTS = 97, 160, 12, 4


def make_loop(page_size: int, chunk: int, overlap: bool, tokens: int, states: int) -> LocalLoop:
    model_config = fake_model_config(VOCAB, CONTEXT)
    base = BuildContext(device=torch.device("cpu"), dtype=torch.float32, tp=LocalGroup(), limits=Limits(SLOTS, 512, CONTEXT, page_size))
    context = BuildContext(device=base.device, dtype=base.dtype, tp=base.tp, limits=base.limits, attention=FakeAttention(base))
    model = FakeHybrid(VOCAB, WINDOW)
    geometry = model_geometry(model, kv_geometry(model_config, 1, page_size, "float32"))
    pages, size = tokens // page_size + 1, (2 * WINDOW + chunk + SLOTS * WINDOW + tokens // 2) // page_size + 6
    pools = (PagePool("tokens", pages, page_size), PagePool("window", size, page_size, WINDOW), PagePool("snapshot", states, 0))
    pool = KVPool(geometry, [each.num_pages for each in pools], base.device)
    sampler = Sampler(Processors((), SLOTS), TORCH)
    runner = TorchModelRunner(model, model_config, context, pool, sampler, Capacity(pages, page_size, 8, {}, pools[1:]))
    runner.warm_up()
    if overlap:
        runner.capture_decode_graphs(SLOTS)  # on a CPU, a step is computed again from the graph's inputs
    config = SchedulerConfig(
        page_size=page_size,
        num_pages=pages,
        max_running=SLOTS,
        token_budget=chunk,
        max_context=CONTEXT,
        vocab_size=VOCAB,
        overlap=overlap,
        growth_reserve=0,
    )
    cache = RadixCache(PrefixCacheContext(page_size, pages, OldestFirst(), pools))
    return LocalLoop(assemble_scheduler(config, cache, make_grouped_allocator(pools), policy()), runner)


def check(loop: LocalLoop, prompts: list[list[int]], count: int) -> int:
    """Generate, and compare with a run without a cache. -> cached tokens of these prompts."""
    before = loop.stats["cached"]
    outputs = loop.generate(prompts, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
    assert outputs == [continue_hybrid(prompt, count, VOCAB, WINDOW) for prompt in prompts]
    loop.scheduler.check_integrity()
    return loop.stats["cached"] - before


def make_prompts(seed: int, count: int = 6) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(VOCAB) for _ in range(numbers.randrange(1, 60))] for _ in range(count)]


@pytest.mark.parametrize(("page_size", "chunk", "overlap"), [(1, 16, False), (4, 7, True), (16, 33, True)])
@pytest.mark.parametrize("tokens", [112, 2048])
def test_tokens_are_those_of_a_run_without_a_cache(page_size: int, chunk: int, overlap: bool, tokens: int) -> None:
    loop, prompts = make_loop(page_size, chunk, overlap, tokens, states=9 if tokens < 1000 else 99), make_prompts(page_size + chunk)
    check(loop, prompts, 24)
    check(loop, prompts, 24)  # hits where a state was kept, and states at the ends of what was cached
    cached = check(loop, [*prompts, *([*prompt[: len(prompt) // 2], 1, 2] for prompt in prompts)], 24)
    if tokens == 2048:
        assert cached >= sum((len(prompt) - 1) // page_size * page_size for prompt in prompts) // 2
    else:
        assert loop.scheduler.get_load()["preempted"] > 0


def test_a_conversation_reuses_its_states() -> None:
    loop, turn, cached, total = make_loop(4, 64, True, 2048, 33), make_prompts(3)[1][:20], 0, 0
    for _ in range(4):
        cached, total = cached + check(loop, [turn], 20), total + len(turn)
        turn = [*turn, *continue_hybrid(turn, 20, VOCAB, WINDOW), 1, 2, 3]
    assert cached >= total // 3
