"""Attention of packed sequences, rotary embedding of heads in place, and transformers' encoders
with them.

Run by `test_interpreted.py` under TRITON_INTERPRET=1, and by tests/gpu.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from frame.kernels import INTERPRETED
from frame.kernels.packed_attention import attend, turn_heads
from frame.models.encoder_attention import replace_attention
from tests.models.media_checkpoints import FAMILIES

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOLERANCE = 0.01  # of bfloat16, relative to the largest value
LENGTHS = ((130, 1, 64), (3,), (65, 128))
SMALL_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
TOWERS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("size", [8, 16, 64, 72, 80, 88, 128])
def test_each_token_attends_to_its_sequence(size: int, lengths: tuple[int, ...]) -> None:
    qkv = draw(sum(lengths), 3, 2, size)
    q, k, v = qkv.unbind(1)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    expected = [
        F.scaled_dot_product_attention(*(each[begin:end].transpose(0, 1).double() for each in (q, k, v))).transpose(0, 1)
        for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    for longest in (max(lengths), sum(lengths) + 300):  # a bound does as well
        found = attend(q, k, v, starts.to(DEVICE, torch.int32), longest, size**-0.5)
        error = float((found.double() - torch.cat(expected)).abs().max() / torch.cat(expected).abs().max())
        assert found.is_contiguous() and error <= TOLERANCE


def test_sequences_have_the_bits_that_they_have_alone() -> None:
    q, k, v = draw(170, 3, 1, 72).unbind(1)
    whole = attend(q, k, v, torch.tensor([0, 20, 170], dtype=torch.int32, device=DEVICE), 150, 0.1)
    alone = attend(q[20:], k[20:], v[20:], torch.tensor([0, 150], dtype=torch.int32, device=DEVICE), 150, 0.1)
    assert torch.equal(whole[20:], alone)


@pytest.mark.parametrize("size", [16, 72, 128])
def test_heads_turn_in_place(size: int) -> None:
    qkv, cos, sin = draw(37, 3, 3, size), draw(37, size, dtype=torch.float32), draw(37, size, dtype=torch.float32) + 1
    first, second = qkv[:, :2].float().chunk(2, -1)
    turned = (qkv[:, :2].float() * cos[:, None, None] + torch.cat([-second, first], -1) * sin[:, None, None]).bfloat16()
    values = qkv[:, 2].clone()
    turn_heads(qkv, cos, sin)
    assert torch.equal(qkv[:, 2], values)
    assert (qkv[:, :2].float() - turned.float()).abs().max() <= TOLERANCE * turned.float().abs().max()


@pytest.mark.parametrize("name", TOWERS)
def test_towers_keep_their_results(name: str) -> None:
    """Images of several sizes, against the same tower in float32."""
    import transformers

    family = FAMILIES[f"{name}ForConditionalGeneration"]
    fields = copy.deepcopy({**family.towers, **family.config, "text_config": {**SMALL_TEXT, **family.text}})
    config = transformers.CONFIG_MAPPING[family.model_type](**fields)
    vision = config.vision_config
    torch.manual_seed(1)
    exact = transformers.AutoModel.from_config(config, attn_implementation="sdpa").visual.eval().to(DEVICE)
    rounded = copy.deepcopy(exact).bfloat16()
    plain = copy.deepcopy(rounded)
    names = [each for each, _ in rounded.named_parameters()]
    assert replace_attention(exact, DEVICE, torch.float32) == 0
    assert replace_attention(rounded, DEVICE, torch.bfloat16) == vision.depth
    assert [each for each, _ in rounded.named_parameters()] == names
    grid = torch.tensor([[1, 4, 6], [1, 2, 2], [1, 8, 4]], device=DEVICE)
    pixels = draw(int(grid.prod(1).sum()), 3 * vision.temporal_patch_size * vision.patch_size**2, dtype=torch.float32)
    with torch.inference_mode():
        expected = exact(pixels, grid).last_hidden_state
        errors = [(tower(pixels.bfloat16(), grid).last_hidden_state.float() - expected).norm() for tower in (plain, rounded)]
    assert errors[1] <= 1.3 * errors[0] + 0.001 * expected.norm()
