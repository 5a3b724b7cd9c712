"""The runner on a GPU: one packed copy a step, steps in flight, and the tokens of the CPU, whatever
the batches look like."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.config.schema import FrameConfig
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.cache_groups import Capacity
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import Sampler
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import assemble_scheduler, build_scheduler
from frame.entrypoints.processes.components import choose_operations
from frame.plugins.devices import open_platform
from frame.plugins.loader import load_registry
from frame.plugins.prefix_caches.none import NoCache
from frame.plugins.scheduling_policies.fcfs import Fcfs
from frame.testing.contexts import SCHEDULING
from frame.testing.local_loop import LocalLoop
from frame.testing.page_allocators import make_allocator
from tests.core.fake_model import FakeAttention, FakeModel, continuation, fake_model_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = 24
NUMBERS = random.Random(0)
PROMPTS = [[NUMBERS.randrange(6, 2000) for _ in range(NUMBERS.randrange(2, 90))] for _ in range(ROWS)]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * ROWS
EVERYTHING = [
    SamplingParams(
        temperature=NUMBERS.choice([0.0, 0.7, 1.3]),
        top_k=NUMBERS.choice([-1, 8, 300]),
        top_p=NUMBERS.choice([1.0, 0.8]),
        min_p=NUMBERS.choice([0.0, 0.01]),
        seed=row,
        max_tokens=NUMBERS.randrange(4, 32),
        ignore_eos=row % 2 == 0,
        min_tokens=3,
        frequency_penalty=NUMBERS.choice([0.0, 0.5]),
        repetition_penalty=NUMBERS.choice([1.0, 1.2]),
        logit_bias={5: 2.0} if row % 5 == 0 else {},
        bad_words_ids=((7,), (300, 4)) if row % 4 == 0 else (),
        logprobs=NUMBERS.choice([None, 3]),
        prompt_logprobs=1 if row % 6 == 0 else None,
    )
    for row in range(ROWS)
]


def make_loop(device, overlap=True, chunk=512, tokens=16_384, dtype="float32"):
    config = {
        "model": {"path": str(find_model(EMBEDDED)), "dtype": dtype},
        "cache": {"page_size": 16, "max_total_tokens": tokens},
        "scheduler": {"max_running_requests": ROWS, "chunked_prefill_size": chunk, "overlap": overlap},
        "execution": {"device": device},
        "attention": {"backend": "torch_native"},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


@pytest.fixture(scope="module", autouse=True)
def _exact_gemms():
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture(scope="module")
def on_cpu():
    loop = make_loop("cpu")
    return [loop.generate(PROMPTS, params) for params in (GREEDY, EVERYTHING)]


@pytest.mark.parametrize(("overlap", "chunk", "tokens"), [(False, 512, 16_384), (True, 512, 16_384), (True, 32, 768)])
def test_tokens_are_those_of_the_cpu(on_cpu, overlap, chunk, tokens):
    loop = make_loop("cuda", overlap, chunk, tokens)
    for expected, params in zip(on_cpu, (GREEDY, EVERYTHING), strict=True):
        outputs = loop.generate(PROMPTS, params)
        same = sum(a == b for a, b in zip(outputs, expected, strict=True))
        assert same >= ROWS - 1  # rounding may tip one choice between two tokens
    loop.scheduler.check_integrity()


def test_no_launch_waits_for_the_device():
    """With a model that does not synchronise, neither builder nor sampler nor processors do, while
    steps are in flight."""
    model_config, device = fake_model_config(97, 256, (3,)), torch.device("cuda")
    limits = Limits(ROWS, 2048, 256, 16)
    context = BuildContext(platform=open_platform("cuda"), device=device, dtype=torch.float32, tp=LocalGroup(), limits=limits)
    context = dataclasses.replace(context, attention=FakeAttention(context))
    registry = load_registry(installed=False)
    built = [registry.load(record)(ProcessorContext(97, ROWS, device)) for record in registry.records("logits_processor")]
    pool = KVPool(kv_geometry(model_config, 1, 16, "float32"), 600, device)
    sampler = Sampler(Processors(built, ROWS), choose_operations(context))
    model = FakeModel(model_config, context)
    runner = TorchModelRunner(model, model_config, context, pool, sampler, Capacity(600, 16, 12))
    config = SchedulerConfig(page_size=16, num_pages=600, max_running=ROWS, token_budget=64, max_context=256, vocab_size=97, overlap=True)
    loop = LocalLoop(assemble_scheduler(config, NoCache(PrefixCacheContext(16, 4096)), make_allocator(600), Fcfs(SCHEDULING)), runner)
    prompts = [[token % 97 for token in prompt] for prompt in PROMPTS]
    params = [msgspec.structs.replace(each, bad_words_ids=((7,), (30, 4)) if each.bad_words_ids else ()) for each in EVERYTHING]
    loop.generate(prompts, params)
    launch = runner.launch

    def watched(batch):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = watched
    loop.generate(prompts, params)
    assert loop.generate(prompts, GREEDY) == [continuation(prompt, 24, 97) for prompt in prompts]


@pytest.mark.alone
def test_most_of_the_memory_is_for_the_cache():
    prepared = prepare(FrameConfig.model_validate({"model": {"path": str(find_model(EMBEDDED))}, "execution": {"device": "cuda"}}))
    runner = build_rank(prepared.resolved, prepared.registry)
    free, total = torch.cuda.mem_get_info()
    assert free / total < 1.05 - prepared.resolved.mem_fraction
    assert runner.capacity.max_total_tokens > 1_000_000
