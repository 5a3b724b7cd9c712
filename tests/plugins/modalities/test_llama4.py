"""Tiles of Llama 4 against what transformers 5.24's image processor makes with torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from frame.checkpoint.model_config import read_model_config
from frame.core.errors import ConfigurationError
from frame.interfaces.modality import ModalityContext
from frame.plugins.modalities.image import ImageModality
from frame.plugins.modalities.llama4 import find_grid, find_size, make_llama4_images
from tests.models.media_checkpoints import make_media_checkpoint
from tests.plugins.modalities.test_image import features, make, save

TILE = 336
# height, width, most tiles, whether they are filled; rows and columns of tiles, size of the image
KNOWN = [
    (31, 109, 3, False, (1, 1), (95, 336)),
    (146, 128, 9, True, (3, 3), (1008, 883)),
    (1589, 90, 12, True, (12, 1), (4032, 228)),
    (1953, 842, 14, False, (5, 2), (1558, 672)),
    (1077, 91, 3, True, (3, 1), (1008, 85)),
    (242, 88, 8, True, (4, 2), (1344, 488)),
    (1109, 237, 8, False, (4, 1), (1109, 237)),
    (184, 101, 5, True, (2, 2), (672, 368)),
    (54, 131, 11, True, (2, 5), (672, 1630)),
    (502, 162, 2, True, (2, 1), (672, 216)),
    (114, 1382, 10, True, (1, 10), (277, 3360)),
    (545, 210, 15, True, (6, 2), (1744, 672)),
    (66, 2498, 13, False, (1, 8), (66, 2498)),
    (113, 227, 16, True, (3, 5), (836, 1680)),
    (2, 22, 15, True, (1, 11), (336, 3696)),
    (1, 1024, 15, False, (1, 4), (1, 1024)),
    (46, 3, 12, False, (1, 1), (336, 21)),
]


@pytest.mark.parametrize(("height", "width", "max_tiles", "fills", "grid", "size"), KNOWN)
def test_grids_and_sizes_are_the_processors(
    height: int, width: int, max_tiles: int, fills: bool, grid: tuple[int, int], size: tuple[int, int]
) -> None:
    assert find_grid(height, width, TILE, max_tiles, fills=fills) == grid
    assert find_size(height, width, TILE, grid, fills=fills) == size


def test_sizes_have_the_rounding_of_float32() -> None:
    assert find_size(200, 300, 56, (3, 5), fills=False) == (168, 251)


def test_numbers_are_rounded_to_bfloat16_as_in_transformers() -> None:
    image = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    pixels = make_llama4_images()(size={"height": 16, "width": 16})(Image.fromarray(image), return_tensors="np")["pixel_values"]
    expected = (torch.arange(256).bfloat16() * (1 / 255)).sub(0.5).div(0.5).float()
    assert np.array_equal(pixels[0], np.broadcast_to(expected.numpy().reshape(16, 16), (3, 16, 16)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ImageModality:
    folder = make_media_checkpoint(tmp_path_factory.mktemp("llama4") / "model", "Llama4ForConditionalGeneration")
    return ImageModality(ModalityContext(folder, read_model_config(folder)))


def test_tiles_follow_row_by_row_and_the_whole_image_is_the_last(built: ImageModality) -> None:
    image = np.zeros((112, 112, 3), np.uint8)
    for number, place in enumerate((np.s_[:56, :56], np.s_[:56, 56:], np.s_[56:, :56], np.s_[56:, 56:])):
        image[place] = 60 * (number + 1)
    pixels = features(built, save(Image.fromarray(image)))["pixel_values"]
    assert pixels.shape == (5, 3, 56, 56)
    levels = (pixels[:4].mean((1, 2, 3)) + 1) * 127.5
    assert np.abs(levels - [60, 120, 180, 240]).max() < 1
    assert abs(pixels[4, :, :20, :20].mean() - pixels[0].mean()) < 0.01 > abs(pixels[4, :, 36:, 36:].mean() - pixels[3].mean())


@pytest.mark.parametrize("size", [(90, 70), (31, 97), (101, 29), (640, 30), (30, 640), (28, 28), (1, 1), (900, 900)])
def test_the_layout_is_that_of_the_features(built: ImageModality, size: tuple[int, int]) -> None:
    data = save(make(*size))
    layout, arrays = built.lay_out(built.read_size(data), {}), features(built, data)
    tiles = len(arrays["pixel_values"])
    rows, columns = (int(each) for each in arrays["aspect_ratios"][0])
    assert tiles == rows * columns + (rows * columns > 1)
    assert layout.expansion.count(built.row_token) == 4 * tiles and layout.patches == 16 * tiles
    separators = [layout.expansion.count(f"<|tile_{axis}_separator|>") for axis in "xy"]
    assert separators == ([rows * (columns - 1), rows] if tiles > 1 else [0, 0])
    assert built.placeholder in layout.expansion and not layout.grids


def test_tiles_that_are_no_squares_are_refused(built: ImageModality) -> None:
    options = {"size": {"height": 56, "width": 84}}
    with pytest.raises(ConfigurationError, match="tiles are squares"):
        ImageModality(ModalityContext(built.context.folder, built.context.model_config, processor_options=options))
