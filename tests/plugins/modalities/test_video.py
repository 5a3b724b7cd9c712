"""Videos: sampling and sizes by transformers' rules, frames in order, and hostile files."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeProcessor

from frame.core.errors import ConfigurationError
from frame.interfaces.modality import MediaError, MediaLimits, MediaSize, ModalityContext
from frame.plugins.modalities.frames import decode_frames
from frame.plugins.modalities.image import normalise
from frame.plugins.modalities.processor import load_image_processor
from frame.plugins.modalities.video import VideoModality
from frame.testing.modality.folders import write_folder

av = pytest.importorskip("av")
_ROWS = "<IMG_CONTEXT>" * 4
FORMATS = [
    ("mp4", "libx264"),
    ("mp4", "libx265"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("matroska", "libsvtav1"),
    ("matroska", "libx264"),
]


def make(count: int = 30, fps: int = 10, width: int = 128, height: int = 96, kind: str = "mp4", codec: str = "libx264") -> bytes:
    """A video whose frame i has the grey level 8 i."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.time_base = width, height, "yuv420p", Fraction(1, fps)
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), 8 * (number % 31), np.uint8), "rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if codec == "libsvtav1" and sys.platform == "linux":
        # As root, the encoder gives this thread real-time priority for good. Threads and processes
        # that it starts later have it too, and starve the machine when they spin.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return file.getvalue()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VideoModality]:
    folder = tmp_path_factory.mktemp("families")
    names = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "qwen3_omni", "internvl", "llava_onevision", "gemma4")
    made = {name: VideoModality(ModalityContext(folder / name, write_folder(folder / name, name))) for name in names}
    context = made["glm4v"].context
    full = {**context.model_config.full_config, "model_type": "glm46v"}
    (folder / "glm46v").mkdir()
    for file in context.folder.iterdir():
        text = file.read_text().replace("Glm4vImageProcessor", "Glm46VImageProcessor")
        (folder / "glm46v" / file.name).write_text(text)
    made["glm46v"] = VideoModality(replace(context, folder=folder / "glm46v", model_config=replace(context.model_config, full_config=full)))
    return made


def levels(arrays: dict[str, np.ndarray]) -> list[float]:
    """The grey level of each frame that the model gets."""
    pixels = arrays["pixel_values_videos"]
    if "video_position_ids" in arrays:
        return [float(frame[places[:, 0] >= 0].mean()) for frame, places in zip(pixels, arrays["video_position_ids"], strict=True)]
    if "video_grid_thw" not in arrays:
        return [float(frame.mean()) for frame in pixels]
    frames = pixels.reshape(arrays["video_grid_thw"][0][0], -1, *pixels.shape[1:])
    return [float(frames[at, :, :, each].mean()) for at in range(len(frames)) for each in range(frames.shape[3])]


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of Linux")
def test_the_encoder_leaves_the_priority_of_this_process() -> None:
    make(2, kind="matroska", codec="libsvtav1")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.parametrize(("kind", "codec"), FORMATS)
def test_frames_come_in_order(built: dict[str, VideoModality], kind: str, codec: str) -> None:
    if codec not in av.codec.codecs_available:
        pytest.skip(f"PyAV has no {codec}")
    data = make(kind=kind, codec=codec)
    for modality in built.values():
        size = modality.read_size(data)
        assert (size.width, size.height, size.frames, round(size.seconds, 2)) == (128, 96, 30, 3.0)
        arrays = modality.compute_features(data, size, {})
        expected = 8.0 * modality.sample(size, {})
        assert np.abs(np.array(levels(arrays)) - expected).max() < 4
        if "video_grid_thw" not in arrays:  # see the tests of stills and of Gemma 4
            continue
        layout = modality.lay_out(size, {})
        assert layout.patches == len(arrays["pixel_values_videos"]) == arrays["video_grid_thw"].prod()
        assert layout.expansion.count(modality.row_token) * 4 == layout.patches == sum(np.prod(grid) for grid in layout.grids) * 4
        assert np.abs(normalise(arrays, "pixel_values_videos")).max() < 3


