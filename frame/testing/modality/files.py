"""Generated files of each modality, and `Maker`, which builds the plugin under test for a tiny
checkpoint. Used by the suite `modality/1`."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from frame.interfaces.modality import MediaLimits, Modality, ModalityCapabilities, ModalityContext
from frame.testing.conformance import SkipCheck, Subject
from frame.testing.modality.folders import write_folder

_FAMILIES = {"image": "qwen2_vl", "video": "qwen2_5_vl", "audio": "qwen2_audio"}
_MERGED = 4  # patches of a row in these families


class Maker:
    """Makes instances of the class under test, and files for it."""

    def __init__(self, subject: Subject, folder: Path, family: str = "") -> None:
        """`family`: of the checkpoint, in place of the class's own or that of its modality."""
        self._subject = subject
        self.folder = folder
        can = subject.record.capabilities
        self.modality = can.modality if isinstance(can, ModalityCapabilities) else "image"
        target: Any = subject.target
        write = None if family else getattr(target, "write_conformance_checkpoint", None)
        model_config = write(folder) if write else write_folder(folder, family or _FAMILIES[self.modality])
        self.has_mrope = model_config.has_mrope
        self._context = ModalityContext(folder, model_config)
        self._count = getattr(target, "count_conformance_rows", None)
        self._made: Modality | None = None

    def create(self, **limits: Any) -> Modality:
        """A new instance."""
        made: Modality = self._subject.target(replace(self._context, limits=MediaLimits(**limits)), self._subject.options)
        return made

    def create_with(self, options: Mapping[str, Any]) -> Modality:
        """A new instance with options of the server. Raises ConfigurationError if it refuses
        them."""
        made: Modality = self._subject.target(replace(self._context, processor_options=options), self._subject.options)
        return made

    @property
    def one(self) -> Modality:
        """The instance that most checks share."""
        if self._made is None:
            self._made = self.create()
        return self._made

    def count_rows(self, arrays: Mapping[str, np.ndarray]) -> int:
        """Rows that the encoder computes of these features."""
        if self._count is not None:
            return int(self._count(arrays))
        if self.modality == "audio":
            frames = int(arrays["feature_attention_mask"].sum())
            return (((frames - 1) // 2 + 1) - 2) // 2 + 1
        return int(arrays[f"{self.modality}_grid_thw"].prod()) // _MERGED

    def make(self, width: int = 96, height: int = 64, seed: int = 0) -> bytes:
        """A file; for sound, `width` hundredths of a second."""
        if self.modality == "audio":
            return make_sound(width / 100, seed)
        if self.modality == "video":
            return make_video([make_pixels(width, height, seed)] * 8)
        return save_image(make_pixels(width, height, seed))

    def read(self, data: bytes, **options: Any) -> dict[str, np.ndarray]:
        """The features of a file."""
        return self.one.compute_features(data, self.one.read_size(data), options)


def make_pixels(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Random blocks of colour, uint8 [height, width, 3]."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return blocks.repeat(8, 0).repeat(8, 1)[:height, :width]


def save_image(pixels: np.ndarray, kind: str = "PNG", orientation: int = 1, **settings: Any) -> bytes:
    """An image file of pixels [height, width, channels]."""
    try:
        from PIL import Image
    except ImportError:
        raise SkipCheck("pillow is not installed") from None
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **({"exif": exif} if orientation != 1 else {}), **settings)
    return file.getvalue()


def make_video(frames: list[np.ndarray], fps: int = 2) -> bytes:
    """An MP4 file of frames."""
    try:
        import av
    except ImportError:
        raise SkipCheck("av is not installed") from None
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.time_base = "yuv420p", Fraction(1, fps)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def make_sound(seconds: float, seed: int = 0, rate: int = 16_000) -> bytes:
    """A WAV file of noise."""
    return save_sound(np.random.default_rng(seed).integers(-9000, 9000, (round(seconds * rate), 1), np.int16), rate=rate)


def save_sound(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """A WAV file of samples of 16 bits, [frames, channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()
