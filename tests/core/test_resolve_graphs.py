"""Which steps run as graphs: what stands in the way is said, what the user wants is kept or refused, and sizes follow from the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from frame.core.config import FrameConfig
from frame.core.hardware import Accelerator, Hardware
from frame.core.interfaces.model import ModelFacts
from frame.core.model_facts import EMBEDDED
from frame.core.resolve import ResolveError, resolve
from frame.core.resolve_graphs import MOST_PROMPT_TOKENS, launch_bound_tokens
from frame.plugins.loader import load_registry

LLAMA_8B = ModelFacts(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    vocab_size=128256,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    kind="mha",
    latent=None,
    max_context=8192,
    dtype="bfloat16",
    config={"intermediate_size": 14336},
)
H200 = Hardware(cpu_cores=8, memory_bytes=64 << 30, accelerators=(Accelerator("cuda", "H200", (9, 0), 140 << 30),) * 2)


def resolved(facts: ModelFacts = LLAMA_8B, tp: int = 1, **execution: Any) -> Any:
    records = load_registry(installed=False).all_records()
    config = FrameConfig.model_validate({"model": {"path": EMBEDDED}, "parallel": {"tp": tp}, "execution": execution})
    return resolve(config, H200, facts, records)


def test_few_tokens_of_large_layers_and_many_of_small_ones() -> None:
    small = dataclasses.replace(LLAMA_8B, hidden_size=1024, num_heads=16, config={"intermediate_size": 3072})
    sparse = {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    experts = dataclasses.replace(LLAMA_8B, hidden_size=2048, num_kv_heads=4, num_experts=128, config=sparse)
    latent = dataclasses.replace(
        LLAMA_8B, hidden_size=7168, num_heads=128, kind="mla", latent=(512, 64), head_dim=192,
        config={"intermediate_size": 18432, "q_lora_rank": 1536},
    )  # fmt: skip
    assert [launch_bound_tokens(facts) for facts in (LLAMA_8B, small, experts, latent)] == [256, MOST_PROMPT_TOKENS, 1024, 64]


def test_what_is_left_open_follows_from_model_and_machine() -> None:
    found = resolved(device="cuda")
    assert (found.cuda_graph_max_bs, found.prompt_graph_max_tokens) == (256, 256)
    assert "launch" in found.reasons["execution.prompt_graph_max_tokens"]
    assert resolved(device="cuda", prompt_graph_max_tokens=0).prompt_graph_max_tokens == 0
    assert resolved(device="cuda", prompt_graph_max_tokens=777).prompt_graph_max_tokens == 777


def test_steps_of_several_ranks_are_captured_too() -> None:
    found = resolved(device="cuda", tp=2)
    assert (found.cuda_graph_max_bs, found.prompt_graph_max_tokens) == (256, 256)


@pytest.mark.parametrize(
    ("execution", "why"), [({"device": "cpu"}, "need a CUDA device"), ({"device": "cuda", "torch_compile": True}, "graphs of its own")]
)
def test_what_cannot_be_captured_is_not_and_refused_where_it_is_wanted(execution: dict[str, Any], why: str) -> None:
    found = resolved(**execution)
    assert found.prompt_graph_max_tokens == 0
    assert why in found.reasons["execution.prompt_graph_max_tokens"]
    with pytest.raises(ResolveError, match=why):
        resolved(**execution, prompt_graph_max_tokens=64)
