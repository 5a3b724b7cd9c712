"""Device drafters on a GPU, with and without CUDA graphs: the tokens of a run without drafts, and
as many accepted drafts as without graphs. Prints acceptance and steps per second."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import pytest
import torch

from frame.core.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.loading.model_config import EMBEDDED, find_model
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FOLDER, ROWS = str(find_model(EMBEDDED)), 8
NUMBERS = random.Random(3)
PROMPTS = [[NUMBERS.randrange(6, 384) for _ in range(NUMBERS.randrange(2, 60))] * (1 + row % 3) for row in range(ROWS)]
PARAMS = [SamplingParams(temperature=(0.0, 0.7, 1.0)[row % 3], seed=row, max_tokens=48, ignore_eos=True) for row in range(ROWS)]


def make_loop(algorithm: str | None, most: int, dtype: str) -> LocalLoop:
    config: dict[str, Any] = {
        "model": {"path": FOLDER, "dtype": dtype},
        "cache": {"max_total_tokens": 16_384},
        "scheduler": {"max_running_requests": 16, "chunked_prefill_size": 256},
        "execution": {"device": "cuda", "cuda_graph_max_bs": most, "prompt_graph_max_tokens": 0},
        "speculative": {"algorithm": algorithm, "adaptive": False, "draft_model_path": FOLDER if algorithm == "draft_model" else None},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


@functools.cache
def run(algorithm: str | None, most: int, dtype: str) -> tuple[list[list[int]], list[float]]:
    """The output, and the part of the drafts whose token of each place was accepted."""
    loop = make_loop(algorithm, most, dtype)
    outputs = loop.generate(PROMPTS, PARAMS)
    load = loop.scheduler.get_load()
    rates = [count / load["num_drafts"] for count in load["accepted_at"]]
    for streams in (1, ROWS):
        steps, began = loop.stats["steps"], time.perf_counter()
        tokens = sum(map(len, loop.generate(PROMPTS[:streams], PARAMS[:streams])))
        seconds = time.perf_counter() - began
        ms = 1e3 * seconds / (loop.stats["steps"] - steps)
        print(f"{algorithm}, {dtype}, graphs {most}, {streams} streams: {tokens / seconds:.0f} tokens/s, {ms:.2f} ms a step", flush=True)
    print(f"  accepted by place: {[round(rate, 2) for rate in rates]}", flush=True)
    loop.scheduler.check_integrity()
    loop.scheduler.flush_cache()
    assert loop.scheduler.get_load()["used_pages"] == 0
    return outputs, rates


@pytest.mark.parametrize("most", [0, 64])
@pytest.mark.parametrize("algorithm", ["mtp", "draft_model"])
def test_tokens_are_those_without_drafts(algorithm: str, most: int) -> None:
    expected, outputs = run(None, 64, "float32")[0], run(algorithm, most, "float32")[0]
    same = sum(a == b for a, b in zip(expected, outputs, strict=True))
    print(f"{algorithm}, graphs {most}: {same} of {ROWS} outputs the same", flush=True)
    assert same >= ROWS - 1  # near ties may tip


@pytest.mark.parametrize("algorithm", ["mtp", "draft_model"])
def test_graphs_draft_as_well(algorithm: str) -> None:
    plain, captured = (run(algorithm, most, "float32")[1] for most in (0, 64))
    assert all(abs(a - b) < 0.08 for a, b in zip(plain, captured, strict=True))
    assert plain[0] > (0.9 if algorithm == "draft_model" else 0.4)


def test_bfloat16() -> None:
    run(None, 64, "bfloat16")
    assert run("mtp", 64, "bfloat16")[1][0] > 0.4