def test_sampling_is_the_processors(built: dict[str, VideoModality]) -> None:
    for total in (1, 2, 3, 4, 5, 7, 30, 97, 240, 2000):
        for fps in (1.0, 10.0, 23.976, 60.0):
            size = MediaSize("MP4", 128, 96, total, total / fps)
            got = built["qwen3_vl"].sample(size, {})
            count = min(max(int(total / fps * 2), 4), 768, total)
            assert got.tolist() == np.linspace(0, total - 1, count).round().astype(int).tolist()
            if total < 2:
                continue
            got = built["qwen2_vl"].sample(size, {})
            most = min(768, total) // 2 * 2
            count = int(min(max(total / fps * 2, 4), most, total) // 2 * 2)
            assert got.tolist() == torch.arange(0, total, total / count).int().tolist()[:count]


# frames, frames a second, wanted; what transformers 5.24 takes for GLM-4.1V and GLM-4.6V-Flash
GLM_FRAMES = [
    (2, 1.0, 2.0, [0, 1], [0, 1]),
    (11, 60.0, 2.0, [0, 0], [0, 0]),
    (87, 60.0, 3.0, [0, 20, 40, 60], [0, 8, 17, 25, 34, 42, 51, 60]),
    (5, 4.0, 2.0, [0, 2], [0, 1, 2, 3, 4, 4]),
    (3, 4.0, 3.0, [0, 2], [0, 1, 2, 2]),
]
# of longer ones: how many, the first and the last
GLM_LENGTHS = [
    (1295, 4.0, 2.0, (600, [0, 3, 5, 7], 1294), (324, [0, 4, 8, 12], 1288)),
    (7753, 4.0, 2.0, (600, [0, 13, 26, 39], 7752), (640, [0, 12, 24, 36], 7752)),
    (355, 1.0, 1.0, (300, [0, 2, 3, 4], 354), (356, [0, 1, 2, 3], 354)),
]


def test_frames_of_glm_are_the_processors(built: dict[str, VideoModality]) -> None:
    for total, rate, fps, *expected in GLM_FRAMES:
        size = MediaSize("MP4", 128, 96, total, total / rate)
        assert [built["glm4v"].sample(size, {"fps": fps}).tolist(), built["glm46v"].sample(size, {}).tolist()] == expected
    for total, rate, fps, *lengths in GLM_LENGTHS:
        size = MediaSize("MP4", 128, 96, total, total / rate)
        for chosen, expected_length in zip(
            (built["glm4v"].sample(size, {"fps": fps}), built["glm46v"].sample(size, {})), lengths, strict=True
        ):
            assert (len(chosen), chosen[:4].tolist(), int(chosen[-1])) == expected_length
    size = MediaSize("MP4", 128, 96, 7753, 7753 / 4)
    # a temporal patch has two
    assert [len(built["glm4v"].sample(size, {"max_frames": most})) for most in (2, 3, 4, 9)] == [2, 2, 4, 8]
    with pytest.raises(MediaError, match="max_frames is '1'"):
        built["glm4v"].sample(size, {"max_frames": 1})
    with pytest.raises(MediaError, match="'fps' is no option"):
        built["glm46v"].sample(size, {"fps": 1})


def test_the_checkpoint_names_the_sampling_of_glm(built: dict[str, VideoModality], tmp_path: Path) -> None:
    """Those of one model type name either processor."""
    size = MediaSize("MP4", 128, 96, 7753, 7753 / 4)
    for kind, name, expected in (("glm4v", "Glm46VVideoProcessor", "glm46v"), ("glm46v", "Glm4vVideoProcessor", "glm4v")):
        context = built[kind].context
        folder = tmp_path / kind
        folder.mkdir()
        for file in context.folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**settings, "video_processor_type": name}))
        made = VideoModality(replace(context, folder=folder))
        assert made.sample(size, {}).tolist() == built[expected].sample(size, {}).tolist() != built[kind].sample(size, {}).tolist()


