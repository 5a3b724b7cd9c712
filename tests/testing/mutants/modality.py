"""Modalities with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from frame.core.interfaces.model import ModelConfig
from frame.interfaces.modality import MediaError, MediaLayout, MediaLimits, MediaSize, Modality, ModalityCapabilities
from frame.media.sound import resample
from frame.plugins.modalities.audio import AudioModality
from frame.plugins.modalities.video import VideoModality
from frame.testing.modality.folders import write_folder
from tests.testing.mutants import MutantList

TILE = 32


class Tiles(Modality):
    """PNG files in tiles of 32 pixels."""

    placeholder = "<image>"
    row_token = "<tile>"

    def read_size(self, data: bytes) -> MediaSize:
        image = self.open(data)
        turned = "exif" in image.info and image.getexif().get(0x0112, 1) >= 5
        width, height = image.size[::-1] if turned else image.size
        return MediaSize("PNG", width, height)

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        if options:
            raise MediaError(f"{min(options)!r} is no option of this part; leave it out")
        rows, columns = count(size.width, size.height)
        return MediaLayout(self.row_token * (rows * columns), ((1, rows, columns),), patches=rows * columns)

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        image = self.read(data)
        if image.size != (size.width, size.height):
            raise MediaError("the file's header says another size than its pixels have; save it again")
        return self.cut(np.asarray(image.resize((count(*image.size)[1] * TILE, count(*image.size)[0] * TILE))))

    def cut(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        rows, columns = pixels.shape[0] // TILE, pixels.shape[1] // TILE
        tiles = pixels.reshape(rows, TILE, columns, TILE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, TILE, TILE)
        ones = np.ones(3, np.float32)
        return {"pixel_values": tiles, "pixel_values.scale": ones / 127.5, "pixel_values.offset": -ones}

    def open(self, data: bytes) -> Image.Image:
        try:
            image = Image.open(io.BytesIO(data), formats=["PNG"])
        except (OSError, SyntaxError, ValueError):
            raise MediaError("the file is no PNG file that can be read; send it again") from None
        if image.width * image.height > self.context.limits.max_pixels:
            raise MediaError("the image has too many pixels; send a smaller one")
        return image

    def read(self, data: bytes) -> Image.Image:
        try:
            image = ImageOps.exif_transpose(self.open(data))
            if image.mode.startswith("I"):  # of 16 bits, which Pillow would cut off at 255
                image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
            return self.convert(image)
        except (OSError, SyntaxError, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            raise MediaError("the file is damaged; send it again as PNG") from None

    def convert(self, image: Image.Image) -> Image.Image:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")

    @staticmethod
    def write_conformance_checkpoint(folder: Path) -> ModelConfig:
        return write_folder(folder, "llava")

    @staticmethod
    def count_conformance_rows(arrays: Mapping[str, np.ndarray]) -> int:
        return len(arrays["pixel_values"])


def count(width: int, height: int) -> tuple[int, int]:
    return min(16, -(-height // TILE)), min(16, -(-width // TILE))


mutant = MUTANTS = MutantList("modality", reference=Tiles, capabilities=ModalityCapabilities("image", ("PNG",)))
VIDEO, AUDIO = ModalityCapabilities("video", ("MP4",)), ModalityCapabilities("audio", ("WAV",))


class Laid(Tiles):
    """Changes the layout."""

    def change(self, layout: MediaLayout) -> MediaLayout:
        raise NotImplementedError

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        return self.change(super().lay_out(size, options))


mutant.each(
    Laid, "change",
    ("OneRowTooMany", "The expansion has a row more than the encoder makes.",
     lambda self, one: replace(one, expansion=one.expansion + self.row_token, grids=())),
    ("OneRowTooFew", "The expansion has a row less than the encoder makes.",
     lambda self, one: replace(one, expansion=one.expansion[: -len(self.row_token)] or self.row_token, grids=())),
    ("GridOfWidthAndHeight", "The grid has width before height.",
     lambda self, one: replace(one, grids=tuple((t, w, h) for t, h, w in one.grids))),
    ("GridTooLarge", "The grid has a line more than the run has rows.",
     lambda self, one: replace(one, grids=tuple((t, h + 1, w) for t, h, w in one.grids))),
    ("TwoGrids", "One run of rows has two grids.", lambda self, one: replace(one, grids=one.grids * 2)),
    ("PositionsStandStill", "The positions of frames do not advance.", lambda self, one: replace(one, frame_step=0.0)),
    ("CostsNothing", "Encoding costs no patches.", lambda self, one: replace(one, patches=0)),
)  # fmt: skip


class Cut(Tiles):
    """Changes the features."""

    def change(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def cut(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        return self.change(super().cut(pixels))


mutant.each(
    Cut, "change",
    ("SwapsChannels", "Red and blue are swapped.", lambda _, one: one | {"pixel_values": one["pixel_values"][:, ::-1]}),
    ("ChannelsLast", "The channels are on the last axis.", lambda _, one: one | {"pixel_values": np.moveaxis(one["pixel_values"], 1, -1)}),
    ("NoOffset", "The bytes have no offset.", lambda _, one: {name: one[name] for name in ("pixel_values", "pixel_values.scale")}),
    ("OneFactor", "The bytes have one factor for all channels.", lambda _, one: one | {"pixel_values.scale": np.ones(1, np.float32)}),
    ("DoublePrecision", "The factors are float64.", lambda _, one: one | {"pixel_values.scale": np.ones(3)}),
    ("NormalisedPixels", "The pixels are float32 and keep their factors.",
     lambda _, one: one | {"pixel_values": one["pixel_values"].astype(np.float32)}),
    ("EqualFeatures", "All pixels of every file are grey.", lambda _, one: one | {"pixel_values": one["pixel_values"] * 0}),
    ("Noise", "Noise is added to the pixels.",
     lambda _, one: one | {"pixel_values": one["pixel_values"] ^ np.uint8(random.getrandbits(3) | 1)}),
)  # fmt: skip


@mutant
class IgnoresRotation(Tiles):
    """The orientation of EXIF turns neither header nor pixels."""

    def read_size(self, data: bytes) -> MediaSize:
        image = self.open(data)
        return MediaSize("PNG", *image.size)

    def read(self, data: bytes) -> Image.Image:
        return self.convert(self.open(data))


@mutant
class HeaderIgnoresRotation(Tiles):
    """Header and decoder disagree on files that are turned."""

    def read_size(self, data: bytes) -> MediaSize:
        return MediaSize("PNG", *self.open(data).size)


@mutant
class MirrorsAsRotations(Tiles):
    """Files that are mirrored are read as they are stored."""

    def read(self, data: bytes) -> Image.Image:
        image = self.open(data)
        return self.convert(image if image.getexif().get(0x0112, 1) in (2, 4) else ImageOps.exif_transpose(image))


@mutant
class AlphaOverBlack(Tiles):
    """Transparent pixels are black."""

    def convert(self, image: Image.Image) -> Image.Image:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "black"), image).convert("RGB")


@mutant
class DropsAlpha(Tiles):
    """Transparent pixels keep the colour that the file gives them."""

    def convert(self, image: Image.Image) -> Image.Image:
        return image.convert("RGB")


@mutant
class AlphaIsAMask(Tiles):
    """Pixels are either transparent or not."""

    def convert(self, image: Image.Image) -> Image.Image:
        pixels = np.array(image.convert("RGBA"))
        pixels[pixels[:, :, 3] < 128] = 255
        return Image.fromarray(pixels).convert("RGB")


@mutant
class DecodesForTheHeader(Tiles):
    """The header is read by decoding the file."""

    def read_size(self, data: bytes) -> MediaSize:
        self.read(data)
        return super().read_size(data)


@mutant
class TruncatedFiles(Tiles):
    """A truncated file is read with grey pixels."""

    def read(self, data: bytes) -> Image.Image:
        image = self.open(data)
        try:
            return super().read(data)
        except MediaError:
            return Image.new("RGB", image.size)


@mutant
class ShowsTheDecodersMessage(Tiles):
    """The client gets the decoder's message."""

    def open(self, data: bytes) -> Image.Image:
        try:
            return Image.open(io.BytesIO(data), formats=["PNG"])
        except OSError as error:
            raise MediaError(str(error)) from None


