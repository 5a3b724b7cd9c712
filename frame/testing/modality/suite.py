"""The conformance suite of modalities: header, layout and features agree; pixels and frames are as
the file asks; what is damaged, too large or unknown is refused. Must not know a plugin by name.

The suite builds the class for a tiny checkpoint (Qwen2-VL for images, Qwen2.5-VL for videos,
Qwen2-Audio for sound), and one of images for those of other architectures, unless it refuses them
with a ConfigurationError. A class for another checkpoint has the static methods
`write_conformance_checkpoint(folder)`, which writes its files and returns the `ModelConfig`, and
`count_conformance_rows(arrays)`, which says how many rows the encoder makes of its features. Images
are PNG files, videos MP4, sound WAV.
"""

from __future__ import annotations

import io
import math
import re
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from frame.interfaces.modality import MediaError, MediaSize
from frame.testing.conformance import Check, SkipCheck, Subject, find_checks, unchanged_process
from frame.testing.generators import require_bounded, require_near_reference, taking_turns
from frame.testing.modality import families, sounds
from frame.testing.modality.files import Maker, make_pixels, make_video, save_image

_FOREIGN = re.compile(r"0x|Traceback|\w+(?:Error|Exception)\b|<\w+[. ]|site-packages|\bb'")  # of a decoder's message
SIZES = ((96, 64), (64, 96), (33, 47), (200, 40), (30, 180), (256, 256))
MAX_LAYOUT_SECONDS = 0.5  # of the largest file
MAX_LAYOUT_BYTES = 32 << 20
THREADS = 4  # that read files of one object
LARGE = 7000  # pixels of a side; bytes of a picture of this size would be 147 MB


def suite(subject: Subject) -> Iterator[Check]:
    """`modality/1`."""
    with tempfile.TemporaryDirectory() as folder:
        maker = Maker(subject, Path(folder) / "checkpoint")
        maker.create()
        for name, check in (*find_checks(__name__), *(find_checks(sounds.__name__) if maker.modality == "audio" else ())):
            kinds = _KINDS.get(name)
            if kinds is None or maker.modality in kinds:
                yield Check(name, partial(_run, check, subject))
        if maker.modality == "image" and not hasattr(subject.target, "write_conformance_checkpoint"):
            yield from families.list_checks(subject)


