"""The runner against the fake model: pages, slots, positions and last tokens decide every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.batch import ScheduledBatch, SelectedTokens, SlotSetup
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.cache_groups import Capacity
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from tests.core.fake_model import FakeAttention, FakeModel, continuation, fake_model_config

VOCAB = 97
CONTEXT = 128


class LocalGroup:
    rank, size = 0, 1

    def all_reduce(self, tensor):
        return tensor

    def all_gather(self, tensor, dim=-1):
        return tensor

    def broadcast(self, tensor, source=0):
        return tensor


def make_runner(page_size=4, slots=8, pages=200, processors=(), vocab=VOCAB, supports_token_selection=True):
    model_config = fake_model_config(vocab, CONTEXT)
    limits = Limits(slots, 512, CONTEXT, page_size)
    context = BuildContext(device=torch.device("cpu"), dtype=torch.float32, tp=LocalGroup(), limits=limits)
    context = BuildContext(device=context.device, dtype=context.dtype, tp=context.tp, limits=limits, attention=FakeAttention(context))
    pool = KVPool(kv_geometry(model_config, 1, page_size, "float32"), pages, context.device)
    model = FakeModel(model_config, context)
    model.supports_token_selection = supports_token_selection
    sampler = Sampler(Processors(processors, slots), TORCH)
    return TorchModelRunner(model, model_config, context, pool, sampler, Capacity(pages, page_size, 12))


class Script:
    """A scheduler's batches by hand: pages in a shuffled order, so that a wrong page shows."""

    def __init__(self, runner, page_size=4, pages=200, seed=0):
        self.runner, self.page_size = runner, page_size
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, pages)))
        self.computed, self.pages, self.step = {}, {}, 0

    def run(self, decodes=(), extends=(), setups=(), released=(), samples=None, **more):
        """decodes: slots; extends: (slot, ids)."""
        rows = [(slot, 1) for slot in decodes] + [(slot, len(ids)) for slot, ids in extends]
        new_pages = []
        for slot, count in rows:
            start = self.computed.setdefault(slot, 0)
            held = self.pages.setdefault(slot, [])
            while len(held) * self.page_size < start + count:
                page = self.free.pop()
                new_pages.append((slot, len(held), page))
                held.append(page)
        batch = ScheduledBatch(
            step=self.step,
            num_decodes=len(decodes),
            slots=np.array([slot for slot, _ in rows], np.int32),
            num_computed=np.array([self.computed[slot] for slot, _ in rows], np.int32),
            num_scheduled=np.array([count for _, count in rows], np.int32),
            token_ids=np.array([i for _, ids in extends for i in ids], np.int32),
            samples=np.array([True] * len(rows) if samples is None else samples),
            new_pages=np.array(new_pages, np.int32).reshape(-1, 3),
            setups=list(setups),
            released=list(released),
            **more,
        )
        self.step += 1
        for slot, count in rows:
            self.computed[slot] += count
        return self.runner.launch(batch).wait()

    def leave(self, slot):
        self.free[:0] = self.pages.pop(slot)
        del self.computed[slot]


def setup(slot, ids, prompt_len=None, seed=0, **params):
    params.setdefault("temperature", 0.0)
    return SlotSetup(slot, SamplingParams(**params), seed, len(ids) if prompt_len is None else prompt_len, np.array(ids, np.int32))