@mutant
class NoLimitInTheHeader(Tiles):
    """The number of pixels is checked only while they are decoded."""

    def read_size(self, data: bytes) -> MediaSize:
        return Tiles(replace(self.context, limits=MediaLimits())).read_size(data)


@mutant
class NoLimitInTheDecoder(Tiles):
    """The number of pixels is checked only in the header."""

    def read(self, data: bytes) -> Image.Image:
        try:
            return self.convert(ImageOps.exif_transpose(Image.open(io.BytesIO(data), formats=["PNG"])))
        except (OSError, SyntaxError, ValueError):
            raise MediaError("the file is damaged; send it again as PNG") from None


@mutant
class IgnoresOptions(Tiles):
    """Unknown options are ignored."""

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        return super().lay_out(size, {})


@mutant
class TrustsTheHeader(Tiles):
    """Pixels of another size than the header's are read."""

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        image = self.read(data)
        return self.cut(np.asarray(image.resize((count(size.width, size.height)[1] * TILE, count(size.width, size.height)[0] * TILE))))


@mutant
class LayoutMakesPixels(Tiles):
    """The layout makes a picture of the file's size."""

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        Image.new("RGB", (size.width, size.height)).resize((4096, 4096), Image.Resampling.LANCZOS)
        return super().lay_out(size, options)


