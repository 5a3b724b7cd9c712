"""Kernels are compiled at the start: while requests are served, nothing waits for a compiler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.checkpoints import make_checkpoint
from frame.testing.local_loop import LocalLoop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 380
SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 2048,
    },
    "Qwen3MoeForCausalLM": {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "DeepseekV3ForCausalLM": {
        "hidden_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
    },
}
QUANTIZATION = {"DeepseekV3ForCausalLM": "fp8"}
LENGTHS = (1, 2, 3, 5, 7, 15, 16, 17, 33, 63, 64, 65, 90, 127, 129, 250, 511, 700, 1023, 1025, 1999, 2500, 3000)


def make_loop(path: Path, quantization: str | None) -> LocalLoop:
    config = {
        "model": {"path": str(path), "dtype": "bfloat16", "quantization": quantization},
        "cache": {"max_total_tokens": 65_536},
        "scheduler": {"max_running_requests": 64, "chunked_prefill_size": 2048},
        "execution": {"device": "cuda"},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


def requests(draw: random.Random, count: int, begin: list[int]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of all lengths, a part of them after a beginning that they share; drawn in every
    way."""
    prompts = [[draw.randrange(6, VOCAB) for _ in range(draw.choice(LENGTHS))] for _ in range(count)]
    prompts = [begin + prompt if draw.random() < 0.3 and len(prompt) < 2000 else prompt for prompt in prompts]
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.8]),
            top_k=draw.choice([-1, -1, 8]),
            top_p=draw.choice([1.0, 1.0, 0.9]),
            min_p=draw.choice([0.0, 0.0, 0.05]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.4]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            logit_bias=draw.choice([{}, {}, {7: 1.0}]),
            logprobs=draw.choice([None, None, 0, 1, 3]),
            prompt_logprobs=draw.choice([None, None, None, 1]),
            seed=row,
            max_tokens=draw.randrange(1, 24),
            ignore_eos=True,
        )
        for row in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("architecture", SHAPES)
def test_nothing_is_compiled_while_requests_are_served(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[str] = []

    def note(*_: Any, **model_config: Any) -> None:
        compiled.append(model_config["repr"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    loop = make_loop(
        make_checkpoint(architecture, tmp_path, max_position_embeddings=8192, **SHAPES[architecture]), QUANTIZATION.get(architecture)
    )
    assert compiled, "nothing is seen of what the start compiles"
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)  # the start has set its own
    compiled.clear()
    draw = random.Random(1)
    begin = [draw.randrange(6, VOCAB) for _ in range(1500)]
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for length in LENGTHS:  # alone, then among others
        loop.generate([[draw.randrange(6, VOCAB) for _ in range(length)]], greedy)
    for count in (1, 2, 3, 7, 20, 33, 64):
        loop.generate(*requests(draw, count, begin))
    loop.generate([begin], greedy)
    for length in (1, 2, 4, 8, 16, 17, 31):  # after cached tokens, in steps that are too large for decode graphs
        loop.generate([begin + [draw.randrange(6, VOCAB) for _ in range(length)] for _ in range(64)], greedy)
    loop.scheduler.check_integrity()
    assert not compiled, "\n".join(compiled)
