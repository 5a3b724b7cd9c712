"""Images of DeepSeek-OCR 2, whose processor writes the whole image and its tiles apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from frame.checkpoint.model_config import read_model_config
from frame.interfaces.modality import ModalityContext
from frame.plugins.modalities.image import ImageModality, normalise
from tests.models.media_checkpoints import make_media_checkpoint
from tests.plugins.modalities.test_image import features, make, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_checkpoint(tmp_path_factory.mktemp("ocr") / "model", "DeepseekOcr2ForConditionalGeneration")


@pytest.mark.parametrize(("size", "tiles"), [((300, 200), 0), ((768, 768), 0), ((900, 400), 2), ((30, 800), 6)])
def test_features_and_tokens_are_the_processors(folder: Path, size: tuple[int, int], tiles: int) -> None:
    from transformers import AutoImageProcessor

    image, built = make(*size), ImageModality(ModalityContext(folder, read_model_config(folder)))
    data = save(image)
    layout, arrays = built.lay_out(built.read_size(data), {}), features(built, data)
    expected = AutoImageProcessor.from_pretrained(folder, backend="pil")(image, return_tensors="np")
    assert arrays["num_local_patches"].tolist() == [tiles]
    names = ["pixel_values", "pixel_values_local"][: 1 + bool(tiles)]
    for name in names:
        assert arrays[name].dtype == np.uint8
        assert np.abs(normalise(arrays, name) - expected[name]).max() < 1e-6
    assert "pixel_values_local" in names or "pixel_values_local" not in arrays
    assert layout.expansion == "<image>" * (144 * (1 + tiles) + 1)
    assert layout.patches == (1 + tiles) * (768 // 16) ** 2