@mutant
class RemembersTheLastFile(Tiles):
    """The features are those of the first file of a size."""

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        kept: dict[MediaSize, Any] = self.__dict__.setdefault("kept", {})
        return kept.setdefault(size, super().compute_features(data, size, options))


@mutant.using(capabilities=VIDEO)
class ShiftsFrames(VideoModality):
    """The frames are those after the sampled ones."""

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        self.sample = lambda *one: np.minimum(VideoModality.sample(self, *one) + 1, size.frames - 1)  # type: ignore[method-assign]
        return super().compute_features(data, size, options)


@mutant.using(capabilities=VIDEO)
class ReversesFrames(VideoModality):
    """The last frame comes first."""

    def _cut(self, video: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        return super()._cut(video[::-1], grid)


@mutant.using(capabilities=VIDEO)
class FirstFramesAlone(VideoModality):
    """All frames are the first one."""

    def _cut(self, video: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        return super()._cut(np.repeat(video[:1], len(video), 0), grid)


@mutant.using(capabilities=VIDEO)
class VideoStandsStill(VideoModality):
    """The positions of a video's frames do not advance."""

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        return replace(super().lay_out(size, options), frame_step=0.0)


@mutant
class NamedColoursAreOpaque(Tiles):
    """A colour or grey that the file names as transparent is drawn."""

    def convert(self, image: Image.Image) -> Image.Image:
        image.info.pop("transparency", None)
        return super().convert(image)


@mutant
class SharesItsPicture(Tiles):
    """Keeps the decoded picture in the object, where another thread puts its own."""

    def read(self, data: bytes) -> Image.Image:
        self.picture = super().read(data)
        time.sleep(1e-4)
        return self.picture


class Sound(AudioModality):
    """Reads a file by blocks, then computes with all samples."""

    def change(self, blocks: list[np.ndarray]) -> list[np.ndarray]:
        return blocks

    def mix(self, samples: np.ndarray) -> np.ndarray:
        return samples.mean(1)

    def resample(self, samples: np.ndarray, rate: int) -> np.ndarray:
        return np.concatenate([*resample(iter([samples]), rate)])

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        read, _, rate, _ = self._open(data)
        blocks = self.change([*takewhile(len, map(read, repeat(1 << 16)))])
        return self._reader.compute_features(self.resample(self.mix(np.concatenate(blocks)), rate))


def pick(_: Any, samples: np.ndarray, rate: int) -> np.ndarray:
    return samples[(np.arange(round(len(samples) * 16_000 / rate)) * rate / 16_000).astype(np.int64)]


def end(_: Any, blocks: list[np.ndarray]) -> list[np.ndarray]:
    return [block * (len(block) == 1 << 16 or len(blocks) == 1) for block in blocks]


for name, sentence, attribute, value in (
    ("LeftChannelAlone", "Of two channels the second one is not heard.", "mix", lambda _, samples: samples[:, 0]),
    ("PicksSamples", "Takes the nearest sample at each time, so that high tones become low ones.", "resample", pick),
    ("EndsWithABlock", "The samples after the last whole block are silent.", "change", end),
):
    mutant(type(name, (Sound,), {"__module__": __name__, "__doc__": sentence, attribute: value}), capabilities=AUDIO)


PICTURES: list[Image.Image] = []


@mutant
class KeepsPicturesInItsModule(Tiles):
    """Keeps all pictures in a list of its module."""

    def read(self, data: bytes) -> Image.Image:
        PICTURES.append(super().read(data))
        return PICTURES[-1]


@mutant
class CutsTheLastColumn(Tiles):
    """Repeats the last column but one in place of the last."""

    def cut(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        return super().cut(np.concatenate((pixels[:, :-1], pixels[:, -2:-1]), axis=1))
