"""The batch-invariant mode: the bits of a token's logits are those of the token computed alone,
whatever the batch, the chunks and the phase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.adapters.invariant_deltas import InvariantDeltas
from tests.models.harness import Session, open_session
from tests.models.layers.random_adapters import RandomAdapters, RandomDelta, follow_rows
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
    ("DeepseekV32ForCausalLM", {}),
    ("GlmMoeDsaForCausalLM", {}),
    ("Qwen3NextForCausalLM", {}),
    ("Qwen3_5ForCausalLM", {}),
    ("KimiLinearForCausalLM", {}),
    ("NemotronHForCausalLM", {}),
    ("FalconH1ForCausalLM", {}),
    ("GptOssForCausalLM", {}),
    ("Qwen2MoeForCausalLM", {}),
    ("Glm4MoeForCausalLM", {}),
    ("MiniMaxM2ForCausalLM", {}),
    ("CohereForCausalLM", {}),
    ("Gemma3ForCausalLM", {}),
    ("Gemma2ForCausalLM", {}),
    ("Llama4ForCausalLM", {}),
    ("Gemma4ForCausalLM", {}),
]
LENGTH, OTHERS = 75, 6


def open_deterministic(folder: Path, dtype: torch.dtype) -> Session:
    return open_session(folder, dtype=dtype, attention="torch_native", deterministic=True)


def draw(length: int, seed: int) -> list[int]:
    return torch.randint(6, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM", "FalconH1ForCausalLM"])
def test_bits_of_rows_with_adapters(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """A row with an adapter and one without, alone and among rows with and without, on one rank and
    on two."""
    monkeypatch.setattr(RandomDelta, "operations", InvariantDeltas())
    tokens, places = draw(LENGTH, 1), {slot: slot % 3 - 1 for slot in range(6)}

    def open_adapted(group: Any) -> Session:
        adapters = RandomAdapters()
        session = open_session(checkpoint(architecture), group, attention="torch_native", deterministic=True, adapters=adapters)
        return follow_rows(session, adapters, places)  # type: ignore[no-any-return]

    def act(group: Any = None) -> bool:
        alone = [open_adapted(group).step([(slot, tokens)])[0] for slot in range(3)]
        session = open_adapted(group)
        steps = [session.step([(slot, tokens[at : at + 11]) for slot in range(6)]) for at in range(0, LENGTH, 11)]
        return all(torch.equal(torch.cat([step[slot] for step in steps]), alone[slot % 3]) for slot in range(6))

    assert act()
    assert on_ranks(2, act) == [True, True]


@pytest.mark.parametrize(
    "architecture",
    [
        *("LlamaForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"),
        *("Qwen3NextForCausalLM", "NemotronHForCausalLM", "GptOssForCausalLM"),
    ],
)
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
