"""The image processor of Llama 4 without torchvision, which transformers' own needs: an image
becomes tiles of one size, and a smaller form of the whole image as the last tile.

Used by `frame.plugins.modalities.processor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def make_llama4_images() -> Any:
    """A class of image processors in transformers' PIL form."""
    from transformers.image_processing_backends import PilBackend
    from transformers.image_processing_utils import BatchFeature
    from transformers.image_utils import PILImageResampling, SizeDict
    from transformers.processing_utils import ImagesKwargs

    class Llama4ImagesKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
        max_patches: int  # tiles
        resize_to_max_canvas: bool

    class Llama4ImageProcessor(PilBackend):
        valid_kwargs = Llama4ImagesKwargs
        resample = PILImageResampling.BILINEAR
        image_mean = image_std = (0.5, 0.5, 0.5)
        size = SizeDict(height=336, width=336)  # of a tile
        do_resize = do_rescale = do_normalize = do_convert_rgb = True
        max_patches = 16
        resize_to_max_canvas = False

        def _preprocess(self, images: Sequence[np.ndarray], size: Any, return_tensors: Any, **settings: Any) -> Any:
            if size.height != size.width or not settings["do_resize"]:
                raise TypeError("tiles are squares, and do_resize is true")
            tiles, grids = [], []
            for image in images:
                tile, fills, (height, width) = size.height, settings["resize_to_max_canvas"], image.shape[-2:]
                grid = find_grid(height, width, tile, settings["max_patches"], fills=fills)
                height, width = find_size(height, width, tile, grid, fills=fills)
                resized = self.resize(image, SizeDict(height=height, width=width), resample=settings["resample"])
                padded = np.pad(resized, ((0, 0), (0, grid[0] * tile - height), (0, grid[1] * tile - width)))
                parts = padded.reshape(-1, grid[0], tile, grid[1], tile).transpose(1, 3, 0, 2, 4).reshape(-1, len(padded), tile, tile)
                if len(parts) > 1:
                    parts = np.concatenate([parts, self.resize(image, size, resample=settings["resample"])[None]])
                tiles.append(_normalise(parts, settings))
                grids.append(grid)
            return BatchFeature({"pixel_values": np.concatenate(tiles), "aspect_ratios": np.array(grids)}, tensor_type=return_tensors)

    return Llama4ImageProcessor


def find_grid(height: int, width: int, tile: int, max_tiles: int, *, fills: bool) -> tuple[int, int]:
    """Rows and columns of tiles: those that enlarge the image least, or else reduce it least, with
    the least padding. fills: those that enlarge it most."""
    grids = np.array([(rows, columns) for rows in range(1, max_tiles + 1) for columns in range(1, max_tiles // rows + 1)])
    scales = ((grids * tile).astype(np.float32) / np.array([height, width], np.float32)).min(1)
    larger = scales[scales >= 1]
    chosen = grids[scales == (larger.min() if len(larger) and not fills else scales.max())]
    rows, columns = chosen[chosen.prod(1).argmin()]
    return int(rows), int(columns)


def find_size(height: int, width: int, tile: int, grid: tuple[int, int], *, fills: bool) -> tuple[int, int]:
    """Height and width of the image within the grid's pixels. An image is not enlarged beyond a
    tile, unless it fills the grid. transformers computes with the grid's pixels in float32."""
    rows, columns = (np.float32(each * tile) for each in grid)
    max_rows: float | np.float32 = rows if fills or rows < max(height, tile) else float(max(height, tile))
    max_columns: float | np.float32 = columns if fills or columns < max(width, tile) else float(max(width, tile))
    by_width, by_height = max_columns / width, max_rows / height
    if by_width < by_height:
        return max(min(math.floor(height * by_width), int(max_rows)), 1), int(max_columns)
    return int(max_rows), max(min(math.floor(width * by_height), int(max_columns)), 1)


def _normalise(tiles: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    """In bfloat16, as the model was trained; each step is rounded."""
    if settings["do_rescale"]:
        tiles = _round(tiles * np.float32(settings["rescale_factor"]))
    if settings["do_normalize"]:
        mean, deviation = (_round(np.asarray(settings[name]).reshape(-1, 1, 1)) for name in ("image_mean", "image_std"))
        tiles = _round(_round(tiles - mean) / deviation)
    return tiles


def _round(numbers: np.ndarray) -> np.ndarray:
    """To the nearest number of bfloat16, float32."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return rounded
