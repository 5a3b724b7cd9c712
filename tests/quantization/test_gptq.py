"""Fields of GPTQ configurations that test_formats.py does not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import FormatContext
from frame.quantization.gptq import Gptq, GptqLayer
from frame.quantization.plain import PlainLayer


def read(name: str, **fields: Any) -> Any:
    return Gptq(FormatContext(torch.float32, {"bits": 4, **fields})).describe_layer(name, "linear")


@pytest.mark.parametrize(
    ("fields", "lift"),
    [
        ({}, 1),
        ({"format": "gptq"}, 1),
        ({"format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, 1),
        ({"checkpoint_format": None, "format": "gptq_v2"}, 0),
    ],
)
def test_either_field_names_the_format(fields: dict[str, Any], lift: int) -> None:
    assert read("model.layers.0.mlp.up_proj", **fields).lift == lift


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(CheckpointError, match="quantization_config.format is 'marlin'"):
        read("model.layers.0.mlp.up_proj", format="marlin")


@pytest.mark.parametrize(
    ("block", "name", "kind"),
    [
        ("mlp.up_proj", "model.layers.0.mlp.up_proj", GptqLayer),
        ("mlp.up_proj", "model.layers.0.mlp.down_proj", PlainLayer),
        ("self_attn.qkv_proj", "model.layers.0.self_attn.k_proj", GptqLayer),
        ("mamba.in_proj", "model.layers.0.mamba.in_proj_dt", GptqLayer),
        ("mamba.in_proj", "model.layers.0.mamba.out_proj", PlainLayer),
    ],
)
def test_blocks_name_layers_that_are_stored_as_one(block: str, name: str, kind: type) -> None:
    assert isinstance(read(name, modules_in_block_to_quantize=[[block]]), kind)


def test_a_zero_point_of_zero_borrows_from_the_next() -> None:
    """GPTQModel subtracts 1 from the zero points of a word together."""
    stored, points = 0, [3, 0, 7, 0, 0, 15, 1, 8]
    for place, point in enumerate(points):
        stored |= point << 4 * place
    word = (stored - 0x11111111) % (1 << 32)
    tensors = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[word]], dtype=torch.int64).to(torch.int32),
        "scales": torch.ones(1, 8),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    weight = GptqLayer(torch.float32, 4, 0, ordered=False, lift=1).to_canonical(tensors, 32)
    assert weight.dequantize(torch.float32)[:, 0].tolist() == [-float(point) for point in points]
