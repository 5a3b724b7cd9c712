"""The scheduler that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.latency_budget import LatencyBudget

CHOSEN = {
    "policy": "priority",
    "max_running_requests": 3,
    "max_queued_requests": 17,
    "chunked_prefill_size": 48,
    "request_timeout": 5.0,
    "preemption": False,
    "short_prompt_share": 0.25,
    "overlap": False,
    "target_itl_ms": 30.0,
}


def test_every_setting_reaches_the_scheduler() -> None:
    config = FrameConfig.model_validate(
        {"model": {"path": "frame-tiny", "seed": 9}, "execution": {"device": "cpu"}, "scheduler": CHOSEN, "sampling": {"jump_forward": 4}}
    )
    prepared = prepare(config)
    scheduler = build_scheduler(prepared.resolved, prepared.registry, 50)
    found = scheduler.config
    assert found.max_running == 3
    assert found.max_queued == 17
    assert found.token_budget == 48
    assert found.short_prompt_share == 0.25
    assert found.request_timeout == 5.0
    assert found.preemption is False
    assert found.overlap is False
    assert found.seed == 9
    assert found.jump_forward == 4
    budget = scheduler._planner.prompt_budget
    assert isinstance(budget, LatencyBudget) and (budget._aim, budget._maximum) == (pytest.approx(0.027), 48)
    assert type(scheduler._planner._policy._policy).__name__ == "PriorityFirst"


def test_a_decode_server_computes_few_prompt_tokens_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAME_DIST_KEY", "0123456789abcdef")
    fields = {"model": {"path": "frame-tiny"}, "execution": {"device": "cpu"}, "disaggregation": {"mode": "decode"}}
    prepared = prepare(FrameConfig.model_validate({**fields, "scheduler": {"chunked_prefill_size": 2048}}))
    budget = build_scheduler(prepared.resolved, prepared.registry, 50)._planner.prompt_budget
    assert budget is not None
    assert [budget.choose(step, decodes, 0.0) for step, decodes in enumerate((0, 1, 64))] == [2048, 512, 512]


@pytest.mark.parametrize(
    ("scheduler", "experts", "expected"),
    [
        ({"chunked_prefill_size": 8192}, 0, [8192, 2048, 2048]),
        ({"chunked_prefill_size": 8192}, 8, None),
        ({"chunked_prefill_size": 8192, "target_itl_ms": 0}, 0, None),
        ({"chunked_prefill_size": 2048}, 0, None),
    ],
)
def test_a_server_without_a_target_has_shorter_chunks_beside_decodes(
    scheduler: dict[str, Any], experts: int, expected: list[int] | None
) -> None:
    prepared = prepare(
        FrameConfig.model_validate({"model": {"path": "frame-tiny"}, "execution": {"device": "cpu"}, "scheduler": scheduler})
    )
    model = replace(prepared.resolved.model, num_experts=experts)
    budget = build_scheduler(prepared.resolved.model_copy(update={"model": model}), prepared.registry, 50)._planner.prompt_budget
    if expected is None:
        assert budget is None
    else:
        assert budget is not None
        assert [budget.choose(step, decodes, 0.0) for step, decodes in enumerate((0, 1, 64))] == expected


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_a_policy_of_cached_prefixes_needs_a_cache_that_stores_them(policy: str) -> None:
    def build(prefix: str) -> None:
        fields = {"model": {"path": "frame-tiny"}, "execution": {"device": "cpu"}, "scheduler": {"policy": policy}}
        prepared = prepare(FrameConfig.model_validate({**fields, "cache": {"prefix": prefix}}))
        build_scheduler(prepared.resolved, prepared.registry, 50)

    build("radix")
    with pytest.raises(ConfigurationError, match=f"policy: {policy} orders by cached prefixes, but the prefix cache none stores none"):
        build("none")
