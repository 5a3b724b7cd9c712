"""The runner on a GPU: one packed copy a step, steps in flight, and the tokens of the CPU, whatever the batches look like."""

from __future__ import annotations

import random

import pytest
import torch

from frame.core.config import FrameConfig
from frame.core.model_facts import EMBEDDED, find_model
from frame.core.sampling_params import SamplingParams
from frame.entrypoints.assembly import build_rank, build_scheduler
from frame.entrypoints.prepare import prepare
from frame.testing.local_loop import LocalLoop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = 24
NUMBERS = random.Random(0)
PROMPTS = [[NUMBERS.randrange(6, 2000) for _ in range(NUMBERS.randrange(2, 90))] for _ in range(ROWS)]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)] * ROWS
EVERYTHING = [
    SamplingParams(
        temperature=NUMBERS.choice([0.0, 0.7, 1.3]),
        top_k=NUMBERS.choice([-1, 8, 300]),
        top_p=NUMBERS.choice([1.0, 0.8]),
        min_p=NUMBERS.choice([0.0, 0.01]),
        seed=row,
        max_tokens=NUMBERS.randrange(4, 48),
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
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.num_pages), runner)


@pytest.fixture(scope="module", autouse=True)
def _exact_products():
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


def test_a_launch_does_not_wait_for_the_device():
    loop = make_loop("cuda")
    loop.generate(PROMPTS, GREEDY)
    launch, pending = loop.runner.launch, []

    def watched(batch):
        with torch.cuda.stream(loop.runner._stream):
            torch.cuda._sleep(40_000_000)  # some 20 ms of work that is queued before the step
        step = launch(batch)
        pending.append(step._event.query())
        return step

    loop.runner.launch = watched
    loop.generate(PROMPTS[:4], GREEDY[:4])
    assert len(pending) > 40
    assert not any(pending)


def test_most_of_the_memory_is_for_the_cache():
    prepared = prepare(FrameConfig.model_validate({"model": {"path": str(find_model(EMBEDDED))}, "execution": {"device": "cuda"}}))
    runner = build_rank(prepared.resolved, prepared.registry)
    free, total = torch.cuda.mem_get_info()
    assert free / total < 1.05 - prepared.resolved.mem_fraction
    assert runner.capacity.max_total_tokens > 1_000_000
