"""Pictures by Pillow: sizes from headers, and pixels as RGB on white, turned as the file asks.

Used by the modality `image`. Pillow opens the formats of `FORMATS` alone. Must not know a
processor.
"""

from __future__ import annotations

import io
import logging
import struct
from typing import TYPE_CHECKING

from frame.interfaces.modality import MediaError, MediaLimits, MediaSize, need_package

if TYPE_CHECKING:
    from PIL.Image import Image

_log = logging.getLogger(__name__)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112  # the tag of EXIF
_DAMAGED = "the file is damaged or truncated, or is no image that can be read; send PNG, JPEG, WebP, GIF or BMP"


def sniff(data: bytes) -> str | None:
    """The format of the file, by its first bytes; None: none of `FORMATS`."""
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    return "BMP" if data[:2] == b"BM" else None


def read_picture_size(data: bytes, limits: MediaLimits) -> MediaSize:
    """The size as the picture is shown. Raises MediaError."""
    image = _open(data, limits)
    width, height = image.size
    if _orientation(image, data) >= 5:  # turned by 90 degrees
        width, height = height, width
    return MediaSize(str(image.format), width, height)


def decode_picture(data: bytes, limits: MediaLimits) -> Image:
    """The first frame in mode RGB. Raises MediaError."""
    image = _open(data, limits)
    orientation = _orientation(image, data)
    try:
        image.load()
        image = _to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a decoder raises anything
        _log.info("an image does not decode: %s: %s", type(error).__name__, error)
        raise MediaError(_DAMAGED) from None
    return _turn(image, orientation)


def _open(data: bytes, limits: MediaLimits) -> Image:
    try:
        from PIL import Image, ImageFile
    except ImportError:
        raise need_package("pillow", "vision") from None
    name = sniff(data)
    if name is None:
        raise MediaError("the file is no image that can be read; send PNG, JPEG, WebP, GIF or BMP")
    Image.MAX_IMAGE_PIXELS = None  # the limit is checked below, and for WebP, whose decoder needs memory at once, before
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    if name == "WEBP":
        _check_pixels(*_webp_size(data), limits)
    try:
        image = Image.open(io.BytesIO(data), formats=[name])
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a decoder raises anything
        _log.info("an image does not open: %s: %s", type(error).__name__, error)
        raise MediaError(_DAMAGED) from None
    _check_pixels(*image.size, limits)
    return image


def _check_pixels(width: int, height: int, limits: MediaLimits) -> None:
    if width < 1 or height < 1:
        raise MediaError("the image has no pixels; send one with some")
    if width * height > limits.max_pixels:
        raise MediaError(f"the image has {width} x {height} pixels, and may have {limits.max_pixels} in all; send a smaller one")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height of the canvas, by the first chunk."""
    kind, body = data[12:16], data[20:30]
    if len(body) == 10:
        if kind == b"VP8X":
            return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
        if kind == b"VP8L":
            bits = int.from_bytes(body[1:5], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if kind == b"VP8 ":
            width, height = struct.unpack("<HH", body[6:10])
            return width & 0x3FFF, height & 0x3FFF
    raise MediaError(_DAMAGED)


def _orientation(image: Image, data: bytes) -> int:
    """1 to 8, as in EXIF, without decoding."""
    from PIL.Image import Exif

    try:
        if image.format == "PNG" and "exif" not in image.info:
            chunk = _find_png_exif(data)  # after the pixels; Pillow decodes these to find it
            if chunk is None and "xmp" not in image.info and "Raw profile type exif" not in image.info:
                return 1
            exif = Exif()
            if chunk is not None:
                exif.load(b"Exif\x00\x00" + chunk)
        else:
            exif = image.getexif()
        value = exif.get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged EXIF data turn no picture
        _log.debug("EXIF data: %s", error)
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _find_png_exif(data: bytes) -> bytes | None:
    at = 8
    while at + 12 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"eXIf":
            return data[at + 8 : at + 8 + size]
        at += 12 + size
    return None


def _turn(image: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
    }  # fmt: skip
    return image.transpose(turns[orientation]) if orientation in turns else image


def _to_rgb(image: Image) -> Image:
    """Colours of 8 bits, on white. Grey values of 16 bits keep their high byte; Pillow would cut
    them at 255."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
