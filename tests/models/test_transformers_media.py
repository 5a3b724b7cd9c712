"""Models with encoders in the fallback: their texts, their weights, and what is refused. Prompts
with images are compared in tests/media/reference/test_fallback.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Blip2Config, Blip2ForConditionalGeneration

from frame.core.errors import ConfigurationError
from frame.models.transformers_media import find_decoder
from tests.models.harness import open_session
from tests.models.media_checkpoints import load_media_reference, make_media_checkpoint
from tests.models.test_logits import prompt, wanted
from tests.quantization.test_formats import logits_of


def test_texts_have_the_logits_of_transformers(tmp_path: Path) -> None:
    """The encoders are dropped where media are not served."""
    folder = make_media_checkpoint(tmp_path, "VipLlavaForConditionalGeneration")
    session = open_session(folder, model="transformers")
    names = {name for name, _ in session.model.named_parameters()}  # type: ignore[attr-defined]
    assert names
    assert not any("vision" in name or "projector" in name for name in names)
    tokens = prompt(20, 1)
    torch.testing.assert_close(session.step([(0, tokens)])[0], wanted(load_media_reference(folder), tokens), atol=1e-4, rtol=1e-4)


def test_positions_whose_sections_have_a_default_are_refused(tmp_path: Path) -> None:
    """config.json need not name them; a class that finds positions by images does."""
    folder = make_media_checkpoint(tmp_path, "Glm4vForConditionalGeneration")
    config = json.loads((folder / "config.json").read_text())
    for section in (config, config["text_config"]):
        section.get("rope_parameters", {}).pop("mrope_section", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="positions that depend on where an image is"):
        open_session(folder, model="transformers")


def test_a_model_without_a_base_model_is_refused() -> None:
    """BLIP-2's class with the head is no wrapper of its class without."""
    config = Blip2Config(text_config={"model_type": "opt", "num_hidden_layers": 1}, qformer_config={"num_hidden_layers": 1})
    config.vision_config.num_hidden_layers = 1
    with torch.device("meta"):
        model = Blip2ForConditionalGeneration(config)
    with pytest.raises(ConfigurationError, match="Blip2ForConditionalGeneration has no base model with a decoder"):
        find_decoder(model)


def test_an_encoder_without_fused_attention(tmp_path: Path) -> None:
    """GOT-OCR 2.0's tower has relative positions, which transformers computes eagerly alone."""
    folder = make_media_checkpoint(tmp_path, "GotOcr2ForConditionalGeneration")
    tokens = prompt(20, 1)
    session = open_session(folder, model="transformers")
    torch.testing.assert_close(session.step([(0, tokens)])[0], wanted(load_media_reference(folder), tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", [None, "int8"])
def test_the_decoder_is_quantized_as_a_native_one(method: str | None, tmp_path: Path) -> None:
    """Under the names of transformers 4, in which its version 5 stores this model."""
    folder = make_media_checkpoint(tmp_path, "LlavaForConditionalGeneration")
    names = {} if method is None else {"quantization": method, "gemm_kernel": "torch"}
    native, ours = (logits_of(open_session(folder, model=model, **names)) for model in (None, "transformers"))
    torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Gemma3ForConditionalGeneration", "compute attention or positions that depend on where an image is"),
        ("Qwen2_5_VLForConditionalGeneration", "compute attention or positions that depend on where an image is"),
        ("Qwen3VLForConditionalGeneration", "place the further rows that this one computes"),
        ("Qwen2AudioForConditionalGeneration", "find its encoder of images"),
    ],
)
def test_what_is_not_placed_is_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    folder = make_media_checkpoint(tmp_path, architecture)
    with pytest.raises(ConfigurationError, match=f"{architecture} is a language model with encoders .* the fallback does not {reason}"):
        open_session(folder, model="transformers")
