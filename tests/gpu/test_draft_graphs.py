"""Device drafters on a GPU, with and without CUDA graphs, and in steps that overlap: the tokens of
a run without drafts, and as many accepted drafts as without graphs. Prints acceptance and steps per
second.

Tokens are compared in float32 with heads; `test_prediction_layer` has latents, of which the float32
kernels take minutes to compile.
"""

from __future__ import annotations

import functools
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.config.schema import FrameConfig
from frame.core.interfaces.drafter import TreeShape
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.checkpoints import make_checkpoint
from frame.testing.drafters import ScriptedTreeDrafter
from frame.testing.local_loop import LocalLoop
from tests.core.test_speculative_equality import make_tree_script

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from tests.kernels.row_moves import *  # noqa: F403
    from tests.kernels.token_ranking import *  # noqa: F403
    from tests.kernels.tree_choice import *  # noqa: F403

ROWS, MAXIMUM = 8, 32
NUMBERS = random.Random(3)
PROMPTS = [[NUMBERS.randrange(6, 384) for _ in range(NUMBERS.randrange(2, 60))] * (1 + row % 3) for row in range(ROWS)]
PARAMS = [SamplingParams(temperature=(0.0, 0.7, 1.0)[row % 3], seed=row, max_tokens=48, ignore_eos=True) for row in range(ROWS)]


@functools.cache
def heads() -> str:
    """A small checkpoint with heads."""
    return str(make_checkpoint("LlamaForCausalLM", Path(tempfile.mkdtemp()), hidden_size=512, num_attention_heads=8, head_dim=64))


def make_loop(algorithm: str | None, maximum: int, dtype: str, *, overlap: bool, tree: TreeShape | None = None, topk: int = 1) -> LocalLoop:
    """tree: of drafts of a host drafter, which the caller sets. topk: branches of a device
    drafter's trees."""
    path = heads() if dtype == "float32" else str(find_model(EMBEDDED))
    config: dict[str, Any] = {
        "model": {"path": path, "dtype": dtype},
        "cache": {"max_total_tokens": 16_384},
        "attention": {"backend": "triton"},
        "scheduler": {"max_running_requests": 16, "chunked_prefill_size": 256, "overlap": overlap},
        "execution": {"device": "cuda", "cuda_graph_max_bs": maximum, "prompt_graph_max_tokens": 0},
        "speculative": {"algorithm": algorithm, "adaptive": False, "draft_model_path": path if algorithm == "draft_model" else None},
    }
    if topk > 1:
        config["plugins"] = {"options": {f"drafter/{algorithm}": {"eagle_topk": topk}}}
    prepared = prepare(FrameConfig.model_validate(config))
    resolved = prepared.resolved.model_copy(update={"tree": tree or prepared.resolved.tree})
    runner = build_rank(resolved, prepared.registry)
    return LocalLoop(build_scheduler(resolved, prepared.registry, runner.capacity.pools), runner)


@functools.cache
def run(algorithm: str | None, maximum: int, dtype: str, *, overlap: bool = True) -> tuple[list[list[int]], list[float]]:
    """The output, and the part of the drafts whose token of each place was accepted."""
    began = time.perf_counter()
    loop = make_loop(algorithm, maximum, dtype, overlap=overlap)
    assert loop.scheduler.config.overlaps_drafts == overlap
    name = f"{algorithm}, {dtype}, graphs {maximum}, overlap {overlap}"
    print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
    outputs = loop.generate(PROMPTS, PARAMS)
    load = loop.scheduler.get_load()
    rates = [count / load["num_drafts"] for count in load["accepted_at"]]
    for streams in (1, ROWS):
        steps, began = loop.stats["steps"], time.perf_counter()
        tokens = sum(map(len, loop.generate(PROMPTS[:streams], PARAMS[:streams])))
        seconds = time.perf_counter() - began
        ms = 1e3 * seconds / (loop.stats["steps"] - steps)
        print(f"{name}, {streams} streams: {tokens / seconds:.0f} tokens/s, {ms:.2f} ms a step", flush=True)
    print(f"  accepted by place: {[round(rate, 2) for rate in rates]}", flush=True)
    loop.scheduler.check_integrity()
    loop.scheduler.flush_cache()
    assert loop.scheduler.get_load()["used_pages"] == 0
    return outputs, rates


