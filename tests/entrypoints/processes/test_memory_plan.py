"""The memory of a rank as predicted before a start, against what the start takes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frame.config.schema import FrameConfig
from frame.core.interfaces.platform import DeviceMemory
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes import components, memory_plan
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.memory_plan import TOLERANCE, MemoryPlan
from frame.entrypoints.tools.plan.planner import plan_deployment
from frame.loading import loader
from frame.plugins.platforms.cpu import CpuPlatform
from frame.testing.checkpoints import make_checkpoint

GIB = 1 << 30
PLAN = MemoryPlan(
    total=140 * GIB, others=GIB, weights=80 * GIB, activations=4 * GIB, graphs=GIB, workspaces=GIB, cache=40 * GIB,
    bytes_per_token=1 << 16, tokens=640_000, is_shared=False,
)  # fmt: skip
MODELS = ("frame-tiny", "LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM")


@pytest.mark.parametrize("architecture", MODELS)
def test_weights_and_cache_are_as_planned(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_plan({"path": architecture if architecture == MODELS[0] else str(make_checkpoint(architecture, tmp_path))}, caplog)


@pytest.mark.pairwise
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("method", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_in_the_form_of_their_kernel_are_planned(
    method: str, architecture: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_plan({"path": str(make_checkpoint(architecture, tmp_path)), "quantization": method, "dtype": dtype}, caplog)


def test_the_quantized_copy_of_a_tied_head_is_planned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)
    options = {"options": {"weight_format/int8": {"head": True}}}
    check_plan({"path": str(path), "quantization": "int8", "gemm_kernel": "torch"}, caplog, options)


def test_the_dense_form_of_a_quantized_latent_projection_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    check_plan({"path": MODELS[0], "quantization": "int8"}, caplog, {"options": {"weight_format/int8": {"ignore": []}}})


def check_plan(model: dict[str, str], caplog: pytest.LogCaptureFixture, plugins: dict[str, Any] | None = None) -> None:
    """Weights and cache of a start are as planned."""
    config = FrameConfig.model_validate({"model": model, "plugins": plugins or {}, "cache": {"max_total_tokens": 2048}})
    planned = plan_deployment(config, None).memory
    prepared = prepare(config)
    with caplog.at_level(logging.WARNING):
        runner = build_rank(prepared.resolved, prepared.registry)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in {*runner.model.parameters(), *runner.model.buffers()})
    assert abs(planned.weights / weights - 1) < TOLERANCE
    assert planned.tokens == runner.capacity.max_total_tokens
    assert planned.cache == runner.inputs.kv.num_bytes
    assert "memory plan" not in caplog.text


def test_a_start_logs_a_prediction_that_is_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepare(FrameConfig.model_validate({"cache": {"max_total_tokens": 2048}}))
    true = memory_plan.plan_memory
    monkeypatch.setattr("frame.entrypoints.processes.memory_plan.plan_memory", lambda *given: replace(true(*given), tokens=2000))
    with caplog.at_level(logging.WARNING):
        build_rank(prepared.resolved, prepared.registry)
    assert "the memory plan predicts 2,000 tokens for the KV cache; it is 2,048" not in caplog.text
    monkeypatch.setattr("frame.entrypoints.processes.memory_plan.plan_memory", lambda *given: replace(true(*given), tokens=1900))
    with caplog.at_level(logging.WARNING):
        build_rank(prepared.resolved, prepared.registry)
    assert "the memory plan predicts 1,900 tokens for the KV cache; it is 2,048" in caplog.text


def test_unused_memory_is_given_back_before_the_cache_is_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an earlier engine before the first measurement, that of packed weights before the
    second."""
    events: list[str] = []

    def record(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (events.append(name), real(*given))[1])

    for owner, name in (
        (CpuPlatform, "release_memory"), (CpuPlatform, "measure_memory"),
        (loader, "process_weights_after_loading"), (components, "plan_pages"),
    ):  # fmt: skip
        record(owner, name)
    prepared = prepare(FrameConfig.model_validate({"cache": {"max_total_tokens": 2048}}))
    events.clear()
    build_rank(prepared.resolved, prepared.registry)
    assert events[:2] == ["release_memory", "measure_memory"]
    start = events.index("process_weights_after_loading")
    assert events[start : start + 4] == ["process_weights_after_loading", "release_memory", "measure_memory", "plan_pages"]


@pytest.mark.parametrize(
    ("weights", "tokens", "free", "reserved", "named"),
    [
        (80, 640_000, 14, 120, ()),
        (78, 630_000, 16, 120, ()),
        (84, 640_000, 14, 120, ("weights",)),
        (80, 640_000, 19, 120, ()),  # activations and workspaces are not taken
        (80, 500_000, 24, 110, ("the KV cache", "memory besides activations and workspaces")),
        (80, 640_000, 2, 120, ()),  # another process takes memory
        (80, 640_000, 2, 134, ("all memory",)),
    ],
)
def test_deviations_above_three_percent_are_named(weights: int, tokens: int, free: int, reserved: int, named: tuple[str, ...]) -> None:
    found = PLAN.find_deviations(weights * GIB, tokens, DeviceMemory(140 * GIB, free * GIB, reserved * GIB))
    assert len(found) == len(named)
    assert all(f" for {name}; it is " in sentence for name, sentence in zip(named, found, strict=True))
    again = replace(PLAN, others=PLAN.others + 30 * GIB, reserved=30 * GIB)  # another engine ran in this process
    then = again.find_deviations(weights * GIB, tokens, DeviceMemory(170 * GIB, free * GIB, (reserved + 30) * GIB))
    assert [sentence.partition(" for ")[2].partition(";")[0] for sentence in then] == list(named)
    on_host = replace(PLAN, is_shared=True).find_deviations(weights * GIB, tokens, DeviceMemory(140 * GIB, 0))
    assert len(on_host) == len([name for name in named if "memory" not in name])
