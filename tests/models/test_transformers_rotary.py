"""Rotations of the fallback depend on no other request of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frame.core.errors import ConfigurationError
from frame.models.transformers_rotary import RotaryTables
from frame.testing.checkpoints import TINY
from tests.models.harness import open_session
from tests.models.test_logits import prompt, wanted

FACTORS = {"rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "factor": 4.0, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
# PhiMoE scales its cosines and sines by the length of a step too, in its own code
MOE = {"num_local_experts": 4, "rope_parameters": {**LONG, "short_mscale": 1.1, "long_mscale": 1.3}}
SERVED = [
    ("GraniteForCausalLM", {"rope_parameters": LONG}, 64),
    ("GraniteForCausalLM", {"rope_parameters": LONG}, 256),
    ("PhimoeForCausalLM", MOE, 64),
    ("PhimoeForCausalLM", MOE, 256),
    ("GraniteForCausalLM", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}, 64),
    ("GraniteForCausalLM", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}, 256),
]


@pytest.mark.parametrize(("architecture", "overrides", "limit"), SERVED)
def test_logits_beside_another_request(
    architecture: str,
    overrides: dict[str, Any],
    limit: int,
    checkpoint: Callable[..., Path],
    reference: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A short prompt as transformers has it alone where the short factors are chosen, and always
    the same beside a long one; a long prompt as transformers has it."""
    monkeypatch.setattr("frame.testing.checkpoints.TINY", {**TINY, "PhimoeForCausalLM": ("phimoe", {})})
    folder = checkpoint(architecture, **overrides)
    kept, long = prompt(20), prompt(min(limit, 100))

    def run(*rows: tuple[int, list[int]]) -> list[torch.Tensor]:
        return open_session(folder, model="transformers", max_context=limit).step(list(rows))

    (alone,) = run((0, kept))
    beside, far = run((0, kept), (1, long))
    torch.testing.assert_close(beside, alone, atol=1e-4, rtol=1e-4)
    dynamic = overrides["rope_parameters"] is DYNAMIC
    if dynamic or limit == 64:
        torch.testing.assert_close(alone, wanted(reference(folder), kept), atol=1e-4, rtol=1e-4)
    if not dynamic or limit == 64:  # transformers turns earlier tokens of a `dynamic` prompt by its length
        torch.testing.assert_close(far, wanted(reference(folder), long), atol=1e-4, rtol=1e-4)


def test_the_native_table_of_dynamic_scaling(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("LlamaForCausalLM", rope_parameters=DYNAMIC, max_position_embeddings=64)
    rows = [(0, prompt(100))]
    native, ours = (open_session(folder, model=model, max_context=256).step(rows)[0] for model in (None, "transformers"))
    torch.testing.assert_close(ours, native, atol=1e-4, rtol=1e-4)


class _ByKind(nn.Module):
    """A rotary module of two kinds of layers, whose rows are complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rope_type = {"full_attention": "longrope", "sliding_attention": "default"}
        self.register_buffer("inv_freq", torch.ones(1))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> torch.Tensor:
        scale = position_ids.max() + 1 if self.rope_type[layer_type] == "longrope" else 1
        return (position_ids * scale)[..., None] * torch.ones(1, dtype=torch.complex64)


def test_kinds_of_layers_and_positions_past_the_limit() -> None:
    tables = RotaryTables(_ByKind(), 4, torch.float32)
    places = torch.tensor([[2, 0, 7]])
    assert tables(torch.empty(1), places, "full_attention")[0, :, 0].tolist() == [8, 0, 12]
    assert tables(torch.empty(1), places, layer_type="sliding_attention")[0, :, 0].tolist() == [2, 0, 3]
    with pytest.raises(ConfigurationError, match="type longrope or dynamic for positions of one component only"):
        tables(torch.empty(1), places.expand(3, 1, 3), "full_attention")
