"""Float32 greedy tokens equal those of transformers, however the batches came about: chunks, cache
hits, preemption, pages, overlap.

transformers says which tokens are right (one pass over prompt and output: each output token is the
likeliest after what stands before it); everything runs in this process, scheduler and runner
without a server. Two ranks are two threads. Only the Triton kernels' interpreter needs a process of
its own, which runs `interpreted_greedy.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from tests.core import greedy
from tests.core.greedy import FALLBACK, NATIVE, NEWER, WHOLE, check_logits, make_case, on_two_ranks, random_prompts
from tests.interpreter import needs_triton, run_interpreted

PROMPTS = 16
GREEDY = greedy.greedy(20)
INTERPRETED = Path(__file__).with_name("interpreted_greedy.py")
POOL = 16 * 1024  # tokens; more than all prompts and outputs
TIGHT = 320  # tokens; about a quarter of them


DRAWN = ("NemotronForCausalLM", "Jais2ForCausalLM", "ApertusForCausalLM", "Ernie4_5ForCausalLM")
EVERY_FORM = (*WHOLE, "MistralForCausalLM", *FALLBACK[:1], *FALLBACK[-1:])  # latent; windows; transformers' layers
IN_SOAK = (*(name for name in NATIVE if name not in EVERY_FORM), *NEWER)  # of which each run has the forms at once
SOAKED = tuple(pytest.param(name, marks=pytest.mark.soak) for name in IN_SOAK)
SOAKED_FALLBACK = tuple(pytest.param(name, marks=pytest.mark.soak) for name in FALLBACK[1:-1])


@pytest.fixture(scope="module", params=(*EVERY_FORM, *SOAKED, *SOAKED_FALLBACK))
def case(request, tmp_path_factory):
    numbers = random.Random(7)
    prompts = random_prompts([numbers.randrange(2, 90) for _ in range(PROMPTS)])
    return make_case(request.param, tmp_path_factory.mktemp("model"), prompts)


def make_loop(case, tokens=POOL, **settings):
    loop = greedy.make_loop(case.folder, tokens, implementation=case.implementation, **settings)
    return preempting(loop) if tokens == TIGHT else loop


def preempting(loop):
    """Keep no pages free for the outputs of running requests: they would do for ones as short as
    these."""
    loop.scheduler._planner._growth_reserve = 1
    return loop


def run(loop, case):
    greedy.run(loop, case, GREEDY)


def is_recurrent(case):
    """Whether a hit ends at a stored state, of which a prompt shorter than a chunk has none."""
    kinds = getattr(case.reference.config, "layer_types", None) or ()
    return not {"linear_attention", "hybrid"}.isdisjoint(kinds)


def count_whole_pages(case):
    """Tokens of the prompts' whole pages but the last token, which is always computed."""
    return sum((len(prompt) - 1) // 16 * 16 for prompt in case.prompts)


def test_plain_and_from_the_prefix_cache(case):
    loop = make_loop(case)
    run(loop, case)
    assert loop.stats["cached"] == 0
    run(loop, case)  # now every prompt's whole pages are cached
    assert loop.stats["cached"] >= (0 if is_recurrent(case) else count_whole_pages(case))


def test_fully_cached_prompts(case):
    whole = dataclasses.replace(case, prompts=[prompt[: len(prompt) // 16 * 16] for prompt in case.prompts if len(prompt) >= 16][:5])
    loop = make_loop(case)
    for _ in range(2):
        greedy.run(loop, whole, greedy.greedy(5))
    assert is_recurrent(case) or loop.stats["cached"] == sum(len(prompt) - 1 for prompt in whole.prompts)


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunked_and_mixed(case, chunk):
    loop = make_loop(case, chunk=chunk)
    run(loop, case)
    assert loop.stats["mixed"] > 5


def test_after_forced_preemption(case):
    loop = make_loop(case, tokens=TIGHT, chunk=64)
    run(loop, case)
    assert loop.scheduler.get_load()["preempted"] > 0


@pytest.mark.parametrize(("page_size", "overlap"), [(1, False), (64, True)])
def test_page_sizes(case, page_size, overlap):
    run(make_loop(case, page_size=page_size, overlap=overlap), case)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", (*IN_SOAK, *FALLBACK[1:-1]))
def test_forms_at_once(architecture, tmp_path):
    """Chunks, mixed batches and preemption at once, then a radix hit, of few prompts; every form
    runs in `soak`."""
    case = make_case(architecture, tmp_path, random_prompts((41, 7, 30, 58)))
    loop = make_loop(case, tokens=152, chunk=16, page_size=4)
    greedy.run(preempting(loop), case, greedy.greedy(16))
    assert loop.stats["mixed"] > 2
    assert loop.scheduler.get_load()["preempted"] > 0
    before = loop.stats["cached"]
    greedy.run(loop, dataclasses.replace(case, prompts=case.prompts[-1:]), greedy.greedy(16))
    assert loop.stats["cached"] > before


def combinations():
    """Page size x chunk x overlap x pool, with the prefix cache in every other one. Nine of them
    contain each pair of values; the others run in `soak`."""
    for indices in itertools.product(range(3), range(3), range(2), range(2)):
        size, chunk, overlap, pool = indices
        settings = ((1, 16, 64)[size], (16, 64, 512)[chunk], bool(overlap), (POOL, TIGHT)[pool], ("radix", "none")[(overlap + pool) % 2])
        yield pytest.param(settings, marks=[pytest.mark.soak] * ((sum(indices) + overlap) % 4 > 0), id="-".join(map(str, settings)))


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE, indirect=True)
@pytest.mark.parametrize("settings", combinations())
def test_everything_together(case, settings):
    page_size, chunk, overlap, tokens, prefix = settings
    loop = make_loop(case, page_size=page_size, chunk=chunk, overlap=overlap, tokens=tokens, prefix=prefix)
    run(loop, case)
    if tokens == TIGHT:
        assert loop.scheduler.get_load()["preempted"] > 0


def test_logits_are_within_a_ten_thousandth(case):
    check_logits(make_loop(case, chunk=32), case, case.prompts[:4], GREEDY)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", DRAWN)
def test_models_drawn_from_transformers_on_two_ranks(architecture, tmp_path):
    """Models that are not native, drawn at random from the installed transformers; those of the
    draw that the fallback refuses are left out."""
    case = make_case(f"{greedy.TRANSFORMERS}{architecture}", tmp_path, random_prompts((41, 7, 30, 58)))

    def twice(loop):
        greedy.run(loop, case, greedy.greedy(64))
        greedy.run(loop, case, greedy.greedy(64))
        assert loop.stats["cached"] > 0

    on_two_ranks(case, twice, chunk=16, tokens=2048, page_size=4, implementation="transformers")


@pytest.mark.parametrize("case", (*EVERY_FORM[:3], *SOAKED), indirect=True)  # transformers' own layers are not cut between ranks
def test_two_ranks_mixed_and_from_the_prefix_cache(case):
    def twice(loop):
        run(loop, case)
        assert loop.stats["mixed"] > 5
        run(loop, case)
        assert loop.stats["cached"] >= (1 if is_recurrent(case) else count_whole_pages(case))

    on_two_ranks(case, twice, chunk=64, tokens=POOL)


@pytest.mark.slow
@pytest.mark.parametrize("case", (*EVERY_FORM[:3], *SOAKED), indirect=True)
def test_two_ranks_after_preemption_without_overlap(case):
    def once(loop):
        run(preempting(loop), case)
        assert loop.scheduler.get_load()["preempted"] > 0

    on_two_ranks(case, once, page_size=1, chunk=16, overlap=False, tokens=TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE, indirect=True)
def test_two_ranks_draw_the_tokens_of_one(case):
    drawn = [SamplingParams(temperature=1.0, max_tokens=16, seed=seed, top_p=0.9, ignore_eos=True) for seed in range(PROMPTS)]
    two = on_two_ranks(case, lambda loop: loop.generate(case.prompts, drawn), chunk=64, tokens=TIGHT)
    assert two == make_loop(case, chunk=64).generate(case.prompts, drawn)


@pytest.mark.slow
@needs_triton
@pytest.mark.timeout(900)  # most of a minute of CPU, which a busy machine stretches
def test_triton_under_its_interpreter():
    assert "skipped" not in run_interpreted(str(INTERPRETED), limit=880)


@pytest.mark.exhaustive  # the test above runs the architectures that the backend's conformance suite does not stand for
@needs_triton
@pytest.mark.timeout(900)
def test_triton_under_its_interpreter_further():
    assert "skipped" not in run_interpreted(str(INTERPRETED), "-m", "exhaustive", limit=880)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", (*NATIVE, *NEWER, *FALLBACK))
def test_triton_under_its_interpreter_whole(architecture):
    """16 prompts of 64 tokens."""
    name = f"{INTERPRETED}::test_every_architecture[{architecture}]"
    assert "skipped" not in run_interpreted(name, limit=None, FRAME_GREEDY="whole")
