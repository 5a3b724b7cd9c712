"""`ImageModality`: images by the checkpoint's image processor in its PIL form (arXiv 2409.12191 and
others name what an image becomes).

What an item becomes in the prompt is computed by the same processor, whose resizing then makes no
pixels; so header and decoder agree. Must not know a model by name.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import re
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.errors import ConfigurationError
from frame.interfaces.modality import ITEM_NUMBER, MediaError, MediaLayout, MediaSize, ModalityContext
from frame.plugins.modalities.pictures import decode_picture, read_picture_size
from frame.plugins.modalities.processor import (
    MAX_RATIO,
    ProcessorModality,
    as_arrays,
    build_processor,
    check_names,
    find_row_token,
    load_image_processor,
    load_tokenizer,
    refuse_unknown,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from pydantic import BaseModel

_log = logging.getLogger(__name__)
_PIXELS = "pixel_values"
_DETAILS = ("auto", "high", "low")
_LOW_EDGE = 512  # pixels; longest edge of an image with the detail "low"
_NO_SQUARE = "the image is too narrow, too flat or too small for the model; send one nearer to a square"
_TOLERANCE = 1e-6  # of bytes that the encoder normalises, against the processor's numbers
_NUMBERED = "use_image_id"
_OF_THE_MODEL = {"downsample_mode"}  # which the encoder reads in config.json
_SAMPLES = ((96, 160), (200, 64), (33, 47))  # sizes of the images that are compared


class ImageModality(ProcessorModality):
    """Images for one checkpoint. Raises ConfigurationError for one whose processor transformers
    cannot build, or that has no image token."""

    def __init__(self, context: ModalityContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        tokenizer = load_tokenizer(context.folder)
        images = load_image_processor(context.folder)
        self._processor = build_processor(context.folder, context.model_config, tokenizer, image_processor=images, video_processor=images)
        placeholder = getattr(self._processor, "image_token", None)
        if not isinstance(placeholder, str):
            raise ConfigurationError(f"the processor of {context.folder} has no image token; media.enabled: false serves its text.")
        self._placeholder = placeholder
        self._row_token = find_row_token(context.model_config, tokenizer, "image", placeholder)
        check_names(context.processor_options, set(images.valid_kwargs.__annotations__) - _OF_THE_MODEL, "image processor")
        merged = self._processor._merge_kwargs(  # noqa: SLF001 - the defaults of a processor are nowhere else
            self._processor.valid_processor_kwargs,
            tokenizer_init_kwargs=getattr(tokenizer, "init_kwargs", {}),
            images_kwargs=dict(context.processor_options),
        )
        self._arguments: dict[str, Any] = {**merged["images_kwargs"], "return_tensors": "np", "do_convert_rgb": False}
        self._prefix = self._find_prefix(merged)
        self._shapes = copy.copy(self._processor)
        self._shapes.image_processor = _without_pixels(_with_byte_patches(images))
        self._has_grids = context.model_config.has_mrope
        self._bytes = copy.copy(self._processor)
        self._bytes.image_processor = _with_byte_patches(images)
        self._scaling = self._find_scaling()
        if self._scaling is None and self._bytes.image_processor is not images:  # its patches have another order
            self._bytes = self._processor
            self._scaling = self._find_scaling()

    def read_size(self, data: bytes) -> MediaSize:
        return read_picture_size(data, self.context.limits)

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        height, width = _reduced(size.height, size.width, options)
        blank = np.broadcast_to(np.uint8(0), (3, height, width))
        outputs, expansion = self._process(self._shapes, blank, {"input_data_format": "channels_first", **self._raw})
        if self._row_token not in expansion:  # its patches are fewer than a merged one has
            raise MediaError(_NO_SQUARE)
        expansion = self._prefix + expansion
        arrays = as_arrays(outputs)
        grid = arrays.get("image_grid_thw")
        if grid is None:
            patches = sum(self._count_patches(pixels) for name, pixels in arrays.items() if name.startswith(_PIXELS))
            return MediaLayout(expansion, patches=patches)
        frames, rows, columns = (int(each) for each in grid[0])
        merge = self._processor.image_processor.merge_size
        runs = len(re.findall(f"(?:{re.escape(self._row_token)})+", expansion))
        grids = ((frames, rows // merge, columns // merge),) if self._has_grids and runs == 1 else ()
        return MediaLayout(expansion, grids, patches=frames * rows * columns)

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        image = decode_picture(data, self.context.limits)
        if (image.width, image.height) != (size.width, size.height):
            raise MediaError("the file's header says another size than its pixels have; send it again as PNG")
        height, width = _reduced(size.height, size.width, options)
        if (height, width) != (size.height, size.width):
            image = image.resize((width, height))
        return self.process(image)

    def process(self, image: Image) -> dict[str, np.ndarray]:
        """The features of a picture in mode RGB, as bytes if the processor allows it."""
        if self._scaling is None:
            return as_arrays(self._process(self._processor, image, {})[0])
        arrays = as_arrays(self._process(self._bytes, image, self._raw)[0])
        for name in [name for name in arrays if name.startswith(_PIXELS)]:  # some processors write those of tiles apart
            arrays[name] = self._arrange(arrays[name]).astype(np.uint8, copy=False)
            arrays |= {f"{name}.{part}": numbers for part, numbers in self._scaling.items()}
        return arrays

    def _process(self, processor: Any, image: Any, arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """-> the processor's outputs, and the expansion of the placeholder."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outputs, texts = processor._process_images([image], **self._arguments | dict(arguments))  # noqa: SLF001 - the step before tokenizing
        except (ValueError, ZeroDivisionError) as error:
            _log.info("the image processor refuses an image: %s", error)
            raise MediaError(_NO_SQUARE) from None
        return outputs, texts[0]

    @property
    def _raw(self) -> dict[str, Any]:
        """Arguments that leave bytes as they are."""
        return {"do_rescale": False, "do_normalize": False}

    def _arrange(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels with their channels on axis 1: [tiles, channels, height, width], or of patches
        [patches, channels, 1, height, width], which transformers flattens, a frame doubled in
        time."""
        if pixels.ndim == 2:
            side = self._processor.image_processor.patch_size
            return pixels.reshape(len(pixels), 3, -1, side, side)[:, :, :1]
        return pixels[0] if pixels.ndim == 5 else pixels  # of an image's tiles

    def _find_prefix(self, merged: Mapping[str, Any]) -> str:
        """What MiniCPM-V's processor writes before an image with all of them at hand: a number."""
        processor = self._processor
        choices = (merged["images_kwargs"].get(_NUMBERED), merged.get(_NUMBERED), getattr(processor, f"default_{_NUMBERED}", False))
        if not next(choice for choice in choices if choice is not None):
            return ""
        return f"{processor.image_id_start_token}{ITEM_NUMBER}{processor.image_id_end_token}"

    def _find_scaling(self) -> dict[str, np.ndarray] | None:
        """The factors and summands of bytes. None: bytes and these do not give the processor's
        numbers, which are then the features."""
        images = self._processor.image_processor
        settings = {name: self._arguments.get(name, getattr(images, name, None)) for name in ("do_rescale", "do_normalize")}
        factor = float(self._arguments.get("rescale_factor") or images.rescale_factor) if settings["do_rescale"] else 1.0
        mean, deviation = np.zeros(3), np.ones(3)
        if settings["do_normalize"]:
            mean = np.broadcast_to(np.asarray(self._arguments.get("image_mean") or images.image_mean, np.float64), 3)
            deviation = np.broadcast_to(np.asarray(self._arguments.get("image_std") or images.image_std, np.float64), 3)
        scale, offset = (factor / deviation).astype(np.float32), (-mean / deviation).astype(np.float32)
        if len(set(scale.tolist())) == len(set(offset.tolist())) == 1:  # then channels may have any place
            scale, offset = scale[:1], offset[:1]
        self._scaling = {"scale": scale, "offset": offset}
        try:
            return self._scaling if all(self._scales(np.random.default_rng(0), *size) for size in _SAMPLES) else None
        except (AttributeError, KeyError, ValueError):  # patches in another order
            return None
        except TypeError as error:  # a setting that transformers reads and does not check
            sentence = f"the image processor of {self.context.folder} cannot use its settings or those of media.processor_options"
            raise ConfigurationError(f"{sentence}: {str(error)[:200]}; give `size` the keys that preprocessor_config.json has.") from error

    def _scales(self, generator: np.random.Generator, height: int, width: int) -> bool:
        from PIL import Image

        image = Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))
        expected = as_arrays(self._process(self._processor, image, {})[0])[_PIXELS]
        arrays = self.process(image)
        values = normalise(arrays, _PIXELS)
        expected = self._arrange(expected)
        return values.shape == expected.shape and bool(np.abs(values - expected).max() < _TOLERANCE)

    def _count_patches(self, pixels: np.ndarray) -> int:
        """Positions of the encoder for these pixels."""
        if pixels.ndim < 4:
            return math.prod(pixels.shape[:-1])
        vision = self.context.model_config.full_config.get("vision_config") or {}
        side = vision.get("patch_size") or (vision.get("sam_config") or {}).get("patch_size") or 14
        side = side if isinstance(side, int) else side[0]
        return math.prod(pixels.shape[:-3]) * (pixels.shape[-2] // side) * (pixels.shape[-1] // side)


def normalise(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """What the model's encoder does with bytes, see `Modality.compute_features`."""
    values = arrays[name].astype(np.float32)
    shape = (1, -1, *(1,) * (values.ndim - 2))
    return values * arrays[f"{name}.scale"].reshape(shape) + arrays[f"{name}.offset"].reshape(shape)


def _reduced(height: int, width: int, options: Mapping[str, Any]) -> tuple[int, int]:
    """The size that the processor gets, by a part's options. Raises MediaError."""
    refuse_unknown(options, ("detail",))
    detail = options.get("detail", "auto")
    if detail not in _DETAILS:
        raise MediaError(f"detail is {str(detail)[:40]!r}; it must be auto, high or low")
    if max(height, width) > MAX_RATIO * min(height, width):  # of which some processors make patches without a limit
        raise MediaError(_NO_SQUARE)
    ratio = _LOW_EDGE / max(height, width)
    if detail != "low" or ratio >= 1:
        return height, width
    return max(1, round(height * ratio)), max(1, round(width * ratio))


def _with_byte_patches(images: Any) -> Any:
    """A copy of an image processor that divides bytes into patches in one copy; transformers makes
    numbers of 32 bits first. The processor itself if it divides in another way."""
    base = type(images)
    method = getattr(base, "patchify", None)
    if method is None or list(inspect.signature(method).parameters)[-4:] != ["image", "patch_size", "merge_size", "temporal_patch_size"]:
        return images

    def patchify(_: Any, image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int) -> tuple[np.ndarray, int, int]:
        channels, rows, columns = len(image), image.shape[1] // patch_size, image.shape[2] // patch_size
        squares = image.reshape(channels, rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size)
        return squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1), rows, columns

    changed = copy.copy(images)
    changed.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, "patchify": patchify})
    return changed


