"""Float32 greedy tokens of the `triton` backend equal those of transformers; run by `test_greedy_equality.py` under TRITON_INTERPRET=1.

The interpreter takes milliseconds for each program of a kernel's grid, so these are 4 prompts of 6 tokens where the other backend
has 16 of 64; and one rank, as it changes modules while a kernel runs, which two threads cannot share. The kernels, compiled, are
compared on a GPU by tests/gpu.
"""

from __future__ import annotations

import pytest

from tests.core.greedy import FALLBACK, NATIVE, WHOLE, check_logits, greedy, make_case, make_loop, random_prompts, run

GREEDY = greedy(6)
LENGTHS = (8, 3, 30, 12)
TIGHT = 80  # tokens; the prompts fit, in pages of 16, but not their outputs


@pytest.fixture(scope="module", params=(*NATIVE, *FALLBACK))
def case(request, tmp_path_factory):
    return make_case(request.param, tmp_path_factory.mktemp("model"), random_prompts(LENGTHS))


def loop_of(case, tokens=2048, **settings):
    return make_loop(case.folder, tokens, "triton", **settings)


def test_every_architecture(case):
    """Chunks, mixed batches and retraction at once; then a radix hit, with its logits."""
    loop = loop_of(case, tokens=TIGHT, chunk=16)
    loop.scheduler._planner._ahead = 1  # the pages that are kept free for outputs would do for ones as short as these
    run(loop, case, GREEDY)
    assert loop.stats["mixed"] > 1
    assert loop.scheduler.load()["retracted"] > 0
    before = loop.stats["cached"]
    check_logits(loop, case, case.prompts[2:3], GREEDY)
    assert loop.stats["cached"] > before


@pytest.mark.parametrize("case", (*WHOLE, "Gemma2ForCausalLM"), indirect=True)  # latent attention; a sliding window with a soft cap
@pytest.mark.parametrize(("page_size", "chunk", "overlap"), [(1, 64, False), (64, 16, True)])
def test_every_way(case, page_size, chunk, overlap):
    run(loop_of(case, page_size=page_size, chunk=chunk, overlap=overlap), case, GREEDY)
