"""Warm-up steps: they stay within the limits and leave no state behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.config.schema import FrameConfig
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.execution.warmup import idle_decodes, idle_mixed, idle_prompts
from frame.core.interfaces.build import Limits
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.platform import HOST
from frame.core.interfaces.rank_context import Track
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes import components
from frame.entrypoints.processes.build_engine import build_rank, load_parts
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.processes.components import RunnerPlan, build_runner
from frame.entrypoints.processes.join_groups import Groups
from frame.host import progress
from frame.testing.gemm_kernels import load_own_plugins
from frame.testing.local_loop import LocalLoop

sizes = partial(st.integers, 1)


@given(st.builds(Limits, sizes(300), sizes(9000), sizes(9000), sizes(64)), st.booleans(), st.booleans())
def test_prompts_are_within_the_limits(limits: Limits, few: bool, fresh: bool) -> None:
    for batch in idle_prompts(limits, few=few, fresh=fresh):
        assert len(batch.slots) <= limits.max_running_requests
        assert len(batch.token_ids) == batch.num_scheduled.sum() <= limits.max_tokens_per_step
        assert (batch.num_computed + batch.num_scheduled).max() <= limits.max_context
        assert not (fresh and batch.num_computed.any())
        assert not len(batch.new_pages) and not batch.num_decodes
    for batch in idle_mixed(limits.max_running_requests, limits):
        assert limits.max_running_requests > 1
        assert len(batch.token_ids) + batch.num_decodes == batch.num_scheduled.sum() <= limits.max_tokens_per_step
        assert (batch.num_computed + batch.num_scheduled).max() <= limits.max_context


def test_limits_leave_prompts_of_every_kind() -> None:
    found = list(idle_prompts(Limits(256, 8192, 4096, 16)))
    assert {len(batch.slots) for batch in found} >= {1, 2, 64}
    assert any(batch.num_computed.any() and batch.num_scheduled.max() > 1024 for batch in found)
    assert list(idle_prompts(Limits(1, 1, 1, 1), few=True))
    assert any(batch.num_computed.any() for batch in idle_prompts(Limits(8, 512, 400, 16)))  # a context below the usual prefix
    assert any(batch.num_computed.any() for batch in idle_mixed(8, Limits(8, 512, 400, 16)))


@pytest.mark.parametrize("limits", [Limits(1, 1, 1, 1), Limits(256, 8192, 4096, 16)])
def test_every_logits_processor_is_called_and_left_empty(limits: Limits) -> None:
    registry = load_own_plugins()
    processors = {}
    for record in registry.records("logits_processor"):
        processors[record.name] = registry.load(record)(ProcessorContext(384, limits.max_running_requests, torch.device("cpu")))
        processors[record.name].eos_token_ids = (1,)
    called = Processors(list(processors.values()), limits.max_running_requests)
    planned: set[int] = set()
    for batch in idle_prompts(limits):
        called.update(batch.setups, batch.released)
        plan = called.plan(batch.slots, batch.num_computed + batch.num_scheduled)
        planned |= set(plan.indices) if plan else set()
    assert [name for index, name in enumerate(processors) if index in planned] == list(processors)
    assert called.plan(np.zeros(1, np.int64), np.ones(1, np.int64)) is None
    assert all(processor._state.capacity == 0 for processor in processors.values())


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_cold_start_runs_its_steps_twice(is_cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """First with kernels that are compiled and not launched."""
    steps: list[str] = []

    @contextmanager
    def compile_ahead(rank: int, ranks: int, track: Track) -> Iterator[None]:
        assert track is progress.track
        steps.append("begin")
        yield
        steps.append("end")

    monkeypatch.setattr(components, "kernels", SimpleNamespace(can_use_triton=lambda _: True))
    monkeypatch.setattr(components, "choose_operations", lambda _: TORCH)
    monkeypatch.setattr(components, "compile_ahead", compile_ahead)
    monkeypatch.setattr(components, "check_finite", lambda _: steps.append("check"))
    monkeypatch.setattr(TorchModelRunner, "warm_up", lambda _: steps.append("warm up"))
    monkeypatch.setattr(components, "_capture_graphs", lambda *_, is_dry=False: steps.append("run sizes" if is_dry else "capture"))
    prepared = prepare(FrameConfig.model_validate({"model": {"path": str(find_model(EMBEDDED))}, "execution": {"device": "cpu"}}))
    parts = load_parts(prepared.resolved, prepared.registry)
    runner = build_runner(RunnerPlan(prepared.resolved, parts, HOST, Groups(LocalGroup()), is_cold))
    assert steps == ["begin", "warm up", "run sizes", "end"] * is_cold + ["warm up", "check", "capture"]
    assert ("kernels" in runner.capacity.phases) == is_cold


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_after_idle_steps_have_the_tokens_that_they_have_without(overlap: bool) -> None:
    config = {
        "model": {"path": str(find_model(EMBEDDED)), "dtype": "float32"},
        "cache": {"page_size": 4, "max_total_tokens": 2048},
        "scheduler": {"max_running_requests": 8, "chunked_prefill_size": 128, "overlap": overlap},
        "execution": {"device": "cpu"},
    }
    draw = np.random.default_rng(0)
    prompts = [draw.integers(6, 384, size=length).tolist() for length in (1, 5, 40, 90, 200)]
    outputs = []
    for is_idle_first in (False, True):
        prepared = prepare(FrameConfig.model_validate(config))
        runner = build_rank(prepared.resolved, prepared.registry)
        if is_idle_first:
            for batch in (*idle_decodes(runner.inputs.table.padding_slot), *idle_prompts(runner.context.limits)):
                runner.launch(batch).wait()
        loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
        outputs.append(loop.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    assert outputs[0] == outputs[1]
