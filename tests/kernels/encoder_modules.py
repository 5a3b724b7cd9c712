"""Rotary embedding of heads in place, and transformers' encoders with attention layers that use it.

Run by `test_interpreted.py` under TRITON_INTERPRET=1, and by tests/gpu.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from frame.kernels import INTERPRETED
from frame.kernels.rotary_heads import rotate_heads
from frame.models.encoder_modules import PackedAttention, replace_modules
from tests.models.media_checkpoints import _TEXT, FAMILIES

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOLERANCE = 0.01  # of bfloat16, relative to the largest value
TOWERS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Glm4v", "Glm46V", "Glm4vMoe", "Qwen3OmniMoeThinker")
OTHERS = ("Gemma3", "Gemma4", "LlavaOnevision", "Llava", "LlavaNext", "InternVL", "Mistral3", "Llama4", "MiniCPMV4_6")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("size", [16, 72, 128])
def test_heads_rotate_in_place(size: int) -> None:
    qkv, cos, sin = draw(37, 3, 3, size), draw(37, size, dtype=torch.float32), draw(37, size, dtype=torch.float32) + 1
    first, second = qkv[:, :2].float().chunk(2, -1)
    turned = (qkv[:, :2].float() * cos[:, None, None] + torch.cat([-second, first], -1) * sin[:, None, None]).bfloat16()
    values = qkv[:, 2].clone()
    rotate_heads(qkv, cos, sin)
    assert torch.equal(qkv[:, 2], values)
    assert (qkv[:, :2].float() - turned.float()).abs().max() <= TOLERANCE * turned.float().abs().max()


def make_encoders(name: str) -> Any:
    """transformers' base model of a family of `FAMILIES`, with a small language model."""
    import transformers

    family = FAMILIES[f"{name}ForConditionalGeneration"]
    if transformers.CONFIG_MAPPING[family.model_type] not in transformers.MODEL_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} makes no base model of {name}")
    fields = copy.deepcopy({**family.towers, **family.config, "text_config": {**_TEXT, **family.text}})
    torch.manual_seed(1)
    config = transformers.CONFIG_MAPPING[family.model_type](**fields)
    if name == "Gemma4":
        config.audio_config = None  # whose attention has no such form
    return transformers.AutoModel.from_config(config, attn_implementation="sdpa")


def count_replaced(encoders: torch.nn.Module) -> int:
    return sum(isinstance(module, PackedAttention) for module in encoders.modules())


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_keep_their_layers(name: str) -> None:
    with torch.device("meta"):
        encoders = make_encoders(name)
    replace_modules(encoders, DEVICE)
    assert count_replaced(encoders) == 0


@pytest.mark.parametrize("name", TOWERS)
def test_towers_keep_their_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of several sizes and a video: as transformers in float32, and no worse in bfloat16."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the convolution of transformers' tower
    exact = make_encoders(name).visual.eval().to(DEVICE)
    replaced = copy.deepcopy(exact)
    names = [each for each, _ in exact.named_parameters()]
    replace_modules(replaced, DEVICE)
    assert count_replaced(replaced) == exact.config.depth
    assert [each for each, _ in replaced.named_parameters()] == names
    vision = exact.config
    sizes = [
        [1, 4, 6],
        [1, 4, 6],
        [1, 2, 2],
        [1, 8, 4],
        *([[3, 4, 4]] if not name.startswith("Glm") else []),
    ]  # transformers 5.24 fails there
    grid = torch.tensor(sizes, device=DEVICE)
    pixels = draw(int(grid.prod(1).sum()), 3 * vision.temporal_patch_size * vision.patch_size**2, dtype=torch.float32)
    with torch.inference_mode():
        expected, computed = (tower(pixels, grid).last_hidden_state for tower in (exact, replaced))
        torch.testing.assert_close(computed, expected, atol=1e-4, rtol=1e-4)
        errors = []
        for tower in (exact, replaced):
            rounded = tower.bfloat16()
            errors.append((rounded(pixels.bfloat16(), grid).last_hidden_state.float() - expected).norm())
    assert errors[1] <= 1.3 * errors[0] + 0.001 * expected.norm()