CASES = [(0, False), (0, True), (MAXIMUM, False), (MAXIMUM, True)]


@pytest.mark.parametrize(("maximum", "overlap"), CASES)
def test_tokens_are_those_without_drafts(maximum: int, overlap: bool) -> None:
    """The drafts of a model for itself are right but for near ties."""
    expected, (outputs, rates) = run(None, MAXIMUM, "float32")[0], run("draft_model", maximum, "float32", overlap=overlap)
    same = sum(a == b for a, b in zip(expected, outputs, strict=True))
    print(f"graphs {maximum}, overlap {overlap}: {same} of {ROWS} outputs the same", flush=True)
    assert same >= ROWS - 1  # near ties may tip
    assert rates[0] > 0.9 and min(rates) > 0.5


@pytest.mark.parametrize("maximum", [0, 96])
def test_trees_give_the_tokens_without_drafts(maximum: int) -> None:
    """Trees of the coming tokens beside wrong ones, whose keys are moved."""
    expected, shape = run(None, MAXIMUM, "float32")[0], TreeShape(2, 4, 8)
    loop = make_loop("ngram", maximum, "float32", overlap=True, tree=shape)
    loop.scheduler.speculation.enable(ScriptedTreeDrafter(make_tree_script((PROMPTS, PARAMS, expected))), 8, tree=shape)
    outputs, load = loop.generate(PROMPTS, PARAMS), loop.scheduler.get_load()
    same = sum(a == b for a, b in zip(expected, outputs, strict=True))
    print(f"trees, graphs {maximum}: {same} of {ROWS} outputs the same, {load['accepted_tokens']} tokens accepted", flush=True)
    assert same >= ROWS - 1  # near ties may tip
    assert load["accepted_tokens"] > 100
    loop.scheduler.check_integrity()
    loop.scheduler.flush_cache()
    assert loop.scheduler.get_load()["used_pages"] == 0


@pytest.mark.parametrize("maximum", [0, 96])
def test_trees_of_a_draft_model_give_the_tokens_without_drafts(maximum: int) -> None:
    """The target drafts for itself: of most drafts more than one token is accepted."""
    expected, loop = run(None, MAXIMUM, "float32")[0], make_loop("draft_model", maximum, "float32", overlap=True, topk=2)
    outputs, load = loop.generate(PROMPTS, PARAMS), loop.scheduler.get_load()
    same = sum(a == b for a, b in zip(expected, outputs, strict=True))
    accepted = load["accepted_tokens"] / load["num_drafts"]
    print(f"draft model trees, graphs {maximum}: {same} of {ROWS} outputs the same, {accepted:.2f} accepted tokens a draft", flush=True)
    assert same >= ROWS - 1  # near ties may tip
    assert accepted > 1.2


def test_trees_of_a_prediction_layer_in_graphs() -> None:
    """As many tokens a step as without graphs, and more than those of chains."""
    config = {
        "model": {"path": EMBEDDED, "dtype": "bfloat16"},
        "attention": {"backend": "triton"},
        "cache": {"max_total_tokens": 16_384},
        "scheduler": {"max_running_requests": 16},
        "speculative": {"algorithm": "mtp", "adaptive": False},
    }
    found = []
    for maximum, topk in ((96, 1), (0, 2), (96, 2)):
        execution = {"device": "cuda", "cuda_graph_max_bs": maximum, "prompt_graph_max_tokens": 0}
        plugins = {"options": {"drafter/mtp": {"eagle_topk": topk}}}
        prepared = prepare(FrameConfig.model_validate({**config, "execution": execution, "plugins": plugins}))
        runner = build_rank(prepared.resolved, prepared.registry)
        loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
        loop.generate(PROMPTS, PARAMS)
        load = loop.scheduler.get_load()
        found.append(load["accepted_tokens"] / load["num_drafts"])
        print(f"graphs {maximum}, eagle_topk {topk}: {found[-1]:.2f} accepted tokens a draft", flush=True)
        del loop, runner
    assert found[2] > 0.85 * found[1] > 0.85 * found[0]