def _without_pixels(images: Any) -> Any:
    """A copy of an image processor whose resizing gives zeros of the right size, which take no
    memory."""
    from transformers import image_processing_backends as backends

    class Shapes(backends.PilBackend):
        def resize(self, image: np.ndarray, size: Any, *_: Any, **__: Any) -> np.ndarray:
            channels, height, width = image.shape
            if size.shortest_edge and size.longest_edge:
                height, width = backends.get_size_with_aspect_ratio((height, width), size.shortest_edge, size.longest_edge)
            elif size.shortest_edge:
                arguments = {"size": size.shortest_edge, "default_to_square": False, "input_data_format": "channels_first"}
                height, width = backends.get_resize_output_image_size(image, **arguments)
            elif size.max_height and size.max_width:
                height, width = backends.get_image_size_for_max_height_width((height, width), size.max_height, size.max_width)
            elif size.height and size.width:
                height, width = size.height, size.width
            else:
                raise ValueError("the size has no keys that the image processor reads")
            return np.broadcast_to(np.uint8(0), (channels, height, width))

    base = type(images)
    blank = copy.copy(images)
    changes: dict[str, Any] = {"__module__": base.__module__}
    if (find_size := getattr(sys.modules[base.__module__], "get_aspect_ratio_preserving_size", None)) is not None:

        def resize(image: np.ndarray, resample: Any = None, **sizes: int) -> np.ndarray:
            height, width = find_size(height=image.shape[-2], width=image.shape[-1], **sizes)
            return np.broadcast_to(np.uint8(0), (len(image), height, width))

        changes["aspect_ratio_preserving_resize"] = staticmethod(resize)
    if issubclass(base, backends.PilBackend):
        blank.__class__ = type(base.__name__, (base, Shapes), changes)
    return blank
