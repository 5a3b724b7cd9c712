"""Float32 greedy tokens equal those of transformers, however the batches came about: chunks, cache hits, retraction, pages, overlap.

transformers says which tokens are right (one pass over prompt and output: each output token is the likeliest after what stands
before it); everything runs in this process, scheduler and runner without a server. Two ranks are two threads.
"""

from __future__ import annotations

import itertools
import queue
import random
from dataclasses import dataclass, field

import pytest
import torch

from frame.core.config import FrameConfig
from frame.core.follower import LeadingRunner, follow
from frame.core.model_facts import EMBEDDED, find_model
from frame.core.model_runner import build_runner
from frame.core.sampling_params import SamplingParams
from frame.core.transport import decode_batch, encode_batch
from frame.entrypoints.assembly import build_rank, build_scheduler, load_parts
from frame.entrypoints.prepare import prepare
from frame.testing.checkpoints import load_reference, make_checkpoint
from frame.testing.local_loop import LocalLoop
from tests.models.ranks import on_ranks

PROMPTS, OUTPUT = 16, 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
WHOLE = ("LlamaForCausalLM", "DeepseekV3ForCausalLM")  # run the full cross product
ARCHITECTURES = (
    *WHOLE,
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    EMBEDDED,
)
POOL = 16 * 1024  # tokens; more than all prompts and outputs
TIGHT = 512  # tokens; about a third of them


@dataclass(frozen=True)
class Case:
    """A checkpoint and what transformers makes of it."""

    folder: str
    prompts: list[list[int]]
    reference: object
    known: dict = field(default_factory=dict)  # (prompt, output) -> the likeliest tokens after each prefix

    def check(self, outputs):
        for prompt, output in zip(self.prompts, outputs, strict=True):
            key = (tuple(prompt), tuple(output))
            if key not in self.known:
                self.known[key] = self.logits(prompt, output).argmax(-1).tolist()
            assert output == self.known[key]

    def logits(self, prompt, output):
        """What transformers computes at each output token's place, [OUTPUT, vocab]."""
        with torch.no_grad():
            return self.reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request, tmp_path_factory):
    if request.param == EMBEDDED:
        folder = find_model(EMBEDDED)
    else:
        folder = make_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    numbers = random.Random(7)
    prompts = [[numbers.randrange(6, 384) for _ in range(numbers.randrange(2, 90))] for _ in range(PROMPTS)]
    return Case(str(folder), prompts, load_reference(folder))


def prepared_for(folder, page_size=16, chunk=512, overlap=True, tokens=POOL, prefix="radix", tp=1):
    config = {
        "model": {"path": folder, "dtype": "float32"},
        "cache": {"page_size": page_size, "max_total_tokens": tokens, "prefix": prefix},
        "scheduler": {"max_running_requests": PROMPTS, "chunked_prefill_size": chunk, "overlap": overlap},
        "execution": {"device": "cpu", "threads": 1},
        "parallel": {"tp": tp},
    }
    return prepare(FrameConfig.model_validate(config))


def make_loop(folder, **settings):
    prepared = prepared_for(folder, **settings)
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.num_pages), runner)


def run(loop, case):
    case.check(loop.generate(case.prompts, GREEDY))
    loop.scheduler.check_integrity()


def test_plain_and_from_the_prefix_cache(case):
    loop = make_loop(case.folder)
    run(loop, case)
    assert loop.stats["cached"] == 0
    run(loop, case)  # now every prompt's whole pages are cached
    assert loop.stats["cached"] >= sum((len(prompt) - 1) // 16 * 16 for prompt in case.prompts)


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunked_and_mixed(case, chunk):
    loop = make_loop(case.folder, chunk=chunk)
    run(loop, case)
    assert loop.stats["mixed"] > 5


def test_after_forced_retraction(case):
    loop = make_loop(case.folder, tokens=TIGHT, chunk=64)
    run(loop, case)
    assert loop.scheduler.load()["retracted"] > 0


@pytest.mark.parametrize(("page_size", "overlap"), [(1, False), (64, True)])
def test_page_sizes(case, page_size, overlap):
    run(make_loop(case.folder, page_size=page_size, overlap=overlap), case)


# page size x chunk x overlap x pool, with the prefix cache on in every other one
EVERYTHING = list(itertools.product((1, 16, 64), (16, 64, 512), (False, True), (POOL, TIGHT)))


@pytest.mark.parametrize("case", WHOLE, indirect=True)
@pytest.mark.parametrize(("number", "settings"), list(enumerate(EVERYTHING)), ids=str)
def test_everything_together(case, number, settings):
    page_size, chunk, overlap, tokens = settings
    prefix = ("radix", "none")[(number // 2 + number) % 2]
    loop = make_loop(case.folder, page_size=page_size, chunk=chunk, overlap=overlap, tokens=tokens, prefix=prefix)
    run(loop, case)
    if tokens == TIGHT:
        assert loop.scheduler.load()["retracted"] > 0


def test_logits_are_within_a_ten_thousandth(case):
    loop = make_loop(case.folder, chunk=32)
    head, seen = loop.runner.model.logits, []

    def watched(hidden):
        seen.append(head(hidden))
        return seen[-1].clone()

    loop.runner.model.logits = watched
    for prompt in case.prompts[:4]:
        seen.clear()
        (output,) = loop.generate([prompt], GREEDY)
        ours = torch.cat([logits for logits in seen if len(logits)])[:OUTPUT]
        assert (ours - case.logits(prompt, output)).abs().max() < 1e-4


class Wire:
    """What carries batches from rank 0 to rank 1 here: a queue of encoded bytes."""

    def __init__(self):
        self.batches = queue.Queue()

    def send(self, batch):
        self.batches.put(encode_batch(batch))

    def receive(self):
        data = self.batches.get(timeout=60)
        return None if data is None else decode_batch(data)

    def close(self):
        self.batches.put(None)


@pytest.mark.parametrize("case", WHOLE, indirect=True)
def test_two_ranks_give_the_tokens_of_one(case):
    prepared = prepared_for(case.folder, chunk=64, tokens=TIGHT, tp=2)
    wire = Wire()
    drawn = [SamplingParams(temperature=1.0, max_tokens=16, seed=seed, top_p=0.9, ignore_eos=True) for seed in range(PROMPTS)]

    def act(group):
        runner = build_runner(prepared.resolved, load_parts(prepared.resolved, prepared.registry), group)
        if group.rank:
            return follow(runner, wire)
        loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.num_pages), LeadingRunner(runner, wire))
        try:
            run(loop, case)
            return loop.generate(case.prompts, drawn)
        finally:
            loop.runner.close()

    alone = make_loop(case.folder, chunk=64)
    assert on_ranks(2, act)[0] == alone.generate(case.prompts, drawn)
