"""Greedy tokens of architectures with features of their own on a GPU: with the kernels and graphs
that `auto` chooses, those of transformers on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.checkpoints import load_reference, make_checkpoint
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import Case, greedy, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two head sizes, shared keys": ("Gemma4ForCausalLM", {"head_dim": 64, "global_head_dim": 128}),
    "keys as values, experts with GELU": (
        "Gemma4ForCausalLM",
        {
            "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        },
    ),
    "sparse attention": ("DeepseekV32ForCausalLM", {}),
    "sparse attention with shared indexers": ("GlmMoeDsaForCausalLM", {}),
    "experts with biases": ("GptOssForCausalLM", {}),
    "experts without gates": ("NemotronHForCausalLM", {}),
    "attention beside Mamba-2": ("FalconH1ForCausalLM", {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32}),
}  # fmt: skip
PROMPTS = random_prompts((41, 7, 30, 58, 3, 80))


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, changes = CASES[name]
    folder = make_checkpoint(architecture, tmp_path, **changes)
    case = Case(str(folder), PROMPTS, load_reference(folder))
    config = {
        "model": {"path": str(folder), "dtype": "float32"},
        "cache": {"page_size": 16, "max_total_tokens": 2048},
        "scheduler": {"max_running_requests": 8, "chunked_prefill_size": 32},
        "execution": {"device": "cuda"},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
    outputs = loop.generate(PROMPTS, greedy(16))
    wrong = [each for each in zip(PROMPTS, outputs, strict=True) if not _agrees(case, *each)]
    assert len(wrong) <= 1, "rounding may tip one choice between two tokens"
    loop.scheduler.check_integrity()


def _agrees(case: Case, prompt: list[int], output: list[int]) -> bool:
    return bool(output == case.logits(prompt, output).argmax(-1).tolist())
