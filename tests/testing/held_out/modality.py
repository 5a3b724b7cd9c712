"""Modalities: PNG and JPEG pictures in patches, and modalities with a bug each."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageFile, ImageOps

from frame.core.interfaces.model import ModelConfig
from frame.interfaces.modality import MediaError, MediaLayout, MediaSize, Modality, ModalityCapabilities, ModalityContext
from tests.testing.held_out import Wrong

PATCH, MAX_SIDE = 16, 8
ORIENTATION = 0x0112


class Patches(Modality):
    """A picture is stretched to whole patches, at most eight in each direction."""

    capabilities: ClassVar[ModalityCapabilities] = ModalityCapabilities("image", ("PNG", "JPEG"))
    placeholder = "<image>"
    row_token = "<patch>"

    def __init__(self, context: ModalityContext, options: object = None) -> None:
        super().__init__(context)

    def open(self, data: bytes) -> Image.Image:
        try:
            image = Image.open(io.BytesIO(data), formats=["PNG", "JPEG"])
        except Exception:
            raise MediaError("the file is neither PNG nor JPEG; send one of the two") from None
        self.check_pixels(image)
        return image

    def check_pixels(self, image: Image.Image) -> None:
        if image.width * image.height > self.context.limits.max_pixels:
            raise MediaError(f"the picture has more than {self.context.limits.max_pixels} pixels; send a smaller one")

    def is_turned(self, image: Image.Image) -> bool:
        exif = Image.Exif()
        if "exif" in image.info:  # `getexif` would decode the pixels
            exif.load(image.info["exif"])
        return exif.get(ORIENTATION, 1) in (5, 6, 7, 8)

    def read_size(self, data: bytes) -> MediaSize:
        image = self.open(data)
        try:
            width, height = image.size[::-1] if self.is_turned(image) else image.size
        except Exception:
            raise MediaError("the file's header is damaged; save it again") from None
        return MediaSize(image.format or "", width, height)

    def count(self, size: int) -> int:
        return min(MAX_SIDE, max(1, -(-size // PATCH)))

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        self.check_options(options)
        rows, columns = self.count(size.height), self.count(size.width)
        return MediaLayout(self.row_token * (rows * columns), ((1, rows, columns),), patches=rows * columns)

    def check_options(self, options: Mapping[str, Any]) -> None:
        for name in options:
            raise MediaError(f"{str(name)[:40]!r} is no option of a picture; leave it out")

    def decode(self, data: bytes) -> Image.Image:
        """RGB, turned, on white."""
        image = self.open(data)
        try:
            image.load()
            image = self.turn(image)
            if image.mode.startswith("I"):
                image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
            return self.lay_on_white(image)
        except Exception as error:
            raise self.describe(error) from None

    def describe(self, error: Exception) -> MediaError:
        return MediaError("the file is damaged; save it again")

    def turn(self, image: Image.Image) -> Image.Image:
        return ImageOps.exif_transpose(image)

    def lay_on_white(self, image: Image.Image) -> Image.Image:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        self.check_options(options)
        image = self.decode(data)
        if image.size != (size.width, size.height):
            raise MediaError("the picture has another size than its header says; save it again")
        rows, columns = self.count(size.height), self.count(size.width)
        pixels = np.asarray(image.resize((columns * PATCH, rows * PATCH), Image.Resampling.BICUBIC))
        return {
            "pixel_values": self.cut(pixels, rows, columns),
            "pixel_values.scale": np.full(3, 2 / 255, np.float32),
            "pixel_values.offset": np.full(3, -1, np.float32),
        }

    def cut(self, pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
        patches = pixels.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 4, 1, 3)
        return np.ascontiguousarray(patches.reshape(rows * columns, 3, PATCH, PATCH))

    @staticmethod
    def write_conformance_checkpoint(folder: Path) -> ModelConfig:
        from frame.testing.modality.folders import write_folder

        return write_folder(folder, "llava")

    @staticmethod
    def count_conformance_rows(arrays: Mapping[str, np.ndarray]) -> int:
        return len(arrays["pixel_values"])


TWIN = Patches
WRONG = Wrong()


@WRONG.add("Photos of telephones lie on their side for the model: the orientation is not read.")
class IgnoresOrientation(Patches):
    def is_turned(self, image: Image.Image) -> bool:
        return False

    def turn(self, image: Image.Image) -> Image.Image:
        return image


@WRONG.add("Portrait photos of telephones are refused: the decoder turns them, and the header's size is not.")
class TurnsLate(Patches):
    def is_turned(self, image: Image.Image) -> bool:
        return False


@WRONG.add("Screenshots and icons with transparency are black for the model: alpha is dropped.")
class DropsAlpha(Patches):
    def lay_on_white(self, image: Image.Image) -> Image.Image:
        return image.convert("RGB")


@WRONG.add("Colours are wrong: channels are in the order of OpenCV.")
class BlueFirst(Patches):
    def cut(self, pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
        return super().cut(pixels[..., ::-1], rows, columns)


@WRONG.add("A small file that is huge when decoded kills the media process: the limit of pixels is not checked.")
class NoLimit(Patches):
    def check_pixels(self, image: Image.Image) -> None:
        return


@WRONG.add("Half of a picture that was cut off is grey, and no error tells so: the library is set to accept such files, for all plugins.")
class TakesTruncated(Patches):
    def __init__(self, context: ModalityContext, options: object = None) -> None:
        super().__init__(context)
        ImageFile.LOAD_TRUNCATED_IMAGES = True


@WRONG.add("Clients read messages of the decoder, with paths of the host: they are part of the sentence.")
class ShowsDecoder(Patches):
    def describe(self, error: Exception) -> MediaError:
        return MediaError(f"the file is damaged ({error!r}); save it again")


@WRONG.add("A client gets an answer about another client's picture: features are remembered by size and number of bytes.")
class RemembersBySize(Patches):
    def __init__(self, context: ModalityContext, options: object = None) -> None:
        super().__init__(context)
        self.known: OrderedDict[tuple[int, int, int], dict[str, np.ndarray]] = OrderedDict()

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        key = size.width, size.height, len(data)
        if key not in self.known:
            self.known[key] = super().compute_features(data, size, options)
        while len(self.known) > 16:
            self.known.popitem(last=False)
        return self.known[key]


@WRONG.add("A request with a misspelt option is answered as if it had none: options are not checked.")
class IgnoresOptions(Patches):
    def check_options(self, options: Mapping[str, Any]) -> None:
        return


@WRONG.add("Some odd sizes fail, or shift the following text's places: the prompt has patches rounded up, the features rounded.")
class RoundsOtherwise(Patches):
    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        found = super().compute_features(data, size, options)
        counts = [min(MAX_SIDE, max(1, round(side / PATCH))) for side in (size.height, size.width)]
        return {**found, "pixel_values": found["pixel_values"][: counts[0] * counts[1]]}


@WRONG.add("The model reads wide pictures from top to bottom: patches are in the order of columns, the grid in that of rows.")
class ColumnsFirst(Patches):
    def cut(self, pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
        patches = super().cut(pixels, rows, columns).reshape(rows, columns, 3, PATCH, PATCH)
        return np.ascontiguousarray(patches.transpose(1, 0, 2, 3, 4).reshape(-1, 3, PATCH, PATCH))


@WRONG.add("Scans with 16 bits are white: values above 255 are cut off.")
class CutsSixteenBits(Patches):
    def turn(self, image: Image.Image) -> Image.Image:
        image = super().turn(image)
        return image.convert("I").convert("L") if image.mode.startswith("I") else image


@WRONG.add("The features of one picture change while the next is decoded: patches are in one buffer.")
class OneBuffer(Patches):
    buffer = np.zeros((MAX_SIDE * MAX_SIDE, 3, PATCH, PATCH), np.uint8)

    def cut(self, pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
        place = self.buffer[: rows * columns]
        place[:] = super().cut(pixels, rows, columns)
        return place
