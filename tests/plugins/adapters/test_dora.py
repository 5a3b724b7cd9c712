"""DoRA against PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frame.interfaces.adapter import AdapterContext, AdapterError
from frame.plugins.adapters.dora import DoraFormat
from frame.plugins.adapters.lora import LoraFormat
from tests.plugins.adapters.peft_models import Made, check_merged, make_adapter, read

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "use_dora": True}
TENSORS = {f"{LAYER}.lora_A.weight": torch.ones(2, 4), f"{LAYER}.lora_B.weight": torch.ones(6, 2)}


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 3}}, {"target_modules": ["lm_head", "o_proj"]}], ids=str
)
def test_deltas_are_what_peft_merges(tmp_path: Path, options: dict[str, Any]) -> None:
    made = make_adapter(tmp_path, "llama", **{"target_modules": "all-linear", "use_dora": True, "r": 4, "lora_alpha": 6} | options)
    deltas = check_merged(DoraFormat, made)
    assert all(delta.output_norm is not None and delta.output_scale is None for delta in deltas.values())


@pytest.mark.parametrize("end", ["", ".default", ".weight", ".default.weight"])
def test_names_of_magnitudes(end: str) -> None:
    magnitudes = torch.arange(6.0)
    (delta,) = read(DoraFormat, Made(CONFIG, TENSORS | {f"{LAYER}.lora_magnitude_vector{end}": magnitudes}, {}, {})).values()
    assert delta.output_norm is not None
    assert torch.equal(delta.output_norm, magnitudes)


def test_embeddings_are_refused(tmp_path: Path) -> None:
    made = make_adapter(tmp_path, "llama", target_modules=["embed_tokens"], use_dora=True)
    with pytest.raises(AdapterError, match=r"model.embed_tokens' is adapted by DoRA, but the norms are those of columns"):
        read(DoraFormat, made)


@pytest.mark.parametrize(
    ("tensors", "config", "sentence"),
    [
        ({}, {}, "q_proj' has no lora_magnitude_vector: save the adapter again"),
        ({f"{LAYER}.lora_magnitude_vector": torch.ones(5)}, {}, r"has the shape \[5\], not \[6\]"),
        ({f"{LAYER}.lora_magnitude_vector": torch.full((6,), float("inf"))}, {}, "no finite numbers"),
        ({}, {"target_parameters": ["experts.x"]}, "use_dora and target_parameters exclude each other"),
        ({}, {"alora_invocation_tokens": [1]}, "use_dora and alora_invocation_tokens exclude each other"),
        ({}, {"use_dora": False}, "use_dora is False: set adapters.format to lora"),
    ],
)
def test_refusals(tensors: dict[str, torch.Tensor], config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AdapterError, match=sentence):
        read(DoraFormat, Made(CONFIG | config, TENSORS | tensors, {}, {}))


def test_lora_does_not_read_dora() -> None:
    with pytest.raises(AdapterError, match="use_dora is True: set adapters.format to dora"):
        LoraFormat(AdapterContext(torch.float32)).read_config(CONFIG)
