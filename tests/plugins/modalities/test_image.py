"""Images against the reference processors of transformers, and hostile ones."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frame.checkpoint.model_config import read_model_config
from frame.core.errors import ConfigurationError
from frame.core.messages import MediaText
from frame.interfaces.modality import MediaError, MediaLimits, MediaSize, ModalityContext
from frame.plugins.modalities.image import ImageModality, normalise
from frame.plugins.modalities.processor import as_arrays, load_image_processor
from frame.testing.modality.folders import FAMILIES, write_folder
from frame.text.message_parts import expand_placeholders
from tests.models.fallback_families import FALLBACK_FAMILIES
from tests.models.media_checkpoints import make_media_checkpoint

VISUAL = [name for name, family in FAMILIES.items() if "vision_config" in family.config]
SIZES = [(300, 200), (200, 300), (33, 47), (640, 30), (30, 640), (900, 900), (28, 28), (1, 1)]
MODES = ["RGB", "RGBA", "L", "LA", "P", "PA", "1", "CMYK", "YCbCr"]


def make(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)
    image = Image.fromarray(pixels, "RGBA")
    if mode == "PA":
        return image.quantize(64)
    return image if mode == "RGBA" else image.convert("LA" if mode == "LA" else "RGB").convert(mode)


def save(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, ImageModality]:
    return {name: ImageModality(ModalityContext(folder / name, write_folder(folder / name, name))) for name in VISUAL}


def features(modality: ImageModality, data: bytes, **options: Any) -> dict[str, np.ndarray]:
    return modality.compute_features(data, modality.read_size(data), options)


def compare(modality: ImageModality, data: bytes, image: Image.Image) -> None:
    """With what the reference processor makes of an image in mode RGB."""
    got = features(modality, data)
    reference = load_image_processor(modality.context.folder)
    arguments = {name: value for name, value in modality._arguments.items() if name != "do_convert_rgb"}
    expected = as_arrays(modality._processor._process_images([image], **arguments)[0])
    values = normalise(got, "pixel_values")
    if values.ndim == 5:  # a still image stands for two frames
        values = np.repeat(values, reference.temporal_patch_size, 2).reshape(len(values), -1)
    assert got["pixel_values"].dtype == np.uint8
    assert np.abs(values.reshape(-1) - expected["pixel_values"].reshape(-1)).max() < 1e-6
    for name in expected.keys() - {"pixel_values"}:
        assert np.array_equal(got[name], expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", VISUAL)
def test_features_and_tokens_are_the_processors(built: dict[str, ImageModality], name: str) -> None:
    check_sizes(built[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FALLBACK_FAMILIES)
def test_processors_of_models_without_a_plugin(name: str, tmp_path: Path) -> None:
    folder = make_media_checkpoint(tmp_path, name)
    check_sizes(ImageModality(ModalityContext(folder, read_model_config(folder))))


def check_sizes(modality: ImageModality) -> None:
    """Header, features and expansion of images of all sizes are the processor's."""
    for number, (width, height) in enumerate(SIZES):
        image = make(width, height, seed=number).convert("RGB")
        data = save(image)
        try:
            layout = modality.lay_out(modality.read_size(data), {})
        except MediaError:
            assert max(width, height) > 8 * min(width, height) or max(width, height) == 1
            continue
        assert modality.row_token in layout.expansion
        compare(modality, data, image)
        _, texts = modality._processor._process_images([image], **{**modality._arguments, "do_convert_rgb": True})
        assert layout.expansion == modality._prefix + texts[0]
        if layout.grids:
            assert np.prod(layout.grids[0]) == layout.expansion.count(modality.row_token)
        assert layout.expansion.count(modality.row_token) > 0 and layout.patches > 0


def test_modes(built: dict[str, ImageModality]) -> None:
    """As transformers converts them: alpha over white."""
    from transformers.image_transforms import convert_to_rgb

    for mode in MODES:
        kinds = ["PNG"] if mode in ("LA", "PA", "RGBA", "1", "P") else ["JPEG"] if mode in ("CMYK", "YCbCr") else ["PNG", "JPEG", "BMP"]
        for kind in [*kinds, *(["WEBP", "GIF"] if mode == "RGBA" else [])]:
            data = save(make(90, 70, mode), kind)
            compare(built["gemma3"], data, Image.fromarray(np.array(convert_to_rgb(Image.open(io.BytesIO(data))))))


