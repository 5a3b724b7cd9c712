"""Rotary positions of three components against those of transformers, in float32, and as the table
of a kernel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.glm4v import modeling_glm4v
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig
from transformers.models.glm4v_moe import modeling_glm4v_moe
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeTextConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from frame.core.errors import ConfigurationError
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.media import RotaryPositions
from frame.models.layers import Rotary, read_rope_parameters
from tests.model_configs import LLAMA

CPU = torch.device("cpu")
CONTEXT = BuildContext(device=CPU, dtype=torch.float32, tp=LocalGroup(), limits=Limits(4, 64, 256, 4))
BASE = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
# by name: module, class of its embedding, config, share of a head that turns, neighbours as pairs
CASES: dict[str, tuple[Any, str, Any, dict[str, Any], float, bool]] = {
    "qwen2_5_vl": (modeling_qwen2_5_vl, "Qwen2_5_VLRotaryEmbedding", Qwen2_5_VLTextConfig, {"mrope_section": [4, 6, 6]}, 1.0, False),
    "qwen3_vl": (
        modeling_qwen3_vl,
        "Qwen3VLTextRotaryEmbedding",
        Qwen3VLTextConfig,
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
        1.0,
        False,
    ),
    "qwen3_5": (
        modeling_qwen3_5,
        "Qwen3_5TextRotaryEmbedding",
        Qwen3_5TextConfig,
        {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
        0.25,
        False,
    ),
    "glm4v": (modeling_glm4v, "Glm4vTextRotaryEmbedding", Glm4vTextConfig, {"mrope_section": [2, 3, 3]}, 0.5, True),
    "glm4v_moe": (modeling_glm4v_moe, "Glm4vMoeTextRotaryEmbedding", Glm4vMoeTextConfig, {"mrope_section": [2, 3, 3]}, 0.5, False),
}


def make_rotary(turns: dict[str, Any], dim: int, interleaved: bool = False) -> Rotary:
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **turns}, "max_position_embeddings": 256}
    made = Rotary(CONTEXT, dim, read_rope_parameters(replace(LLAMA, config=config)), interleaved)
    made.process_weights_after_loading()
    return made


def make_batch(positions: torch.Tensor, *, has_components: bool = True) -> Any:
    extension = RotaryPositions(positions) if has_components else None
    return SimpleNamespace(positions=positions[0].clone(), get=lambda kind: extension)


@pytest.mark.parametrize("name", CASES)
def test_rotation_equals_that_of_transformers(name: str) -> None:
    module, embedding, config_class, turns, share, interleaved = CASES[name]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share, **turns}
    config = config_class(**BASE, head_dim=32, num_key_value_heads=2, rope_parameters=rope)
    positions = torch.randint(0, 200, (3, 9), generator=torch.Generator().manual_seed(1))
    q = torch.randn(1, 2, 9, 32, generator=torch.Generator().manual_seed(2))
    cos, sin = getattr(module, embedding)(config)(q, positions[:, None])
    expected = module.apply_rotary_pos_emb(q, q, cos, sin)[0][0].transpose(0, 1)
    rotary = make_rotary(turns, int(32 * share), interleaved)
    rows = rotary.prepare_rows(make_batch(positions))
    assert rows is not None
    torch.testing.assert_close(rotary.rotate(q[0].transpose(0, 1), rows), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("turns", [{"mrope_section": [4, 6, 6]}, {"mrope_section": [6, 5, 5], "mrope_interleaved": True}], ids=str)
def test_equal_components_have_the_bits_of_text(turns: dict[str, Any]) -> None:
    rotary, positions = make_rotary(turns, 32), torch.tensor([0, 3, 255]).expand(3, 3)
    rows = rotary.prepare_rows(make_batch(positions))
    assert rows is not None and torch.equal(rows, rotary.gather_rows(positions[0]))
    text = rotary.prepare_rows(make_batch(positions, has_components=False))
    assert text is not None and torch.equal(rows, text)


def test_kernels_read_the_rows_as_a_table() -> None:
    rotary, positions = make_rotary({"mrope_section": [4, 6, 6]}, 32), torch.randint(0, 200, (3, 7))
    rotary.fused = True
    batch, text = make_batch(positions), make_batch(positions, has_components=False)
    assert rotary.prepare_rows(text) is None
    assert rotary.choose_table(text, None) == (text.positions, rotary.table)
    rows = rotary.prepare_rows(batch)
    assert rows is not None and rows.is_contiguous()
    places, table = rotary.choose_table(batch, rows)
    assert table is rows and places.tolist() == list(range(7)) and places.dtype == torch.int64


def test_a_model_with_one_component_ignores_the_others() -> None:
    """A drafter's head may have positions of one component beside a target with three."""
    rotary, positions = make_rotary({}, 32), torch.randint(0, 200, (3, 7))
    rows = rotary.prepare_rows(make_batch(positions))
    assert rows is not None and torch.equal(rows, rotary.gather_rows(positions[0]))


def test_the_spelling_of_transformers_4() -> None:
    config = {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "max_position_embeddings": 256}
    made = Rotary(CONTEXT, 32, read_rope_parameters(replace(LLAMA, config=config)))
    assert made.sections == (4, 6, 6)


def test_sections_that_do_not_fill_a_head_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mrope_section \[4, 6, 5\] has 15 pairs, and heads turn 16"):
        make_rotary({"mrope_section": [4, 6, 5]}, 32)