def _run(check: Any, subject: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(Maker(subject, Path(folder) / "checkpoint"))


def _refuse(what: str, call: Any) -> str:
    try:
        call()
    except MediaError as error:
        sentence = str(error)
        assert 10 < len(sentence) < 400 and "\n" not in sentence, f"{what}: the error is no sentence: {sentence!r:.200}"
        assert not _FOREIGN.search(sentence), f"{what}: the error has a decoder's message: {sentence!r:.200}"
        return sentence
    raise AssertionError(f"{what} is not refused with a MediaError")


def _equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _pixels(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The bytes of the pixels; skips for a plugin without."""
    name = next((name for name in arrays if f"{name}.scale" in arrays), None)
    if name is None:
        raise SkipCheck("the features have no bytes of pixels")
    return arrays[name]


def check_tokens_have_names(maker: Maker) -> None:
    one = maker.one
    assert one.placeholder and one.row_token, "placeholder or row_token is empty"
    assert (one.placeholder, one.row_token) == (maker.create().placeholder, maker.create().row_token), "tokens differ between instances"


def check_sizes_are_those_of_the_files(maker: Maker) -> None:
    for width, height in SIZES:
        width, height = (width // 2 * 2, height // 2 * 2) if maker.modality == "video" else (width, height)
        size = maker.one.read_size(maker.make(width, height))
        assert isinstance(size, MediaSize), f"read_size returns {type(size).__name__}"
        assert size.format, "read_size names no format"
        if maker.modality == "audio":
            assert abs(size.seconds - width / 100) < 1e-3, f"a file of {width / 100} seconds has {size.seconds}"
        else:
            assert (size.width, size.height) == (width, height), f"{width} x {height} pixels are read as {size.width} x {size.height}"
        if maker.modality == "video":
            assert size.frames == 8 and abs(size.seconds - 4) < 0.1, f"8 frames of 4 seconds are {size.frames} of {size.seconds}"


def check_rows_are_those_of_the_features(maker: Maker) -> None:
    for number, (width, height) in enumerate(SIZES):
        data = maker.make(width // 2 * 2, height // 2 * 2, number)
        layout = maker.one.lay_out(maker.one.read_size(data), {})
        rows, expected = layout.expansion.count(maker.one.row_token), maker.count_rows(maker.read(data))
        assert rows == expected, f"{width} x {height}: the expansion has {rows} row tokens, and the encoder makes {expected} rows"
        assert layout.patches > 0, "patches is not positive"


def check_grids_are_those_of_the_runs(maker: Maker) -> None:
    for width, height in SIZES:
        layout = maker.one.lay_out(maker.one.read_size(maker.make(width // 2 * 2, height // 2 * 2)), {})
        runs = [len(run) // len(maker.one.row_token) for run in re.findall(f"(?:{re.escape(maker.one.row_token)})+", layout.expansion)]
        assert layout.grids == () or len(layout.grids) == len(runs), f"{len(runs)} runs have {len(layout.grids)} grids"
        for grid, run in zip(layout.grids, runs, strict=False):
            assert len(grid) == 3 and math.prod(grid) in (run, 0), f"a run of {run} rows has the grid {grid}"
        assert 0 < layout.frame_step < math.inf, f"frame_step is {layout.frame_step}; positions would not advance"


def check_grids_follow_the_shape(maker: Maker) -> None:
    wide, tall = (maker.one.lay_out(maker.one.read_size(maker.make(*size)), {}).grids for size in ((192, 64), (64, 192)))
    if not wide:
        raise SkipCheck("the layout has no grids")
    assert wide[0][2] > wide[0][1], f"a wide picture has the grid {wide[0]}; it is frames, height, width"
    assert tall[0][1] > tall[0][2], f"a tall picture has the grid {tall[0]}; it is frames, height, width"


def check_files_that_begin_alike(maker: Maker) -> None:
    """Files of one size and length, with equal beginnings."""
    data = [_save_plain(maker, seed) for seed in (1, 2, 1)]
    assert len({len(each) for each in data}) == 1
    results = [maker.read(each) for each in data]
    assert _equal(results[0], results[2]) and not _equal(results[0], results[1]), "a file has the features of one that begins as it does"


def _save_plain(maker: Maker, seed: int) -> bytes:
    """A file whose bytes follow the pixels or samples one by one."""
    if maker.modality != "image":
        raise SkipCheck("the length of the suite's files depends on their content")
    pixels = make_pixels(96, 64)
    pixels[32:] = make_pixels(96, 64, seed)[32:]
    return save_image(pixels, compress_level=0)


def check_detail_of_wide_pictures(maker: Maker) -> None:
    """In a picture of 1,408 pixels, each pixel counts, where the features have as many: means of 4
    x 4 pixels have others."""
    if maker.modality != "image":
        raise SkipCheck("only pictures are compared pixel by pixel")
    fine = np.random.default_rng(3).integers(0, 256, (96, 1408, 3), np.uint8)
    means = fine.reshape(24, 4, 352, 4, 3).mean((1, 3)).astype(np.uint8).repeat(4, 0).repeat(4, 1)
    one, other = (_pixels(maker.read(save_image(each))).astype(np.float32) for each in (fine, means))
    if one.size < fine.size / 3:
        raise SkipCheck("the features have fewer pixels than such a picture")
    moved = float(np.abs(one - other).mean() / one.std())
    assert moved > 0.4, f"a wide picture and the means of its pixels have nearly the same features ({moved:.2f} of their deviation)"


def check_pixels_at_the_edges_count(maker: Maker) -> None:
    """In a square picture whose sides are multiples of 14, 16, 28 and 32 pixels, each edge is in
    the features."""
    if maker.modality != "image":
        raise SkipCheck("only pictures are compared pixel by pixel")
    plain = make_pixels(224, 224)
    before = maker.read(save_image(plain))
    edges: dict[str, Any] = {"left": np.s_[:, 0], "right": np.s_[:, -1], "upper": np.s_[0], "lower": np.s_[-1]}
    for edge, place in edges.items():
        changed = plain.copy()
        changed[place] ^= 255
        assert not _equal(maker.read(save_image(changed)), before), f"the pixels of the {edge} edge are not in the features"


def check_features_are_kept(maker: Maker) -> None:
    """The features of one file stay as they are while others are read."""
    first = maker.read(maker.make(96, 64, 1))
    kept = {name: array.copy() for name, array in first.items()}
    maker.read(maker.make(96, 64, 2))
    assert _equal(first, kept), "the features of a file change when another one is read"


def check_reading_keeps_nothing(maker: Maker) -> None:
    files = [maker.make(96, 64, seed) for seed in range(8)]
    one = maker.one

    def read(number: int) -> None:
        one.compute_features(files[number % 8] if number < 8 else files[number % 3], one.read_size(files[0]), {})

    require_bounded(one, read, 120, "files that were read", slack=20)


def check_reading_is_fast(maker: Maker) -> None:
    """Reading a picture takes a small multiple of what decoding and resizing it takes."""
    if maker.modality != "image":
        raise SkipCheck("decoders of videos and sound differ too much")
    from PIL import Image

    data = maker.make(512, 512)

    def decode() -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize((448, 448)), np.float32) / 127.5 - 1

    require_near_reference(lambda: maker.read(data), decode, "a picture of 512 x 512", 6, 0.02)


def check_methods_are_pure(maker: Maker) -> None:
    files = [maker.make(96, 64, 1), maker.make(128, 96, 2)]
    results = []
    for one in (maker.one, maker.create()):
        for data in (files[0], files[1], files[0]):
            size = one.read_size(data)
            layout, _ = one.lay_out(size, {}), one.lay_out(MediaSize(size.format, 64, 64, size.frames, size.seconds), {})
            results.append((size, layout, one.compute_features(data, size, {})))
    for other in (2, 3, 5):
        assert results[0][:2] == results[other][:2] and _equal(results[0][2], results[other][2]), "equal files give different results"
    assert not _equal(results[0][2], results[1][2]), "different files give equal features"


def check_content_reaches_the_features(maker: Maker) -> None:
    assert not _equal(maker.read(maker.make(seed=1)), maker.read(maker.make(seed=2))), "files of one size give equal features"


def check_arrays_can_be_stored(maker: Maker) -> None:
    for name, array in maker.read(maker.make()).items():
        assert isinstance(array, np.ndarray) and array.dtype.kind in "iuf", f"{name} is no array of numbers"
        assert array.dtype in (np.uint8, np.int64, np.float32), f"{name} has the dtype {array.dtype}; it must be uint8, int64 or float32"
        assert array.dtype.kind != "f" or np.isfinite(array).all(), f"{name} has values that are not finite"


def check_bytes_have_factors(maker: Maker) -> None:
    arrays = maker.read(maker.make())
    names = [name for name in arrays if f"{name}.scale" in arrays or arrays[name].dtype == np.uint8]
    if not names:
        raise SkipCheck("the features have no bytes of pixels")
    for name in names:
        assert arrays[name].dtype == np.uint8, f"{name} has factors, and is {arrays[name].dtype}"
        for part in ("scale", "offset"):
            vector = arrays.get(f"{name}.{part}")
            assert vector is not None, f"{name}.{part} is missing"
            assert vector.dtype == np.float32 and vector.shape == (arrays[name].shape[1],), (
                f"{name}.{part} is {vector.dtype} {vector.shape}"
            )
        assert (np.abs(arrays[f"{name}.scale"]) > 0).all(), f"{name}.scale is 0"


def check_channels_are_red_green_blue(maker: Maker) -> None:
    for channel in range(3):
        pixels = np.zeros((64, 64, 3), np.uint8)
        pixels[:, :, channel] = 255
        got = _pixels(maker.read(save_image(pixels))).astype(int)
        means = got.mean(axis=tuple(axis for axis in range(got.ndim) if axis != 1))
        assert means.argmax() == channel and means[channel] > 250, f"a file of channel {channel} alone has the means {means.round()}"


def check_pictures_are_turned_as_the_file_asks(maker: Maker) -> None:
    plain = make_pixels(96, 64)
    turned = {
        2: plain[:, ::-1], 3: plain[::-1, ::-1], 4: plain[::-1], 5: plain.swapaxes(0, 1), 6: np.rot90(plain, -1),
        7: plain[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(plain, 1),
    }  # fmt: skip
    for orientation, pixels in turned.items():
        data = save_image(plain, orientation=orientation)
        size = maker.one.read_size(data)
        assert (size.width, size.height) == (pixels.shape[1], pixels.shape[0]), f"orientation {orientation}: read_size ignores it"
        assert _equal(maker.read(data), maker.read(save_image(np.ascontiguousarray(pixels)))), f"orientation {orientation}: the pixels"


def check_alpha_is_laid_over_white(maker: Maker) -> None:
    pixels = np.dstack([make_pixels(64, 64), np.full((64, 64), 255, np.uint8)])
    pixels[:32, :, 3] = 0
    white = pixels[:, :, :3].copy()
    white[:32] = 255
    assert _equal(maker.read(save_image(pixels)), maker.read(save_image(white))), "transparent pixels are not white"
    pixels[:, :, :3], pixels[:, :, 3] = 0, 51
    shade = _pixels(maker.read(save_image(pixels)))
    assert abs(float(shade.mean()) - 204) < 2, "an alpha of a fifth does not give a fifth of the colour"


def check_transparent_colours_are_white(maker: Maker) -> None:
    """A PNG file may name a colour, a grey or entries of its palette as transparent (tRNS)."""
    from PIL import Image

    blocks = make_pixels(64, 64)[:, :, 0] // 86  # 0, 1 and 2
    colours = np.array([(10, 200, 30), (0, 0, 0), (90, 10, 160)], np.uint8)
    palette = Image.fromarray(blocks)
    palette.putpalette(colours.tobytes())
    greys = Image.fromarray(colours[:, 1][blocks])
    for what, image, transparent, first in (
        ("a colour", Image.fromarray(colours[blocks]), (10, 200, 30), colours),
        ("a grey", greys, 200, colours[:, [1, 1, 1]]),
        ("an entry of the palette", palette, bytes([0, 255, 255]), colours),
    ):
        file, table = io.BytesIO(), first.copy()
        image.save(file, "PNG", transparency=transparent)
        table[0] = 255
        same = _equal(maker.read(file.getvalue()), maker.read(save_image(table[blocks])))
        assert same, f"{what} that the file names as transparent is not white: alpha is not the only form of transparency"


def check_files_are_read_in_threads(maker: Maker) -> None:
    """The methods are pure functions, so that several threads may call them on one object."""
    files = [maker.make(96, 64, seed) for seed in range(THREADS)]
    alone, begin = [maker.read(data) for data in files], threading.Barrier(THREADS)

    def read(number: int) -> bool:
        begin.wait(timeout=60)
        return all(_equal(maker.read(files[number]), alone[number]) for _ in range(6))

    with taking_turns(), ThreadPoolExecutor(THREADS) as pool:
        are_equal = list(pool.map(read, range(THREADS)))
    assert all(are_equal), "a file has other features while other threads read files: keep nothing of a call in self"


def check_grey_files_are_read(maker: Maker) -> None:
    grey = make_pixels(64, 64)[:, :, 0]
    assert _equal(maker.read(save_image(grey)), maker.read(save_image(np.dstack([grey] * 3)))), "a grey picture has other features"


def check_files_of_16_bits_are_read(maker: Maker) -> None:
    """Scans. Their numbers count by the upper eight bits."""
    grey = make_pixels(64, 64)[:, :, 0]
    one, other = (_pixels(maker.read(save_image(each))).astype(int) for each in (grey.astype(np.uint16) * 257, grey))
    assert one.shape == other.shape and np.abs(one - other).max() <= 2, "a grey picture of 16 bits has other features than that of 8 bits"


def check_rows_are_in_the_order_of_the_grid(maker: Maker) -> None:
    """Row by row from the top: the first patches of a picture that is white below are black."""
    pixels = np.zeros((128, 256, 3), np.uint8)
    pixels[64:] = 255
    data = save_image(pixels)
    grids, arrays = maker.one.lay_out(maker.one.read_size(data), {}).grids, _pixels(maker.read(data))
    if len(grids) != 1 or not math.prod(grids[0]) or len(arrays) % math.prod(grids[0]):
        raise SkipCheck("the features are no patches of one grid")
    quarters = [float(part.mean()) for part in np.array_split(arrays.reshape(len(arrays), -1), 4)]
    assert quarters[0] < 32 and quarters[-1] > 223, f"the grid is {grids[0]}, and the quarters of the patches have the means {quarters}"


def check_frames_are_in_the_order_of_time(maker: Maker) -> None:
    frames = [np.full((64, 96, 3), level, np.uint8) for level in range(20, 240, 25)]
    arrays = maker.read(make_video(frames))
    pixels = _pixels(arrays)
    steps = int(arrays["video_grid_thw"][0][0])
    levels = pixels.reshape(steps, -1, *pixels.shape[1:]).mean(axis=(1, 2, 4, 5)).reshape(-1)
    assert (np.diff(levels) > -2).all(), f"the frames have the levels {levels.round().tolist()}"
    assert abs(levels[0] - 20) < 4, f"the first frame has the level {levels[0]:.0f}, not 20: frames are shifted"
    assert levels[-1] > 180, f"the last frame has the level {levels[-1]:.0f}: frames are missing"


def check_damaged_files_are_refused(maker: Maker) -> None:
    whole = maker.make(128, 96)
    for what, data in (("an empty file", b""), ("text", b"text" * 50), ("a head", whole[:20]), ("half a file", whole[: len(whole) // 2])):
        if maker.modality == "audio" and what == "half a file":  # which is a shorter one
            continue
        _refuse(what, partial(maker.read, data))


def check_damaged_pixels_are_refused(maker: Maker) -> None:
    data = bytearray(maker.make(128, 96))
    start = data.index(b"IDAT") + 8
    data[start : start + 40] = bytes(40)
    size = maker.one.read_size(bytes(data))
    assert (size.width, size.height) == (128, 96), "read_size reads more than the header"
    _refuse("a file with damaged pixels", partial(maker.one.compute_features, bytes(data), size, {}))


def check_another_size_than_the_headers_is_refused(maker: Maker) -> None:
    wrong = maker.one.read_size(maker.make(64, 64))
    _refuse("a file whose pixels have another size than its header", partial(maker.one.compute_features, maker.make(128, 96), wrong, {}))


def check_limits_are_kept(maker: Maker) -> None:
    if maker.modality == "audio":
        _refuse("a file beyond max_seconds", partial(maker.create(max_seconds=0.5).read_size, maker.make(96)))
        return
    small, data = maker.create(max_pixels=64 * 63), maker.make(64, 64)
    _refuse("a file beyond max_pixels", partial(small.read_size, data))
    size = maker.one.read_size(data)
    _refuse("a file beyond max_pixels that is decoded", partial(small.compute_features, data, size, {}))


def check_unknown_options_are_refused(maker: Maker) -> None:
    size = maker.one.read_size(maker.make())
    sentence = _refuse("an unknown option", partial(maker.one.lay_out, size, {"conformance": 1}))
    assert "conformance" in sentence, "the error does not name the option"


def check_details_are_read_or_refused(maker: Maker) -> None:
    """With an option of the request, layout and features agree too, or the layout refuses it."""
    for width, height in ((1600, 700), (96, 64)):
        data = maker.make(width, height)
        size = maker.one.read_size(data)
        for detail in ("low", "high", "auto"):
            try:
                layout = maker.one.lay_out(size, {"detail": detail})
            except MediaError:
                continue
            expected = maker.count_rows(maker.one.compute_features(data, size, {"detail": detail}))
            rows = layout.expansion.count(maker.one.row_token)
            assert rows == expected, f"with the detail {detail}, the expansion has {rows} row tokens, and the encoder makes {expected} rows"
        for wrong in ("sideways", 3, None):
            _refuse(f"the detail {wrong!r}", partial(maker.one.lay_out, size, {"detail": wrong}))


def check_layouts_need_no_pixels(maker: Maker) -> None:
    size = MediaSize("PNG", LARGE, LARGE)
    maker.one.lay_out(size, {})
    began = time.process_time()
    maker.one.lay_out(size, {})
    seconds = time.process_time() - began
    assert seconds < MAX_LAYOUT_SECONDS, f"the layout of {LARGE} x {LARGE} pixels takes {seconds:.2f} seconds"
    tracemalloc.start()
    try:
        maker.one.lay_out(size, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_LAYOUT_BYTES, f"the layout of {LARGE} x {LARGE} pixels takes {peak >> 20} MiB of memory"


def check_the_process_stays_as_it_is(maker: Maker) -> None:
    data = maker.make()
    maker.read(data)
    with unchanged_process("reading a file changes"):
        maker.read(data)


_PICTURES = ("image",)
_VISUAL = ("image", "video")
_KINDS = {
    "grids_follow_the_shape": _VISUAL,
    "channels_are_red_green_blue": _PICTURES,
    "pictures_are_turned_as_the_file_asks": _PICTURES,
    "alpha_is_laid_over_white": _PICTURES,
    "grey_files_are_read": _PICTURES,
    "transparent_colours_are_white": _PICTURES,
    "files_of_16_bits_are_read": _PICTURES,
    "rows_are_in_the_order_of_the_grid": _PICTURES,
    "frames_are_in_the_order_of_time": ("video",),
    "damaged_pixels_are_refused": _PICTURES,
    "another_size_than_the_headers_is_refused": _PICTURES,
    "details_are_read_or_refused": _PICTURES,
    "layouts_need_no_pixels": _PICTURES,
}