def test_transparent_pixels_are_white(built: dict[str, ImageModality]) -> None:
    for image in (Image.new("RGBA", (50, 50), (200, 0, 0, 0)), Image.new("LA", (50, 50), (9, 0))):
        assert (features(built["gemma3"], save(image))["pixel_values"] == 255).all()
    palette = Image.new("P", (50, 50), 3)
    palette.putpalette([10, 20, 30] * 5)
    assert (features(built["gemma3"], save(palette, transparency=3))["pixel_values"] == 255).all()


def test_16_bits_keep_their_high_byte(built: dict[str, ImageModality]) -> None:
    values = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    compare(built["gemma3"], save(Image.fromarray(values)), Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_rotations(built: dict[str, ImageModality], kind: str) -> None:
    from PIL import ImageOps

    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = save(make(120, 40).convert("RGB"), kind, exif=exif)
        size = built["qwen2_vl"].read_size(data)
        assert (size.width, size.height) == ((40, 120) if orientation > 4 else (120, 40))
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert turned is not None
        compare(built["qwen2_vl"], data, turned.convert("RGB"))
        layout = built["qwen2_vl"].lay_out(size, {})
        assert np.array_equal(features(built["qwen2_vl"], data)["image_grid_thw"][0] // [1, 2, 2], layout.grids[0])


def test_exif_after_the_pixels_of_a_png(built: dict[str, ImageModality]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, chunk = save(make(120, 40).convert("RGB")), exif.tobytes().removeprefix(b"Exif\x00\x00")
    chunk = struct.pack(">I", len(chunk)) + b"eXIf" + chunk + struct.pack(">I", zlib.crc32(b"eXIf" + chunk))
    data = plain[:-12] + chunk + plain[-12:]
    assert built["qwen2_vl"].read_size(data).width == 40
    assert features(built["qwen2_vl"], data)["image_grid_thw"][0][1] > 2


def test_animations_give_their_first_frame(built: dict[str, ImageModality]) -> None:
    frames = [Image.new("RGB", (60, 40), color) for color in ("red", "green", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = save(frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {}))
        pixels = features(built["gemma3"], data)["pixel_values"]
        assert pixels[0, :, 0, 0].tolist() in ([255, 0, 0], [254, 0, 0])


@pytest.mark.slow
def test_300_images(built: dict[str, ImageModality]) -> None:
    generator = np.random.default_rng(5)
    for number in range(300):
        width, height = (int(each) for each in np.exp(generator.uniform(2.5, 5.5, 2)))
        image = make(width, height, seed=number).convert("RGB")
        name = VISUAL[number % len(VISUAL)]
        data = save(image)
        try:
            built[name].lay_out(built[name].read_size(data), {})
        except MediaError:
            continue
        compare(built[name], data, image)


def png_head(width: int, height: int) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def test_headers_beyond_the_limits(built: dict[str, ImageModality]) -> None:
    gif = b"GIF89a" + struct.pack("<HH", 30_000, 30_000) + b"\x80\x00\x00" + bytes(6)
    gif += (
        b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00" + b",\x00\x00\x00\x00" + struct.pack("<HH", 30_000, 30_000) + b"\x00\x02\x02L\x01\x00;"
    )
    webp = b"RIFF" + struct.pack("<I", 30) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + (16_000).to_bytes(3, "little") * 2
    for data in (png_head(30_000, 30_000), gif, webp):
        with pytest.raises(MediaError, match="64000000"):
            built["gemma3"].read_size(data)


def test_damaged_files_and_other_formats(built: dict[str, ImageModality]) -> None:
    whole = {kind: save(make(80, 60).convert("RGB"), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
    jpeg2000 = b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(100)
    tiff, svg = save(make(8, 8).convert("RGB"), "TIFF"), b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    for data in (b"", b"x", jpeg2000, tiff, svg, b"%PDF-1.4", *(each[: len(each) // 2] for each in whole.values())):
        with pytest.raises(MediaError) as caught:
            features(built["gemma3"], data)
        assert "send" in str(caught.value) and "0x" not in str(caught.value)
    generator = np.random.default_rng(0)
    for kind, data in whole.items():
        for _ in range(40):
            changed = bytearray(data)
            for at in generator.integers(0, len(data), 6):
                changed[at] = generator.integers(256)
            try:
                features(built["gemma3"], bytes(changed))
            except MediaError as error:
                assert str(error).count("\n") == 0, kind


def test_detail(built: dict[str, ImageModality]) -> None:
    modality, data = built["qwen2_vl"], save(make(1500, 300).convert("RGB"))
    size = modality.read_size(data)
    counts = {detail: modality.lay_out(size, {"detail": detail}).patches for detail in ("auto", "high", "low")}
    assert counts["auto"] == counts["high"] > counts["low"] == len(features(modality, data, detail="low")["pixel_values"])
    for options, words in (({"detail": "best"}, "detail is 'best'"), ({"zoom": 1}, "'zoom' is no option")):
        with pytest.raises(MediaError, match=words):
            modality.lay_out(size, options)


def test_extreme_shapes_are_refused_by_their_size(built: dict[str, ImageModality]) -> None:
    data = save(make(2000, 2).convert("RGB"))
    for name in ("qwen2_vl", "minicpmv4_6"):  # the processor of the second one has no limit
        for options in ({}, {"detail": "low"}):
            with pytest.raises(MediaError, match="too flat"):
                built[name].lay_out(built[name].read_size(data), options)
    assert built["minicpmv4_6"].lay_out(MediaSize("PNG", 2000, 10), {}).patches < 5000


def test_options_of_the_server(folder: Path, built: dict[str, ImageModality]) -> None:
    config = built["qwen2_vl"].context.model_config
    path = folder / "qwen2_vl"
    few = ImageModality(ModalityContext(path, config, processor_options={"max_pixels": 28 * 28 * 8}))
    data = save(make(600, 400).convert("RGB"))
    size = few.read_size(data)
    assert few.lay_out(size, {}).patches <= 32 < built["qwen2_vl"].lay_out(size, {}).patches
    assert len(features(few, data)["pixel_values"]) == few.lay_out(size, {}).patches
    with pytest.raises(ConfigurationError, match="max_pixel is no option"):
        ImageModality(ModalityContext(path, config, processor_options={"max_pixel": 1}))
    small = ImageModality(ModalityContext(path, config, MediaLimits(max_pixels=1000)))
    with pytest.raises(MediaError, match="1000"):
        small.read_size(data)


def test_a_folder_without_files(tmp_path: Path) -> None:
    config = write_folder(tmp_path, "gemma3")
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigurationError, match="image processor"):
        ImageModality(ModalityContext(tmp_path, config))


def test_code_of_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    config = write_folder(tmp_path, "gemma3")
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"Gemma3ImageProcessor"', '"Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}'))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with contextlib.suppress(ConfigurationError):
        ImageModality(ModalityContext(tmp_path, config))
    assert not (tmp_path / "ran").exists()


def test_a_size_that_the_processor_does_not_read_is_refused(folder: Path, built: dict[str, ImageModality]) -> None:
    """At the start, or as other pictures that it does not take: not by an error of transformers."""
    size = {"shortest_edge": 3136, "longest_edge": 4_000_000}
    with pytest.raises(ConfigurationError, match="media.processor_options"):
        ImageModality(ModalityContext(folder / "internvl", built["internvl"].context.model_config, processor_options={"size": size}))
    context = ModalityContext(folder / "llava_next", built["llava_next"].context.model_config)
    other = ImageModality(replace(context, processor_options={"size": {"max_height": 112, "max_width": 84}}))
    with pytest.raises(MediaError, match="send one"):
        other.lay_out(other.read_size(save(make(96, 64).convert("RGB"))), {})


def test_images_of_a_prompt_are_numbered(built: dict[str, ImageModality]) -> None:
    """MiniCPM-V's processor writes the number of each, which it finds with all images at hand."""
    modality = built["minicpmv4_6"]
    images = [make(200, 90), make(60, 60, seed=1), make(90, 250, seed=2)]
    text = f"a{modality.placeholder}b{modality.placeholder}{modality.placeholder}c"
    layouts = [modality.lay_out(modality.read_size(save(image)), {}) for image in images]
    media = [MediaText("image", modality.placeholder, modality.row_token, layout.expansion) for layout in layouts]
    expanded, _ = expand_placeholders(text, media)
    processor = modality._processor
    assert expanded.count("<image_id>") == 3
    assert processor.tokenizer(expanded)["input_ids"] == processor(text=[text], images=images, padding=False)["input_ids"][0].tolist()
    folder, config = modality.context.folder, modality.context.model_config
    plain = ImageModality(ModalityContext(folder, config, processor_options={"use_image_id": False}))
    assert "<image_id>" not in plain.lay_out(plain.read_size(save(images[0])), {}).expansion
    with pytest.raises(ConfigurationError, match="downsample_mode is no option"):
        ImageModality(ModalityContext(folder, config, processor_options={"downsample_mode": "4x"}))