def test_settings_in_one_file_of_all_parts_come_first(built: dict[str, VideoModality], tmp_path: Path) -> None:
    """As `save_pretrained` of a processor writes them since transformers 5."""
    context = replace(built["qwen3_vl"].context, folder=tmp_path)
    for file in built["qwen3_vl"].context.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**stored, "fps": 4}))
    file = tmp_path / "processor_config.json"
    parts = {"image_processor": stored, "video_processor": {**stored, "fps": 1, "max_frames": 50}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    (tmp_path / "preprocessor_config.json").unlink()
    made, size = VideoModality(context), [MediaSize("MP4", 128, 96, 30 * seconds, seconds) for seconds in (20, 200)]
    assert [len(made.sample(each, {})) for each in size] == [20, 50]
    file.write_text(json.dumps({"processor_class": "Qwen3VLProcessor", "image_processor": stored}))
    assert len(VideoModality(context).sample(size[0], {})) == 80


def test_options_of_the_server_that_nothing_reads(built: dict[str, VideoModality]) -> None:
    for kind, name, value in (
        ("glm4v", "min_frames", 8),
        ("glm46v", "fps", 1),
        ("glm4v", "max_frames", 1),
        ("qwen3_omni", "size", {}),
        ("internvl", "min_pixels", 1),
        ("gemma4", "max_pixels", 1),
    ):
        with pytest.raises(ConfigurationError, match=name):
            VideoModality(replace(built[kind].context, processor_options={name: value}))


def test_sizes_of_qwen3_omni_are_those_of_its_processor_class(built: dict[str, VideoModality], tmp_path: Path) -> None:
    """Its folders have one file of settings, with the sizes of images."""
    context = replace(built["qwen3_omni"].context, folder=tmp_path)
    for file in built["qwen3_omni"].context.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "min_pixels": 3136, "max_pixels": 12_845_056}))
    expected = Qwen3OmniMoeProcessor.videos_kwargs["size"]
    size, small = MediaSize("MP4", 3840, 2160, 30, 3.0), MediaSize("MP4", 64, 64, 30, 3.0)
    made = VideoModality(context)
    pixels = [math.prod(made.resize(each, 6)) for each in (size, small)]
    assert 0.9 * expected["longest_edge"] < pixels[0] <= expected["longest_edge"]
    assert expected["shortest_edge"] <= pixels[1] < 1.3 * expected["shortest_edge"]
    less = VideoModality(replace(context, processor_options={"max_pixels": 200_000}))
    assert math.prod(less.resize(size, 6)) <= 200_000


def test_texts_of_glm(built: dict[str, VideoModality]) -> None:
    """Each temporal patch is written as an image, with its second."""
    size = MediaSize("MP4", 128, 96, 30, 3.0)
    layout = built["glm4v"].lay_out(size, {})
    run = "<|begin_of_image|>" + "<|image|>" * int(np.prod(layout.grids[0])) + "<|end_of_image|>"
    assert layout.expansion == "".join(f"{run}{second}" for second in range(3))
    assert (built["glm4v"].placeholder, built["glm4v"].row_token) == ("<|video|>", "<|image|>")


@pytest.mark.parametrize(
    ("name", "chosen", "expansion", "row"),
    [
        (
            "internvl",
            [2, 7, 12, 17, 22, 27],
            "\n".join(f"Frame{n}: <img>{'<IMG_CONTEXT>' * 4}</img>" for n in range(1, 7)),
            "<IMG_CONTEXT>",
        ),
        ("llava_onevision", [0, 5, 10, 15, 20, 25], "<video>" * (6 * 4 + 1), "<video>"),  # pooled, and a row at the end
    ],
)
def test_frames_that_are_pictures_of_one_size(
    built: dict[str, VideoModality], name: str, chosen: list[int], expansion: str, row: str
) -> None:
    modality, data = built[name], make(30)
    size = modality.read_size(data)
    assert [len(modality.sample(size, options)) for options in ({}, {"fps": 2}, {"fps": 1, "max_frames": 2}, {"fps": 0.01})] == [
        30,
        6,
        2,
        1,
    ]
    assert modality.sample(size, {"max_frames": 6}).tolist() == chosen
    layout = modality.lay_out(size, {"max_frames": 6})
    assert (layout.expansion, layout.grids, layout.patches) == (expansion, (), 6 * 16)
    assert (modality.placeholder, modality.row_token) == ("<video>", row)
    arrays = modality.compute_features(data, size, {"max_frames": 6})
    pixels = arrays["pixel_values_videos"]
    assert (pixels.shape, pixels.dtype) == ((6, 3, 56, 56), np.uint8)
    assert np.abs(pixels.mean((1, 2, 3)) - 8 * np.array(chosen)).max() < 3
    assert np.allclose(normalise(arrays, "pixel_values_videos"), pixels / 127.5 - 1, atol=1e-6)
    for options in ({"fps": 0}, {"max_frames": 33}, {"size": 3}):
        with pytest.raises(MediaError):
            modality.lay_out(size, options)
    more = VideoModality(replace(modality.context, processor_options={"max_frames": 3, "fps": 2}))
    assert len(more.sample(size, {})) == 3


