"""Images of Kimi-K2.5: sizes that transformers 5.24's processor computes, which needs torchvision
for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from frame.checkpoint.model_config import read_model_config
from frame.core.errors import ConfigurationError
from frame.interfaces.modality import ModalityContext
from frame.plugins.modalities.image import ImageModality, normalise
from frame.plugins.modalities.kimi_k25 import find_sizes
from tests.models.media_checkpoints import make_media_checkpoint
from tests.plugins.modalities.test_image import features, make, save

# height, width, edge of a patch, patches of an edge of a square, most patches, most of an edge;
# size of the image, and after padding
KNOWN = [
    ((1080, 1920, 14, 2, 16384, 512), (1080, 1920), (1092, 1932)),
    ((31, 97, 14, 2, 16384, 512), (31, 97), (56, 112)),
    ((7300, 9000, 14, 2, 16384, 512), (1615, 1991), (1624, 2016)),
    ((13, 5000, 14, 2, 64, 16), (1, 224), (28, 224)),
    ((1, 1, 14, 2, 16384, 512), (1, 1), (28, 28)),
    ((900, 640, 14, 2, 64, 16), (134, 95), (140, 112)),
    ((100, 8000, 14, 2, 16384, 512), (89, 7168), (112, 7168)),
    ((225, 224, 14, 2, 16384, 512), (225, 224), (252, 224)),
    ((301, 77, 4, 3, 1024, 16), (64, 16), (72, 24)),
]


@pytest.mark.parametrize(("arguments", "size", "padded"), KNOWN)
def test_sizes_are_the_processors(arguments: tuple[int, ...], size: tuple[int, int], padded: tuple[int, int]) -> None:
    assert find_sizes(*arguments) == (size, padded)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_checkpoint(tmp_path_factory.mktemp("kimi") / "model", "Kimi_K25ForConditionalGeneration")


def build(folder: Path) -> ImageModality:
    return ImageModality(ModalityContext(folder, read_model_config(folder)))


def test_patches_follow_row_by_row_and_the_rest_is_black(folder: Path) -> None:
    image = np.random.default_rng(1).integers(0, 256, (40, 30, 3), np.uint8)
    arrays = features(build(folder), save(Image.fromarray(image)))
    padded = np.zeros((56, 56, 3), np.uint8)
    padded[:40, :30] = image
    expected = np.stack([padded[y : y + 14, x : x + 14] for y in range(0, 56, 14) for x in range(0, 56, 14)]).transpose(0, 3, 1, 2)
    assert arrays["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert np.abs(normalise(arrays, "pixel_values") - (expected / 127.5 - 1)).max() < 1e-6


@pytest.mark.parametrize("size", [(90, 70), (31, 97), (101, 29), (640, 30), (30, 640), (28, 28), (1, 1), (900, 900)])
def test_the_layout_is_that_of_the_features(folder: Path, size: tuple[int, int]) -> None:
    built, data = build(folder), save(make(*size))
    layout, arrays = built.lay_out(built.read_size(data), {}), features(built, data)
    assert layout.patches == len(arrays["pixel_values"]) == arrays["image_grid_thw"].prod() <= 100
    assert layout.expansion == built.row_token * (layout.patches // 4) and not layout.grids


def test_names_of_the_publishers_files(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    stored = {"image_processor_type": "KimiK25VisionProcessor", "media_proc_cfg": {"patch_size": 14}, "processor_class": "KimiK25Processor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    built = build(tmp_path)
    layout = built.lay_out(built.read_size(save(make(1932, 1092))), {})
    assert layout.patches == 138 * 78 and layout.expansion.count("<|media_pad|>") == 69 * 39


def test_sizes_of_another_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**stored, "size": {"shortest_edge": 56}}))
    with pytest.raises(ConfigurationError, match="cannot use its settings"):
        build(tmp_path)
