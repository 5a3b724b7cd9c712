"""Float32 greedy tokens of the `triton` backend equal those of transformers; run by
`test_greedy_equality.py` under TRITON_INTERPRET=1.

The interpreter takes milliseconds for each program of a kernel's grid, so these are 4 prompts of 5
tokens, where the other backend has 16 of 32, and of the architectures that differ for the kernels.
With FRAME_GREEDY=whole these are 16 prompts of 64 tokens and all architectures, in minutes for
each. The kernels, compiled, are compared on a GPU by tests/gpu.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.core.greedy import (
    FALLBACK,
    NATIVE,
    NEWER,
    TRANSFORMERS,
    WHOLE,
    check_logits,
    greedy,
    make_case,
    make_loop,
    on_two_ranks,
    random_prompts,
    run,
)

IS_WHOLE = os.environ.get("FRAME_GREEDY") == "whole"
GREEDY = greedy(64 if IS_WHOLE else 5)
LENGTHS = random.Random(7).choices(range(2, 90), k=16) if IS_WHOLE else (8, 3, 30, 12)
TIGHT = 512 if IS_WHOLE else 80  # tokens; the prompts fit, in pages of 16, but not their outputs

DISTINCT = (  # calls of attention that differ for the kernels; the other architectures repeat one of them
    "DeepseekV3ForCausalLM",  # latent attention
    "Gemma3ForCausalLM",  # grouped heads, a window in some layers
    # in `make test`, the backend's conformance suite calls the kernels so
    pytest.param("LlamaForCausalLM", marks=pytest.mark.exhaustive),  # grouped heads
    pytest.param("MistralForCausalLM", marks=pytest.mark.exhaustive),  # a window
    pytest.param("Qwen3ForCausalLM", marks=pytest.mark.exhaustive),  # heads of no power of two
    pytest.param(f"{TRANSFORMERS}Gemma2ForCausalLM", marks=pytest.mark.exhaustive),  # soft caps
    pytest.param(f"{TRANSFORMERS}GPT2LMHeadModel", marks=pytest.mark.exhaustive),  # a head of keys for each of queries
)


@pytest.fixture(scope="module", params=(*NATIVE, *NEWER, *FALLBACK) if IS_WHOLE else DISTINCT)
def case(request, tmp_path_factory):
    return make_case(request.param, tmp_path_factory.mktemp("model"), random_prompts(LENGTHS))


def loop_of(case, tokens=16 * 1024, **settings):
    """The long form also multiplies the experts of one architecture with Triton kernels; this
    takes a second per prompt token."""
    runner = "triton" if IS_WHOLE and case.reference.config.model_type == "qwen3_moe" else "torch_native"
    return make_loop(case.folder, tokens, "triton", moe_runner=runner, implementation=case.implementation, **settings)


def test_every_architecture(case):
    """Chunks, mixed batches and preemption at once; then a radix hit, with its logits."""
    loop = loop_of(case, tokens=TIGHT, chunk=16)
    loop.scheduler._planner._growth_reserve = 1  # the pages that are kept free for outputs would do for ones as short as these
    run(loop, case, GREEDY)
    assert loop.stats["mixed"] > 1
    assert loop.scheduler.get_load()["preempted"] > 0
    max_length = max(case.prompts, key=len)
    loop.generate([max_length], greedy(1))  # other prompts may have taken its pages
    before = loop.stats["cached"]
    check_logits(loop, case, [max_length], GREEDY if IS_WHOLE else greedy(2))
    assert loop.stats["cached"] > before


@pytest.mark.parametrize("case", (*WHOLE, "transformers/Gemma2ForCausalLM"), indirect=True)  # latent; windows with soft caps
@pytest.mark.parametrize(("page_size", "chunk", "overlap"), [(1, 64, False), (64, 16, True)])
def test_every_way(case, page_size, chunk, overlap):
    run(loop_of(case, page_size=page_size, chunk=chunk, overlap=overlap), case, GREEDY)


# experts on two ranks, which no kernel of the backend sees, run with the other
@pytest.mark.parametrize("case", [WHOLE[0], pytest.param(WHOLE[1], marks=pytest.mark.exhaustive)], indirect=True)
def test_two_ranks(case):
    on_two_ranks(case, lambda loop: run(loop, case, GREEDY), "triton", tokens=4096, chunk=16)


@pytest.mark.parametrize("case", ["DeepseekV32ForCausalLM"], indirect=True)
def test_captured_steps_select_keys(case):
    """Decodes from the inputs of captured steps, of rows below and above the number of selected
    keys."""
    loop = loop_of(case, tokens=512)
    loop.runner.capture_decode_graphs(4)
    run(loop, case, GREEDY)
    assert loop.runner.decode_graphs.replayed[0] > 0