def test_frames_of_gemma_4_are_those_of_its_image_processor(built: dict[str, VideoModality]) -> None:
    """At most 70 rows each, whatever images may have; each with its time."""
    modality, data = built["gemma4"], make(count=90, width=112, height=96)
    size = modality.read_size(data)
    assert modality.sample(size, {"max_frames": 4}).tolist() == [0, 22, 45, 67]
    arrays, layout = modality.compute_features(data, size, {"max_frames": 4}), modality.lay_out(size, {"max_frames": 4})
    images = load_image_processor(modality.context.folder)
    for place, picture in enumerate(decode_frames(data, [0, 22, 45, 67], size, modality.context.limits)):
        expected = images.preprocess([picture], max_soft_tokens=70, return_tensors="np")
        values = normalise({**arrays, "pixel_values_videos": arrays["pixel_values_videos"][place : place + 1]}, "pixel_values_videos")
        assert np.abs(values - expected["pixel_values"]).max() < 1e-6
        assert np.array_equal(arrays["video_position_ids"][place : place + 1], expected["image_position_ids"])
    rows = "<|video|>" * int(expected["num_soft_tokens_per_image"][0])
    assert layout.expansion == " ".join(f"00:0{second} <|image>{rows}<image|>" for second in (0, 2, 4, 6))
    assert (layout.patches, layout.grids, modality.row_token) == (4 * 630, (), "<|video|>")


def test_settings_of_the_video_processor(built: dict[str, VideoModality], tmp_path: Path) -> None:
    """Null is the default; numbers that are not implemented are refused."""
    still = {"size": {"height": 56, "width": 56}, "initial_shift": None}
    for name, settings in (("internvl", still), ("gemma4", {"image_mean": [0.5] * 3})):
        (tmp_path / name).mkdir()
        for file in built[name].context.folder.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        (tmp_path / name / "video_preprocessor_config.json").write_text(json.dumps(settings))
    size = MediaSize("MP4", 128, 96, 30, 3.0)
    modality = VideoModality(replace(built["internvl"].context, folder=tmp_path / "internvl"))
    assert modality.sample(size, {"max_frames": 3}).tolist() == [5, 15, 25]
    with pytest.raises(ConfigurationError, match="image_mean"):
        VideoModality(replace(built["gemma4"].context, folder=tmp_path / "gemma4"))


def test_rows_of_images_are_not_those_of_frames(built: dict[str, VideoModality], tmp_path: Path) -> None:
    for file in built["gemma4"].context.folder.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace('"max_soft_tokens": 70', '"max_soft_tokens": 280'))
    assert load_image_processor(tmp_path).max_soft_tokens == 280
    size = MediaSize("MP4", 1920, 1080, 30, 3.0)
    assert VideoModality(replace(built["gemma4"].context, folder=tmp_path)).resize(size, 4) == built["gemma4"].resize(size, 4)


