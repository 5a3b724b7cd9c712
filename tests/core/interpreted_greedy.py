"""Float32 greedy tokens of the `triton` backend equal those of transformers; run by `test_greedy_equality.py` under TRITON_INTERPRET=1.

The interpreter takes a millisecond for each program of a kernel's grid, so these are 4 prompts of 8 tokens where the other backend
has 16 of 64. The same kernels, compiled, are compared on a GPU by tests/gpu.
"""

from __future__ import annotations

import pytest

from tests.core.greedy import FALLBACK, NATIVE, WHOLE, check_logits, greedy, make_case, make_loop, random_prompts, run

GREEDY = greedy(8)
LENGTHS = (35, 2, 20, 27)  # together 84 tokens, with the outputs 116
TIGHT = 96


@pytest.fixture(scope="module", params=(*NATIVE, *FALLBACK))
def case(request, tmp_path_factory):
    return make_case(request.param, tmp_path_factory.mktemp("model"), random_prompts(LENGTHS))


def loop_of(case, tokens=2048, **settings):
    return make_loop(case.folder, tokens, "triton", **settings)


def test_every_architecture(case):
    """Chunks, mixed batches and retraction at once; then radix hits; then logits."""
    loop = loop_of(case, tokens=TIGHT, chunk=16)
    run(loop, case, GREEDY)
    print(loop.stats, loop.scheduler.load())
    assert loop.stats["mixed"] > 1
    assert loop.scheduler.load()["retracted"] > 0
    run(loop, case, GREEDY)
    print(loop.stats, loop.scheduler.load())
    assert loop.stats["cached"] > 0
    check_logits(loop, case, case.prompts[:1], GREEDY)


@pytest.mark.parametrize("case", (*WHOLE, "Gemma2ForCausalLM"), indirect=True)  # latent attention; a sliding window with a soft cap
@pytest.mark.parametrize(("page_size", "chunk", "overlap"), [(1, 64, False), (16, 512, False), (64, 16, True)])
def test_every_way(case, page_size, chunk, overlap):
    run(loop_of(case, page_size=page_size, chunk=chunk, overlap=overlap), case, GREEDY)
