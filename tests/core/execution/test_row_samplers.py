"""Samplers that draw by row, within a runner: what they are told of slots, in every way that a step
may be computed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.cache_groups import Capacity
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from frame.interfaces.sampler import RowSampler, SamplerContext, SupportsSlots
from frame.testing.gemm_kernels import load_own_plugins
from tests.core.execution.test_decode_graphs import CPU, PAGES, PROMPTS, ROWS, VOCAB, make_loop
from tests.core.fake_model import FakeAttention, FakeModel, fake_model_config


class Counter(RowSampler, SupportsSlots):
    """Draws the number of the sequence's tokens, which it counts by slot."""

    def __init__(self, context: SamplerContext, options=None):
        super().__init__(context, options)
        self.counts = torch.zeros(context.num_slots, dtype=torch.int64)

    def validate_params(self, params):
        if params.custom.get("bad") == "value":
            raise ValueError("custom['bad'] is 'value'")

    def add_slot(self, setup):
        if setup.params.custom.get("bad") == "fault":
            raise RuntimeError("boom")
        self.counts[setup.slot] = len(setup.token_ids)

    def remove_slot(self, slot):
        self.counts[slot] = -1000

    def draw_tokens(self, logits, params, slots):
        assert (("top_k" in params) == ("top_p" in params)) and len(params["key"]) == len(slots) == len(logits)
        return self.counts[slots] % VOCAB

    def observe_tokens(self, slots, token_ids):
        assert len(slots) == len(slots.unique()) and torch.equal(self.counts[slots] % VOCAB, token_ids)
        self.counts[slots] += 1


def make_counting_loop(captured, *, in_graphs=True, overlap=True):
    model_config = fake_model_config(VOCAB, 128, ())
    context = BuildContext(device=CPU, dtype=torch.float32, tp=LocalGroup(), limits=Limits(ROWS, 512, 128, 4))
    context = dataclasses.replace(context, attention=FakeAttention(context))
    registry = load_own_plugins()
    built = [registry.load(record)(ProcessorContext(VOCAB, ROWS, CPU)) for record in registry.records("logits_processor")]
    plugin = Counter(SamplerContext(VOCAB, ROWS + 1, CPU, TORCH, TORCH))
    sampler = Sampler(Processors(built, ROWS, plugin), plugin.make_operations() if in_graphs else TORCH, plugin, in_graphs=in_graphs)
    pool = KVPool(kv_geometry(model_config, 1, 4, "float32"), PAGES, CPU)
    runner = TorchModelRunner(FakeModel(model_config, context), model_config, context, pool, sampler, Capacity(PAGES, 4, 12))
    if captured:
        runner.capture_decode_graphs(captured)
    return make_loop(captured, overlap=overlap, runner=runner)


EXTRAS = {
    "plain": {},
    "filters": {"top_k": 5, "top_p": 0.9},
    "processors": {"frequency_penalty": 0.5},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("captured", [0, 5, ROWS])
@pytest.mark.parametrize("in_graphs", [False, True])
def test_each_output_token_is_observed_once(captured, in_graphs, extra):
    """Requests that use a filter or a logits processor beside others that do not."""
    loop = make_counting_loop(captured, in_graphs=in_graphs, overlap=captured != 5)
    more = [EXTRAS[extra] if row % 2 else {} for row in range(ROWS)]
    params = [SamplingParams(max_tokens=4 + 3 * row, seed=row, ignore_eos=True, **more[row]) for row in range(ROWS)]
    expected = [[(len(prompt) + place) % VOCAB for place in range(4 + 3 * row)] for row, prompt in enumerate(PROMPTS)]
    assert loop.generate(PROMPTS, params) == expected


def test_a_fault_of_a_slot_ends_its_request_alone():
    processors = make_counting_loop(0).runner.processors
    tokens = np.arange(5, dtype=np.int32)
    setups = [SlotSetup(slot, SamplingParams(custom={"bad": "fault"} if slot == 2 else {}), 0, 5, tokens) for slot in range(4)]
    processors.update(setups, [])
    (fault,) = processors.find_faults(np.arange(4)).items()
    assert fault[0] == 2 and fault[1].endswith("RuntimeError: boom; send it without the parameters of this sampler")
    processors.update([SlotSetup(2, SamplingParams(), 0, 5, tokens)], [2])
    assert processors.find_faults(np.arange(4)) is None


def test_wrong_parameters_are_refused_by_name():
    processors = make_counting_loop(0).runner.processors
    finish = processors.check_params(SamplingParams(custom={"bad": "value"}))
    assert finish is not None and (finish.code, finish.param) == ("invalid_request", "custom")
    assert processors.check_params(SamplingParams()) is None