def test_sizes_of_frames_of_gemma_4(built: dict[str, VideoModality]) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    for height, width in np.random.default_rng(5).integers(1, 3000, (500, 2)).tolist():
        if max(height, width) <= 200 * min(height, width):
            expected = get_aspect_ratio_preserving_size(height, width, patch_size=4, max_patches=630, pooling_kernel_size=3)
            assert built["gemma4"].resize(MediaSize("MP4", width, height, 30, 3.0), 4) == expected


def test_frames_whose_size_does_not_fit_the_tokens(built: dict[str, VideoModality], tmp_path: Path) -> None:
    for file in built["internvl"].context.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"size": {"height": 70, "width": 70}}))
    with pytest.raises(ConfigurationError, match="frames of 70 x 70 pixels have 25 patches, and the video processor writes tokens for 16"):
        VideoModality(replace(built["internvl"].context, folder=tmp_path))


def test_options(built: dict[str, VideoModality]) -> None:
    data = make(60)
    modality = built["qwen3_vl"]
    size = modality.read_size(data)
    assert [len(modality.sample(size, options)) for options in ({}, {"fps": 1}, {"fps": 10}, {"max_frames": 3})] == [12, 6, 60, 3]
    for options in ({"fps": 0}, {"fps": "x"}, {"fps": True}, {"max_frames": 10_000}, {"speed": 2}):
        with pytest.raises(MediaError):
            modality.lay_out(size, options)
    with pytest.raises(MediaError, match="'use_audio_in_video' is no option"):
        built["qwen3_omni"].lay_out(size, {"use_audio_in_video": True})


def test_positions(built: dict[str, VideoModality]) -> None:
    data = make(60)
    size = built["qwen2_5_vl"].read_size(data)
    layout = built["qwen2_5_vl"].lay_out(size, {})
    assert (len(layout.grids), layout.frame_step) == (1, 2.0)  # two positions a second, a temporal patch of one
    assert built["qwen2_vl"].lay_out(size, {}).frame_step == 1.0
    layout = built["qwen3_omni"].lay_out(size, {})
    assert (len(layout.grids), layout.frame_step) == (1, 13.0)  # thirteen a second
    layout = built["qwen3_vl"].lay_out(size, {})
    assert len(layout.grids) == 6 == layout.expansion.count(" seconds>") and {grid[0] for grid in layout.grids} == {1}
    assert layout.expansion.startswith("<0.2 seconds><|vision_start|>")


def test_limits_and_hostile_files(built: dict[str, VideoModality], tmp_path: Path) -> None:
    modality = built["qwen2_vl"]
    data = make(30)
    small = VideoModality(ModalityContext(modality.context.folder, modality.context.model_config, MediaLimits(max_pixels=9000)))
    short = VideoModality(ModalityContext(modality.context.folder, modality.context.model_config, MediaLimits(max_seconds=2)))
    for one, words in ((small, "9000"), (short, "2 seconds")):
        with pytest.raises(MediaError, match=words):
            one.read_size(data)
    jpeg2000 = make(5, kind="mp4", codec="jpeg2000") if "jpeg2000" in av.codec.codecs_available else b""
    other = make(5, kind="mp4", codec="mpeg4")
    for bad in (
        b"",
        b"x" * 100,
        jpeg2000,
        other,
        data[:200],
        b"\0\0\0\x18ftypisom" + bytes(100),
        b"\x1a\x45\xdf\xa3" + bytes(100),
        b"#EXTM3U\n",
    ):
        with pytest.raises(MediaError) as caught:
            modality.compute_features(bad, modality.read_size(bad), {})
        assert "send" in str(caught.value)
    generator = np.random.default_rng(0)
    for _ in range(20):
        changed = bytearray(data)
        for at in generator.integers(0, len(data), 10):
            changed[at] = generator.integers(256)
        try:
            size = modality.read_size(bytes(changed))
            layout = modality.lay_out(size, {})
            assert layout.patches == len(modality.compute_features(bytes(changed), size, {})["pixel_values_videos"])
        except MediaError:
            continue


def test_other_architectures(tmp_path: Path) -> None:
    config = write_folder(tmp_path, "gemma3")
    with pytest.raises(ConfigurationError, match="gemma3"):
        VideoModality(ModalityContext(tmp_path, config))