@pytest.mark.parametrize("supports_token_selection", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_mixed_and_chunked_batches_give_the_tokens_of_the_whole_row(page_size, supports_token_selection):
    script = Script(make_runner(page_size, supports_token_selection=supports_token_selection), page_size)
    prompts = {0: [3, 1, 4, 1, 5], 2: [9, 2, 6], 5: list(range(30))}
    outputs = {slot: [] for slot in prompts}
    first = script.run(extends=[(2, prompts[2]), (0, prompts[0])], setups=[setup(s, prompts[s]) for s in (0, 2)])
    for slot, token in zip((2, 0), first.token_ids.tolist(), strict=True):
        outputs[slot].append(token)
    chunks = [prompts[5][:7], prompts[5][7:8], prompts[5][8:30]]
    for n, chunk in enumerate(chunks):
        is_last = n == len(chunks) - 1
        result = script.run(
            decodes=[0, 2],
            extends=[(5, chunk)],
            setups=[setup(5, prompts[5])] if n == 0 else [],
            samples=[True, True, is_last],
        )
        for slot, token in zip((0, 2, 5), result.token_ids.tolist(), strict=False):
            outputs[slot].append(token)
    for order in ([5, 0, 2], [2, 5], [0], [0, 2, 5]):
        result = script.run(decodes=order)
        for slot, token in zip(order, result.token_ids.tolist(), strict=True):
            outputs[slot].append(token)
    for slot, prompt in prompts.items():
        assert outputs[slot] == continuation(prompt, len(outputs[slot]), VOCAB), slot


def test_a_request_comes_back_in_another_slot():
    script = Script(make_runner())
    prompt = [7, 7, 3]
    tokens = [int(script.run(extends=[(1, prompt)], setups=[setup(1, prompt)]).token_ids[0])]
    tokens += [int(script.run(decodes=[1]).token_ids[0]) for _ in range(5)]
    script.leave(1)
    again = prompt + tokens
    script.run(extends=[(1, [1, 2])], setups=[setup(1, [1, 2])], released=[1])
    tokens += script.run(decodes=[1], extends=[(4, again)], setups=[setup(4, again, 3)]).token_ids.tolist()[1:]
    tokens += [int(script.run(decodes=[4, 1]).token_ids[0]) for _ in range(5)]
    assert tokens == continuation(prompt, len(tokens), VOCAB)


@pytest.mark.parametrize("supports_token_selection", [True, False])
def test_an_inner_chunk_yields_nothing_and_needs_no_logits(supports_token_selection):
    script = Script(make_runner(supports_token_selection=supports_token_selection))
    result = script.run(extends=[(0, [1, 2, 3])], setups=[setup(0, [1, 2, 3, 4])], samples=[False])
    assert result.token_ids.shape == (0,)
    assert result.invalid is None
    assert script.run(extends=[(0, [4])]).token_ids.tolist() == continuation([1, 2, 3, 4], 1, VOCAB)


@pytest.mark.parametrize(("length", "samples", "wanted"), [(6, True, [5]), (6, False, []), (1, True, None)])
def test_supports_token_selection_gets_the_tokens_that_need_logits(length, samples, wanted):
    runner = make_runner()
    forward, told = runner.forward, []

    def watched(batch):
        told.append(batch.get(SelectedTokens))
        return forward(batch)

    runner.forward = watched
    ids = list(range(length))
    Script(runner).run(extends=[(0, ids)], setups=[setup(0, [*ids, 7])], samples=[samples])
    assert [None if each is None else each.indices.tolist() for each in told] == [wanted]


def test_one_rank_decides_alone_and_several_together():
    class Others(LocalGroup):
        """A group of two whose other rank gives 0."""

        size = 2

        def all_gather(self, tensor, dim=-1):
            return torch.cat((tensor, torch.zeros_like(tensor)), dim)

    runner = make_runner()
    assert runner.is_true_on_all_ranks(True) and not runner.is_true_on_all_ranks(False)
    runner.context = replace(runner.context, tp=Others())
    assert not runner.is_true_on_all_ranks(True)


def test_broken_logits_are_reported_by_row():
    runner = make_runner()
    logits = runner.model.compute_logits

    def broken(hidden):
        values = logits(hidden)
        values[1, 17] = float("nan")
        values[2, 17] = float("inf")
        values[3] = float("-inf")
        return values

    script = Script(runner)
    prompts = {slot: [slot + 1, 2] for slot in range(4)}
    script.run(extends=list(prompts.items()), setups=[setup(s, p, temperature=float(s == 3)) for s, p in prompts.items()])
    runner.model.compute_logits = broken
    result = script.run(decodes=[0, 1, 2, 3])
    assert result.invalid.tolist() == [False, True, True, True]
    assert result.banned.tolist() == [False, False, False, True]
    assert ((result.token_ids >= 0) & (result.token_ids < VOCAB)).all()
    runner.model.compute_logits = logits
    assert script.run(decodes=[0, 3]).invalid is None


def test_prompt_logprobs_over_chunks_equal_those_of_the_whole_prompt():
    prompt = list(range(5, 25))
    runner = make_runner()

    def scores(chunks):
        script = Script(runner)
        parts, start = [], 0
        for n, size in enumerate(chunks):
            result = script.run(
                extends=[(1, prompt[start : start + size])],
                setups=[setup(1, prompt, prompt_logprobs=2)] if n == 0 else [],
                samples=[start + size == len(prompt)],
                prompt_logprobs=np.array([True]),
            )
            part = result.prompt_logprobs[0]
            assert part.first == start + 1
            parts.append(part)
            start += size
        return [np.concatenate(column) for column in zip(*((p.logprobs, p.top_ids, p.top_logprobs, p.ranks) for p in parts), strict=True)]

    whole, chunked, last = scores([20]), scores([7, 1, 12]), scores([7, 12, 1])  # a step of one token that also samples
    assert whole[0].shape == (19,) and whole[1].shape == (19, 2)
    for a, b, c in zip(whole, chunked, last, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    expected = torch.log_softmax(-torch.arange(VOCAB).float(), -1)  # the fake model's logits, counted from the peak
    distance = [(prompt[p + 1] - continuation(prompt[: p + 1], 1, VOCAB)[0]) % VOCAB for p in range(19)]
    np.testing.assert_allclose(whole[0], expected[distance].numpy(), rtol=1e-5)
    assert whole[3].tolist() == [d + 1 for d in distance]
    assert whole[1][:, 0].tolist() == [continuation(prompt[: p + 1], 1, VOCAB)[0] for p in range(19)]
