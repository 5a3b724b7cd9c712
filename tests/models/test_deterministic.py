"""The batch-invariant mode: the bits of a token's logits are those of the token computed alone,
whatever the batch, the chunks and the phase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.harness import Session, open_session
from tests.models.ranks import on_ranks

ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"hidden_size": 56, "intermediate_size": 100, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8}),
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("MistralForCausalLM", {"sliding_window": 10}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen3ForCausalLM", {}),
    ("MixtralForCausalLM", {}),
    ("Qwen3MoeForCausalLM", {}),
    ("Olmo2ForCausalLM", {}),
    ("Phi3ForCausalLM", {}),
    ("DeepseekV2ForCausalLM", {}),
    ("DeepseekV3ForCausalLM", {}),
]
LENGTH, OTHERS = 75, 6


def open_deterministic(folder: Path, dtype: torch.dtype) -> Session:
    return open_session(folder, dtype=dtype, attention="torch_native", deterministic=True)


def draw(length: int, seed: int) -> list[int]:
    return torch.randint(6, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", range(len(ARCHITECTURES)), ids=lambda which: f"{ARCHITECTURES[which][0]}-{which}")
def test_bits_do_not_depend_on_the_batch(checkpoint: Callable[..., Path], which: int, dtype: torch.dtype) -> None:
    architecture, overrides = ARCHITECTURES[which]
    folder = checkpoint(architecture, **overrides)
    tokens = draw(LENGTH, 1)
    session = open_deterministic(folder, dtype)
    (expected,) = session.step([(0, tokens)])
    for slot, chunk in ((1, 1), (2, 3), (3, 16), (4, 33), (5, 64)):  # 1: prompt against decode
        parts = [session.step([(slot, tokens[start : start + chunk])])[0] for start in range(0, LENGTH, chunk)]
        assert torch.equal(torch.cat(parts), expected), f"chunks of {chunk}"
    session = open_deterministic(folder, dtype)
    parts, at = [], 0
    for step, count in enumerate((1, 20, 1, 1, 4, 31, 1, 16)):  # among others that decode and extend
        others = [(slot, draw(1 if (slot + step) % 3 else 5 * slot + step, 10 * slot + step)) for slot in range(1, 1 + step % OTHERS)]
        parts.append(session.step([(0, tokens[at : at + count]), *others])[0])
        at += count
    assert torch.equal(torch.cat(parts), expected[:at]), "among other rows"


def test_without_the_mode_bits_depend_on_the_batch(checkpoint: Callable[..., Path]) -> None:
    """The test above can fail: the same steps without the mode."""
    tokens = draw(LENGTH, 1)
    session = open_session(checkpoint("LlamaForCausalLM"), attention="torch_native")
    (expected,) = session.step([(0, tokens)])
    parts = [session.step([(1, tokens[start : start + 1])])[0] for start in range(LENGTH)]
    assert not torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_two_ranks(checkpoint: Callable[..., Path], architecture: str) -> None:
    tokens = draw(LENGTH, 1)

    def act(group: Any) -> bool:
        session = open_session(checkpoint(architecture), group, dtype=torch.bfloat16, attention="torch_native", deterministic=True)
        (expected,) = session.step([(0, tokens)])
        parts = [session.step([(1, tokens[start : start + 7]), (2, draw(9, start))])[0] for start in range(0, LENGTH, 7)]
        return torch.equal(torch.cat(parts), expected)

    assert on_ranks(2, act) == [True, True]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_the_mode_computes_what_transformers_computes(
    checkpoint: Callable[..., Path], reference: Callable[[Path], Any], architecture: str
) -> None:
    folder, tokens = checkpoint(architecture), draw(LENGTH, 2)
    (logits,) = open_deterministic(folder, torch.float32).step([(0, tokens)])
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
