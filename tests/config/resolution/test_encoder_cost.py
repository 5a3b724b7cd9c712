"""What encoders cost: the estimate of a known model, and the patches of a number of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frame.config.resolution.media import find_cost
from frame.interfaces.modality import EncoderCost, MediaPlan
from tests.model_configs import LLAMA


@pytest.mark.parametrize("cost", [EncoderCost(27, 0.35, 5e-5), EncoderCost(3, 2.0, 0.0), EncoderCost(24, 1e-3, 1e-3)])
@pytest.mark.parametrize("tokens", [1, 40, 2048, 10**6])
def test_patches_of_a_number_of_tokens(cost: EncoderCost, tokens: int) -> None:
    patches = cost.find_patches(tokens)
    assert cost.count_tokens(patches) <= tokens * (1 + 1e-9)
    assert cost.count_tokens(patches + 2) > tokens


def test_the_estimate_of_a_large_picture() -> None:
    """Qwen3-VL-8B, measured on an H200: 8,160 patches take as long as 5,500 to 6,500 tokens."""
    tower = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096}
    decoder = replace(
        LLAMA, num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, config={"intermediate_size": 12_288}
    )
    cost = find_cost(tower, decoder)
    assert cost is not None
    assert cost.num_layers == 27
    assert 5_500 < cost.count_tokens(8_160) < 6_500
    experts = replace(decoder, num_experts=8, config={"moe_intermediate_size": 6_144, "num_experts_per_tok": 2, "intermediate_size": 1})
    assert find_cost(tower, experts) == cost


def test_names_of_sizes() -> None:
    named = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
    cost = find_cost(named, LLAMA)
    assert cost is not None
    assert find_cost({"encoder_layers": 3, "d_model": 32, "encoder_ffn_dim": 48}, LLAMA) == cost
    assert find_cost({"depth": 3, "hidden_size": 64, "embed_dim": 32, "mlp_ratio": 1.5}, LLAMA) == cost
    assert find_cost({"hidden_size": 32}, LLAMA) is None
    assert find_cost({}, LLAMA) is None


def test_what_the_device_holds_between_steps() -> None:
    plan = MediaPlan(64, 8192, ("image",))
    assert plan.held_patches == 0
    assert replace(plan, costs={"image": EncoderCost(1, 1.0, 0.0)}).held_patches == 32_768
