"""Captured steps give the tokens that plain steps give, whatever the batch's size and what its rows
want. On a CPU the captured step is computed anew, from the same fixed inputs;
tests/gpu/test_graphs.py captures it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.core.execution import input_batch
from frame.core.execution.decode_graphs import InputBuffers, list_graph_sizes
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.cache_groups import Capacity
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.platform import HOST, PlatformContext
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import assemble_scheduler, build_scheduler
from frame.models.deepseek_v32 import Indexer
from frame.parallel.tp_follower import LeadingRunner, follow
from frame.plugins.prefix_caches.none import NoCache
from frame.plugins.prefix_caches.radix import RadixCache
from frame.plugins.scheduling_policies.fcfs import Fcfs
from frame.testing.checkpoints import make_checkpoint
from frame.testing.contexts import EVICTION, SCHEDULING
from frame.testing.gemm_kernels import load_own_plugins
from frame.testing.local_loop import LocalLoop
from frame.testing.page_allocators import make_allocator
from frame.testing.scheduler_rig import OldestFirst
from tests.core.fake_model import FakeAttention, FakeModel, continuation, fake_model_config
from tests.core.greedy import Wire
from tests.core.masked_requests import EveryThird, generate_with
from tests.models.ranks import on_ranks
from tests.plugins.fake_platform import FakePlatform
from tests.speculation.test_draft_graphs import CapturableAttention

VOCAB, ROWS, PAGES = 97, 12, 300
CPU = torch.device("cpu")
PROMPTS = [[(7 * row + place) % VOCAB for place in range(1 + row * 3)] for row in range(ROWS)]


@pytest.mark.parametrize("maximum", [1, 3, 8, 31, 64, 200, 256, 1000])
def test_sizes_hold_every_batch_and_waste_little(maximum):
    sizes = list_graph_sizes(maximum)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == maximum and sizes[0] == 1
    for rows in range(5, maximum + 1):
        assert next(size for size in sizes if size >= rows) - rows < max(8, rows / 3 + 1)


def test_inputs_are_padded_and_stay_where_they_are():
    inputs = InputBuffers(8, HOST, {"a": np.int64(-1), "b": np.float32(0.5)})
    addresses = {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()}
    for rows in (5, 2, 8, 1):
        arrays = {"a": np.arange(rows), "b": np.arange(rows, dtype=np.float32)}
        padded = inputs.write(arrays, 8)
        assert inputs.tensors["a"].tolist() == [*range(rows), *[-1] * (8 - rows)] == padded["a"].tolist()
        assert inputs.tensors["b"].tolist() == [*range(rows), *[0.5] * (8 - rows)]
    assert addresses == {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()}


def make_runner(captured, group=None, eos=(), **fields):
    model_config = fake_model_config(VOCAB, 128, eos)
    context = BuildContext(device=CPU, dtype=torch.float32, tp=group or LocalGroup(), limits=Limits(ROWS, 512, 128, 4), **fields)
    context = dataclasses.replace(context, attention=FakeAttention(context))
    registry = load_own_plugins()
    built = [registry.load(record)(ProcessorContext(VOCAB, ROWS, CPU)) for record in registry.records("logits_processor")]
    pool = KVPool(kv_geometry(model_config, 1, 4, "float32"), PAGES, CPU)
    runner = TorchModelRunner(
        FakeModel(model_config, context), model_config, context, pool, Sampler(Processors(built, ROWS), TORCH), Capacity(PAGES, 4, 12)
    )
    if captured:
        runner.capture_decode_graphs(captured, is_dry=True)
        assert runner.decode_graphs is None
        runner.capture_decode_graphs(captured)
    return runner


def make_loop(captured, *, overlap=True, eos=(), cache=None, runner=None):
    config = SchedulerConfig(
        page_size=4, num_pages=PAGES, max_running=ROWS, token_budget=64, max_context=128, vocab_size=VOCAB, overlap=overlap
    )
    scheduler = assemble_scheduler(config, cache or NoCache(PrefixCacheContext(4, 4096)), make_allocator(PAGES), Fcfs(SCHEDULING))
    return LocalLoop(scheduler, runner or make_runner(captured, eos=eos))


@pytest.mark.parametrize("captured", [1, 5, ROWS])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy(captured, overlap):
    loop = make_loop(captured, overlap=overlap)
    params = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * row, ignore_eos=True) for row in range(ROWS)]
    expected = [continuation(prompt, 4 + 3 * row, VOCAB) for row, prompt in enumerate(PROMPTS)]
    assert loop.generate(PROMPTS, params) == expected


@pytest.mark.parametrize("wants", ["temperature", "filters", "everything"])
def test_sampling(wants):
    def params(row):
        more = {"temperature": (0.0, 0.7, 1.5)[row % 3], "seed": row, "max_tokens": 5 + row, "ignore_eos": True}
        if wants != "temperature":
            more |= {"top_k": (-1, 5)[row % 2], "top_p": (1.0, 0.8)[row // 2 % 2], "min_p": (0.0, 0.05)[row // 4 % 2]}
        if wants == "everything":
            more |= {"frequency_penalty": 0.5 * (row % 2), "logprobs": (None, 2)[row % 2], "logit_bias": {3: 4.0} if row % 4 == 0 else {}}
        return SamplingParams(**more)

    each = [params(row) for row in range(ROWS)]
    assert make_loop(ROWS).generate(PROMPTS, each) == make_loop(0).generate(PROMPTS, each)


def watch(loop):
    """(rows, rows that are sampled, rows of prompts) of each replayed step, as they come."""
    steps, replay, first = [], loop.runner.decode_graphs.replay, loop.runner.inputs.table.first_host_token

    def watched(tokens, draws, resolve, **more):
        steps.append((len(tokens.slots), tokens.num_sampling, int((tokens.sources >= first).sum())))
        return replay(tokens, draws, resolve, **more)

    loop.runner.decode_graphs.replay = watched
    return steps


def masked_requests(**more):
    """Parameters, and grammars of three in four rows."""
    each = {"ignore_eos": True, **more}
    params = [SamplingParams(temperature=(0.0, 1.0)[row % 2], seed=row, max_tokens=9 + row, **each) for row in range(ROWS)]
    return PROMPTS, params, [EveryThird(VOCAB, row) if row % 4 else None for row in range(ROWS)]


def watch_masks(runner):
    """The masks under which graphs draw, as they come."""
    masks, draw = [], runner.decode_graphs.draw_masked
    runner.decode_graphs.draw_masked = lambda tokens, draws, mask: masks.append(mask) or draw(tokens, draws, mask)
    return masks


@pytest.mark.parametrize("captured", [5, ROWS])
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"top_k": 5}], ids=str)
def test_a_graph_draws_under_grammar_masks(more, captured):
    """Where its parameters suffice. The masks come after the replay."""
    loop = make_loop(captured)
    masks = watch_masks(loop.runner)
    requests = masked_requests(**more)
    outputs = generate_with(loop, *requests)
    assert outputs == generate_with(make_loop(0), *requests) != loop.generate(*requests[:2])
    for tokens, grammar in zip(outputs, requests[2], strict=True):
        assert grammar is None or all(grammar.allows(token, place) for place, token in enumerate(tokens))
    assert bool(masks) == (not more)
    if masks:
        assert {0 if mask is None else len(mask.rows) for mask in masks} >= {0, 1, 2}


def test_one_of_two_ranks_draws_under_grammar_masks():
    wire, requests = Wire(), masked_requests()

    def act(group):
        runner = make_runner(ROWS, group)
        if group.rank:
            assert not runner.inputs.draws_masked
            return follow(runner, wire)
        masks, loop = watch_masks(runner), make_loop(0, runner=LeadingRunner(runner, wire))
        try:
            return generate_with(loop, *requests), len(masks)
        finally:
            loop.runner.close()

    outputs, num_masks = on_ranks(2, act)[0]
    assert outputs == generate_with(make_loop(0), *requests) and num_masks > 10


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_short_prompts_are_decodes_whose_tokens_are_known(overlap, temperature):
    prompts = [[(11 * row + place) % VOCAB for place in range(1 + 5 * row)] for row in range(10)]
    params = [SamplingParams(temperature=temperature, seed=row, max_tokens=3 + 2 * row, ignore_eos=True) for row in range(10)]
    loop = make_loop(128, overlap=overlap)
    steps = watch(loop)
    assert loop.generate(prompts, params) == make_loop(0, overlap=overlap).generate(prompts, params)
    kinds = {(sampled > 0, sampled < rows, given > 0) for rows, sampled, given in steps}
    assert (True, True, True) in kinds and (True, False, False) in kinds
    assert max(given for *_, given in steps) <= 64


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_is_wholly_cached_is_one_decode(overlap):
    loop = make_loop(8, overlap=overlap, cache=RadixCache(PrefixCacheContext(4, 4096, OldestFirst(EVICTION))))
    prompts = [[(7 * row + place) % VOCAB for place in range(40)] for row in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = [continuation(prompt, 6, VOCAB) for prompt in prompts]
    assert loop.generate(prompts, params) == expected
    steps = watch(loop)
    assert loop.generate([*prompts, prompts[0]], params) == [*expected, expected[0]]
    assert steps[0] == (4, 4, 4)


@pytest.mark.parametrize("shared", [False, True])
def test_prompts_over_many_keys_are_decodes_where_these_are_read_once(monkeypatch, shared):
    monkeypatch.setattr(input_batch, "_MAX_PROMPT_KEYS", 100)
    monkeypatch.setattr(FakeAttention, "capabilities", dataclasses.replace(FakeAttention.capabilities, shared_prefixes=shared))
    loop = make_loop(64)
    steps = watch(loop)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    assert loop.generate([PROMPTS[3], PROMPTS[10]], params) == [continuation(PROMPTS[row], 2, VOCAB) for row in (3, 10)]
    assert any(given for *_, given in steps) == shared


def test_a_chunk_that_is_not_the_last_samples_nothing():
    loop = make_loop(64)
    steps = watch(loop)
    prompt = [place % VOCAB for place in range(100)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert loop.generate([prompt], params) == [continuation(prompt, 4, VOCAB)]
    assert steps[:2] == [(64, 0, 64), (36, 1, 36)]


def test_what_cannot_be_captured_is_said_with_its_remedy(monkeypatch):
    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(FakeAttention, "capture_plan", fails)
    with pytest.raises(ConfigurationError, match=r"\(operation not permitted when stream is capturing\); set --cuda-graph-max-bs 0$"):
        make_loop(ROWS)


class NoWaits(TorchFunctionMode):
    """Fails where an operation would wait for a GPU, or has a result whose shape depends on
    values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name not in {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__index__"}, name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_selected_keys_depend_on_the_lengths_of_the_replay(architecture, tmp_path, monkeypatch):
    """Of 12 selected keys: rows that are shorter, that cross the number, and that are longer."""
    forward = Indexer.forward

    def select(*operands):
        with NoWaits():
            return forward(*operands)

    monkeypatch.setattr(Indexer, "forward", select)
    folder = make_checkpoint(architecture, tmp_path)
    prompts = [[(7 * row + place) % 300 + 6 for place in range(length)] for row, length in enumerate((3, 9, 40, 70))]
    outputs = []
    for maximum in (0, 4):
        config = {
            "model": {"path": str(folder), "dtype": "float32"},
            "cache": {"max_total_tokens": 512},
            "scheduler": {"max_running_requests": 4},
            "attention": {"backend": "capturable"},
            "execution": {"device": "cpu", "threads": 1},
        }
        prepared = prepare(FrameConfig.model_validate(config), classes=[CapturableAttention])
        runner = build_rank(prepared.resolved, prepared.registry)
        if maximum:
            runner.capture_decode_graphs(maximum)
        loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
        steps = watch(loop) if maximum else []
        outputs.append(loop.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    assert outputs[0] == outputs[1]
    assert len(steps) >= 11


class RecordingAttention(CapturableAttention):
    """Keeps the longest row that the host knows of, by window."""

    recorded: ClassVar[set[tuple[int | None, int]]] = set()

    def run(self, spec, q, k, v, batch):
        self.recorded.add((spec.sliding_window, int(batch.host.seq_lens.max())))
        return super().run(spec, q, k, v, batch)


def test_captured_windows_know_the_longest_rows_of_a_replay(tmp_path):
    """By which kernels divide keys among programs."""
    config = {
        "model": {"path": str(make_checkpoint("Gemma3ForCausalLM", tmp_path)), "dtype": "float32"},
        "cache": {"max_total_tokens": 512},
        "attention": {"backend": "capturable"},
        "execution": {"device": "cpu", "threads": 1},
    }
    prepared = prepare(FrameConfig.model_validate(config), classes=[RecordingAttention])
    runner = build_rank(prepared.resolved, prepared.registry)
    RecordingAttention.recorded.clear()
    runner.capture_decode_graphs(2)
    windows, lengths = zip(*RecordingAttention.recorded, strict=True)
    assert len(set(windows)) == 2, "layers with a window and without"
    assert len(set(lengths)) == 1 and lengths[0] >= prepared.resolved.max_context


class LendingPlatform(FakePlatform):
    """Keeps a list of what is borrowed."""

    def borrow(self, tensor):
        self.lent = [*getattr(self, "lent", []), tensor.view_as(tensor)]
        return self.lent[-1]


def test_graphs_do_not_hold_their_logits():
    """So that the graphs of smaller sizes use the memory."""
    platform = LendingPlatform(PlatformContext())
    runner = make_runner(ROWS, platform=platform)
    steps = runner.decode_graphs.steps
    assert len(platform.lent) == len(steps) > 2
    for step, lent in zip(steps, platform.lent[::-1], strict=True):
        assert step.outputs.logits is lent
    loop = make_loop(ROWS, runner=runner)
    params = [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)] * ROWS
    assert loop.generate(PROMPTS, params) == [continuation(prompt, 8, VOCAB) for prompt in PROMPTS]
