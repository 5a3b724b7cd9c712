"""Checks of a modality that reads checkpoints by their own files: for each architecture whose
checkpoint it takes, layout and features are those of the checkpoint's processor.

The processor is that of transformers in its PIL form. Used by the suite `modality/1`, for classes
that do not write a checkpoint of their own. Must not know a plugin by name.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from frame.core.errors import ConfigurationError
from frame.interfaces.modality import MediaError, MediaLayout
from frame.testing.conformance import Check, SkipCheck, Subject, find_checks
from frame.testing.modality.files import Maker, make_pixels, save_image
from frame.testing.modality.folders import FAMILIES

Arrays = Mapping[str, np.ndarray]
SIZES = ((96, 64), (200, 40), (64, 180), (700, 300), (600, 460), (1500, 700))
WIDTHS = (40, 80, 120, 160, 200, 240)  # of pictures of one height, and heights of pictures of one width
OPTIONS: tuple[Mapping[str, Any], ...] = (  # of the server, which processors of images read
    {"do_normalize": False},
    {"do_rescale": False},
    {"rescale_factor": 1 / 127.5},
    {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]},
)
MAX_DIFFERENCE = 0.1  # of features and those of the processor, on average, in their deviation; another library resizes otherwise
_PIXELS = "pixel_values"


def _count_grid(arrays: Arrays) -> int:
    return int(arrays["image_grid_thw"].prod()) // 4


def _count_tiles(rows: int) -> Callable[[Arrays], int]:
    return lambda arrays: len(arrays[_PIXELS]) * rows


def _count_sizes(side: int) -> Callable[[Arrays], int]:
    return lambda arrays: int((arrays["image_sizes"] // side).prod())


_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_omni", "glm4v")  # whose encoders cost by the size of a picture
_FAMILIES = {"low_detail_costs_no_more": _GRIDS, "sizes_of_the_server": ("llava",)}  # of checks that do not fit all
ROWS: Mapping[str, Callable[[Arrays], int]] = {  # of the encoder's output, by family
    **dict.fromkeys(_GRIDS, _count_grid),
    "gemma3": _count_tiles(16), "llava": _count_tiles(16), "internvl": _count_tiles(4), "idefics3": _count_tiles(4),
    "pixtral": _count_sizes(16), "mistral3": _count_sizes(28),
    "minicpmv4_6": lambda arrays: int((arrays["target_sizes"] // 4).prod(-1).sum()),
    "gemma4": lambda arrays: int((arrays["image_position_ids"] >= 0).all(-1).sum()) // 9,
}  # fmt: skip


def list_checks(subject: Subject) -> Iterator[Check]:
    """The checks of a class that reads images of these checkpoints."""
    for family, one in FAMILIES.items():
        if "vision_config" in one.config:
            for name, check in find_checks(__name__):
                if family in _FAMILIES.get(name, (family,)):
                    yield Check(f"{name}-{family}", partial(_run, check, subject, family))


def _run(check: Any, subject: Subject, family: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        maker = Maker(subject, Path(folder) / "checkpoint", family)
        try:
            maker.create()
        except ConfigurationError as error:
            raise SkipCheck(f"it does not read this checkpoint: {error}") from None
        check(maker, family)


def check_layout_is_that_of_the_features(maker: Maker, family: str) -> None:
    """With each detail of a request, too."""
    for number, (width, height) in enumerate(SIZES):
        data = maker.make(width, height, number)
        size = maker.one.read_size(data)
        for options in ({}, {"detail": "low"}, {"detail": "high"}):
            what = f"{width} x {height} with {options or 'no options'}"
            layout, arrays = maker.one.lay_out(size, options), maker.one.compute_features(data, size, options)
            rows = layout.expansion.count(maker.one.row_token)
            expected = ROWS[family](arrays) if family in ROWS else rows
            assert rows == expected, f"{what}: the expansion has {rows} row tokens, and the encoder makes {expected}"
            _require_patches(layout, arrays, family, what)
            if maker.has_mrope:
                _require_grid(layout, arrays, what)


def _require_grid(layout: MediaLayout, arrays: Arrays, what: str) -> None:
    frames, rows, columns = (int(each) for each in arrays["image_grid_thw"][0])
    expected = ((frames, rows // 2, columns // 2),)
    assert layout.grids == expected, f"{what}: the model's positions are those of a grid; the layout has {layout.grids}, not {expected}"


def _read_side(family: str) -> int:
    side: int | list[int] = FAMILIES[family].config["vision_config"]["patch_size"]
    return side if isinstance(side, int) else side[0]


def _require_patches(layout: MediaLayout, arrays: Arrays, family: str, what: str) -> None:
    # patches [n, channels, frames, side, side], tiles [n, channels, height, width], or
    # pictures [n, patches, numbers of a patch]
    pixels, side = arrays[_PIXELS], _read_side(family)
    one = {5: 1, 3: pixels.shape[1]}.get(pixels.ndim) or math.prod(size // side for size in pixels.shape[-2:])
    positions = len(pixels) * one
    assert layout.patches == positions, f"{what}: the layout counts {layout.patches} patches, and the encoder has {positions} positions"


def check_low_detail_costs_no_more(maker: Maker, family: str) -> None:
    """A request asks for "low" to pay less: it does not enlarge a picture."""
    for options in ({}, {"size": {"shortest_edge": 3136, "longest_edge": 4_000_000}}):
        try:
            one = maker.create_with(options)
        except ConfigurationError:
            continue
        for width, height in ((1500, 700), (300, 200), (96, 64)):
            size = maker.one.read_size(maker.make(width, height))
            low, auto, high = (one.lay_out(size, {"detail": detail}).patches for detail in ("low", "auto", "high"))
            assert low <= auto <= high, f"{width} x {height}: low, auto and high detail take {low}, {auto} and {high} patches"
            plain = one.lay_out(size, {}).patches
            assert plain == auto, f"{width} x {height}: without a detail it takes {plain} patches, and {auto} with auto, its default"


def check_sizes_beside_each_other(maker: Maker, family: str) -> None:
    """An instance that laid out other pictures of one height, or width, answers as a new one."""
    for turned in (False, True):
        for edge in WIDTHS:
            size = maker.one.read_size(maker.make(*((100, edge) if turned else (edge, 100))))
            for options in ({}, {"detail": "low"}):
                layouts = [one.lay_out(size, options) for one in (maker.one, maker.create())]
                assert layouts[0] == layouts[1], f"{size.width} x {size.height}: the layout depends on the pictures before"


def check_features_are_the_processors(maker: Maker, family: str) -> None:
    """Their numbers, their shape, and the further arrays."""
    for number, (width, height) in enumerate(SIZES):
        data = save_image(make_pixels(width, height, number))
        arrays = maker.read(data)
        what = f"{width} x {height}"
        _require_bytes(arrays, what)
        _require_processor(arrays, _process(maker, family, data, {}), what)


def check_options_of_the_server(maker: Maker, family: str) -> None:
    """They change the features as they change those of the processor, or are refused."""
    data = save_image(make_pixels(96, 64, 1))
    for options in OPTIONS:
        try:
            one = maker.create_with(options)
        except ConfigurationError:
            continue
        arrays = one.compute_features(data, one.read_size(data), {})
        if options.get("do_rescale", True):
            _require_bytes(arrays, f"with the option {', '.join(options)}")
        _require_processor(arrays, _process(maker, family, data, options), f"with the option {', '.join(options)}")
    try:
        maker.create_with({"conformance": 1})
    except ConfigurationError as error:
        assert "conformance" in str(error), "the error of an unknown option of the server does not name it"
        return
    raise AssertionError("an unknown option of the server is not refused with a ConfigurationError")


def check_sizes_of_the_server(maker: Maker, family: str) -> None:
    """Whatever size the server asks for, layout and features agree."""
    for size in ({"shortest_edge": 56, "longest_edge": 112}, {"max_height": 112, "max_width": 84}, {"height": 84, "width": 112}):
        options = {"do_center_crop": False, "size": size}
        for width, height in ((96, 64), (64, 200), (300, 280)):
            data = maker.make(width, height)
            try:
                one = maker.create_with(options)
                layout = one.lay_out(one.read_size(data), {})
            except (ConfigurationError, MediaError):
                continue
            arrays = one.compute_features(data, one.read_size(data), {})
            what = f"{width} x {height} with the server's size {size}"
            _require_patches(layout, arrays, family, what)
            _require_processor(arrays, _process(maker, family, data, options), what)


def _process(maker: Maker, family: str, data: bytes, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What the checkpoint's processor makes of a picture."""
    from PIL import Image
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    if merged := FAMILIES[family].processor.get("spatial_merge_size"):  # the processor of Mistral 3 asks for sides of merged patches
        options = {"patch_size": dict.fromkeys(("height", "width"), _read_side(family) * merged), **options}
    processor = AutoImageProcessor.from_pretrained(maker.folder, backend="pil", local_files_only=True, trust_remote_code=False)
    outputs = processor(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np", **options)
    return {name: np.asarray(value) for name, value in outputs.items()}


def _require_bytes(arrays: Arrays, what: str) -> None:
    dtype = arrays[_PIXELS].dtype
    assert dtype == np.uint8, f"{what}: the pixels are {dtype}; those that were resized stay bytes, with a scale and an offset"


def _require_processor(arrays: Arrays, expected: Arrays, what: str) -> None:
    values = arrays[_PIXELS].astype(np.float64)
    if f"{_PIXELS}.scale" in arrays:
        factors = [arrays[f"{_PIXELS}.{part}"].astype(np.float64).reshape(1, -1, *(1,) * (values.ndim - 2)) for part in ("scale", "offset")]
        values = values * factors[0] + factors[1]
    reference = expected[_PIXELS].astype(np.float64)
    if values.ndim == 5 and reference.size > values.size:  # a still picture stands for equal frames
        values = values.repeat(reference.size // values.size, 2)
    assert values.size == reference.size, f"{what}: the features have {values.size} numbers, and those of the processor {reference.size}"
    difference = float(np.abs(values.ravel() - reference.ravel()).mean() / max(reference.std(), 1e-9))
    assert difference <= MAX_DIFFERENCE, f"{what}: features and the processor's differ by {difference:.2f} of their deviation"
    for name in expected.keys() & arrays.keys() - {_PIXELS}:
        assert np.array_equal(arrays[name], expected[name]), f"{what}: {name} is not the processor's"
