"""The image processor of Kimi-K2.5 without torchvision, which transformers' own needs: an image
that is not enlarged, padded to whole squares of patches.

Used by `frame.plugins.modalities.processor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def make_kimi_images() -> Any:
    """A class of image processors in transformers' PIL form."""
    from transformers.image_processing_backends import PilBackend
    from transformers.image_processing_utils import BatchFeature
    from transformers.image_utils import PILImageResampling, SizeDict
    from transformers.processing_utils import ImagesKwargs

    class KimiImagesKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
        max_patches: int
        patch_size: int
        merge_size: int

    class KimiImageProcessor(PilBackend):
        valid_kwargs = KimiImagesKwargs
        resample = PILImageResampling.BICUBIC
        image_mean = image_std = (0.5, 0.5, 0.5)
        size = SizeDict(max_height=512, max_width=512)  # patches
        do_resize = do_rescale = do_normalize = do_convert_rgb = True
        max_patches = 16_384
        patch_size = 14
        merge_size = 2

        def _preprocess(self, images: Sequence[np.ndarray], size: Any, return_tensors: Any, **settings: Any) -> Any:
            if not size.max_height or size.max_height != size.max_width or not settings["do_resize"]:
                raise TypeError("max_height and max_width are one number of patches, and do_resize is true")
            side, merge, patches, grids = settings["patch_size"], settings["merge_size"], [], []
            for image in images:
                height, width = image.shape[-2:]
                (height, width), padded = find_sizes(height, width, side, merge, settings["max_patches"], size.max_height)
                resized = self.resize(image, SizeDict(height=height, width=width), resample=settings["resample"])
                pixels = np.pad(resized, ((0, 0), (0, padded[0] - height), (0, padded[1] - width)))
                if settings["do_rescale"]:
                    pixels = self.rescale(pixels, settings["rescale_factor"])
                if settings["do_normalize"]:
                    pixels = self.normalize(pixels, settings["image_mean"], settings["image_std"])
                rows, columns = padded[0] // side, padded[1] // side
                squares = pixels.reshape(len(pixels), rows, side, columns, side).transpose(1, 3, 0, 2, 4)
                patches.append(squares.reshape(rows * columns, len(pixels), side, side))
                grids.append((1, rows, columns))
            return BatchFeature({"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids)}, tensor_type=return_tensors)

    return KimiImageProcessor


def find_sizes(height: int, width: int, side: int, merge: int, max_patches: int, max_edge: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of the image, and after padding. side: pixels of a patch's edge; merge:
    patches of the edge of a square that is one token; max_edge: patches."""
    count = max(1, height // side) * max(1, width // side)
    scale = min(1.0, math.sqrt(max_patches / count), max_edge * side / height, max_edge * side / width)
    height, width = (min(max(1, int(each * scale)), max_edge * side) for each in (height, width))
    square = merge * side
    return (height, width), (-(-height // square) * square, -(-width // square) * square)
