"""Steps as CUDA graphs: the tokens of plain steps, for every backend that can be captured."""

from __future__ import annotations

import random

import pytest
import torch

from frame.core.config import FrameConfig
from frame.core.model_facts import EMBEDDED, find_model
from frame.core.sampling_params import SamplingParams
from frame.entrypoints.assembly import build_rank, build_scheduler
from frame.entrypoints.prepare import prepare
from frame.plugins.loader import load_registry
from frame.testing.local_loop import LocalLoop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS, MOST = 24, 96
NUMBERS = random.Random(1)
PROMPTS = [[NUMBERS.randrange(6, 2000) for _ in range(NUMBERS.randrange(2, 90))] for _ in range(ROWS)]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=8 + 2 * row, ignore_eos=True) for row in range(ROWS)]
DRAWN = [
    SamplingParams(
        temperature=(0.0, 0.8)[row % 2],
        top_p=(1.0, 0.9)[row // 2 % 2],
        logprobs=(None, 2)[row // 4 % 2],
        frequency_penalty=0.3 * (row // 8 % 2),
        seed=row,
        max_tokens=8 + 2 * row,
        ignore_eos=True,
    )
    for row in range(ROWS)
]
CAPTURABLE = [record.name for record in load_registry().records("attention_backend") if record.capabilities.graphs != "none"]


def make_loop(backend, most, most_tokens=0, chunk=512, dtype="bfloat16"):
    config = {
        "model": {"path": str(find_model(EMBEDDED)), "dtype": dtype},
        "cache": {"max_total_tokens": 16_384},
        "scheduler": {"max_running_requests": MOST, "chunked_prefill_size": chunk},
        "execution": {"device": "cuda", "cuda_graph_max_bs": most, "prompt_graph_max_tokens": most_tokens},
        "attention": {"backend": backend},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    assert (runner.graphs is not None) == bool(most)
    assert (runner.prompt_graphs is not None) == bool(most_tokens)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.num_pages), runner)


@pytest.mark.parametrize(
    ("most_tokens", "chunk", "dtype"),
    [(0, 512, "bfloat16"), (64, 512, "bfloat16"), (512, 512, "float32"), (0, 48, "float32"), (0, 48, "bfloat16")],
)
@pytest.mark.parametrize("backend", CAPTURABLE)
def test_tokens_are_those_of_plain_steps(backend, most_tokens, chunk, dtype):
    try:
        plain = make_loop(backend, 0, dtype=dtype)
    except Exception as error:
        pytest.skip(f"this card or model is not for it: {error}")
    captured = make_loop(backend, ROWS if chunk > MOST else MOST, most_tokens, chunk, dtype)
    for params in (GREEDY, DRAWN):
        same = sum(a == b for a, b in zip(plain.generate(PROMPTS, params), captured.generate(PROMPTS, params), strict=True))
        print(f"{backend}, {dtype}, pieces of {most_tokens}, chunks of {chunk}: {same} of {ROWS} rows the same")
        # in bf16 near ties may tip, more of them where prompts are computed by other kernels
        assert same >= (ROWS - 2 if dtype == "float32" else ROWS * 2 // 3 if chunk > MOST else ROWS // 3)
    captured.scheduler.check_integrity()


@pytest.mark.parametrize("most_tokens", [0, 512])
@pytest.mark.parametrize("backend", CAPTURABLE)
def test_prompts_after_a_cached_prefix(backend, most_tokens):
    """Of up to 64 tokens they are decodes, of more they run in pieces."""
    begin = [NUMBERS.randrange(6, 2000) for _ in range(800)]
    tails = [[NUMBERS.randrange(6, 2000) for _ in range(length)] for length in (1, 7, 16, 40, 64, 100, 200, 300)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    try:
        plain = make_loop(backend, 0)
    except Exception as error:
        pytest.skip(f"this card or model is not for it: {error}")
    outputs = []
    for loop in (plain, make_loop(backend, MOST, most_tokens)):
        loop.generate([begin], params)
        outputs.append([loop.generate([begin + tail], params) for tail in tails])
        loop.scheduler.check_integrity()
    assert sum(a == b for a, b in zip(*outputs, strict=True)) >= len(tails) - 2
