"""Whole models with fp8 weights and cache on a GPU, captured decodes included, near their plain
twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frame import Engine, SamplingParams
from tests.quantization.fp8_checkpoints import make_pair

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "num_hidden_layers": 3}
HEADS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PROMPTS = [[(7 * place + 13 * row) % 350 + 6 for place in range(length)] for row, length in enumerate((3, 40, 90, 17, 64))]


def prompt_logprobs(folder: Path, **settings: Any) -> torch.Tensor:
    """Of all prompts' own tokens, [tokens]; then decodes, which have to end."""
    keys: dict[str, Any] = {"max_total_tokens": 4096, "max_model_len": 256, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    device = settings.pop("device", "cuda")
    if device == "cuda":
        keys |= {"attention_backend": "triton"}
    with Engine(model=str(folder), device=device, **keys, **settings) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logprobs=0))
        assert all(len(output.token_ids) == 8 for output in outputs)
    found = [number for output in outputs for number in output.prompt_logprobs.logprobs[1:]]
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("architecture", "dialect", "sizes"),
    [
        ("Qwen3ForCausalLM", "channel", HEADS),
        ("Qwen3MoeForCausalLM", "block", HEADS),
        ("DeepseekV3ForCausalLM", "block", LATENT),
    ],
)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3", "int8"])
def test_near_its_plain_twin(architecture: str, dialect: str, sizes: dict[str, int], kv_dtype: str, tmp_path: Path) -> None:
    stored, plain = make_pair(architecture, dialect, tmp_path, **SIZES, **sizes)
    want = prompt_logprobs(plain, device="cpu")
    got = prompt_logprobs(stored, kv_cache_dtype=kv_dtype)
    assert torch.isfinite(got).all()
    assert (got - want).abs().median() < 0.4
    assert torch.corrcoef(torch.stack((got, want)))[0, 1] > 0.95
