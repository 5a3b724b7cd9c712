"""Frames of videos by PyAV: counts from the packets, and chosen frames as RGB.

Used by the modality `video`. FFmpeg gets the containers and decoders of the lists below alone. Must
not know a processor.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from frame.interfaces.modality import MediaError, MediaLimits, MediaSize, need_package

if TYPE_CHECKING:
    from PIL.Image import Image

_log = logging.getLogger(__name__)
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1")
_DECODERS = (*_CODECS, "libdav1d", "libvpx", "libvpx-vp9")
_LIST = "MP4, WebM or MKV with H.264, HEVC, VP8, VP9 or AV1"
_DAMAGED = f"the file is damaged, or is no video that can be read; send {_LIST}"
_RATES = (0.05, 1000.0)  # frames a second


def _sniff(data: bytes) -> tuple[str, str] | None:
    """The demuxer, and the container's name."""
    if data[4:8] == b"ftyp":
        return "mp4", "MP4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska", "WebM" if b"webm" in data[:64] else "MKV"
    return None


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any, str]]:
    """The container, its video and its name. What FFmpeg raises becomes a MediaError."""
    try:
        import av
    except ImportError:
        raise need_package("av", "video") from None
    kind = _sniff(data)
    if kind is None:
        raise MediaError(f"the file is no video that can be read; send {_LIST}")
    try:
        with av.open(
            io.BytesIO(data), format=kind[0], options={"codec_whitelist": ",".join(_DECODERS)}, metadata_errors="replace"
        ) as container:
            if not container.streams.video:
                raise MediaError("the file has no video; send one with frames")
            stream = container.streams.video[0]
            codec = getattr(stream.codec_context, "codec", None)
            if codec is None or (codec.name not in _DECODERS and codec.canonical_name not in _CODECS):
                raise MediaError(f"the video's codec is not read; send {_LIST}")
            stream.thread_type, stream.thread_count = "NONE", 1
            yield container, stream, kind[1]
    except (MemoryError, MediaError):
        raise
    except Exception as error:  # noqa: BLE001 - FFmpeg raises anything
        _log.info("a video does not open or decode: %s: %s", type(error).__name__, error)
        raise MediaError(_DAMAGED) from None


def read_video_size(data: bytes, limits: MediaLimits) -> MediaSize:
    """The size of the first frame, as it is shown, and how many packets the file has. Raises
    MediaError."""
    with _opened(data) as (container, stream, name):
        _check_pixels(stream.codec_context.width, stream.codec_context.height, limits)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        if not _RATES[0] <= rate <= _RATES[1]:
            raise MediaError(f"the video has {rate:g} frames a second, by its header; send one with {_RATES[0]:g} to {_RATES[1]:g}")
        count = 0
        for packet in container.demux(stream):
            count += packet.size > 0
            if count > limits.max_seconds * rate:
                raise MediaError(f"the video is longer than {limits.max_seconds:g} seconds; send a shorter one")
    with _opened(data) as (container, stream, _):
        first = next(container.decode(stream), None)
        if first is None or not count:
            raise MediaError("the video has no frames; send one with some")
        _check_pixels(first.width, first.height, limits)
        width, height = (first.height, first.width) if _turns(first) % 2 else (first.width, first.height)
    return MediaSize(name, width, height, count, count / rate)


def decode_frames(data: bytes, indices: Sequence[int], size: MediaSize, limits: MediaLimits) -> Iterator[Image]:
    """The frames with these numbers, ascending, in the order of time. A frame that the file does
    not have is the one before it. Raises MediaError."""
    numbers, last = iter(indices), None
    number = next(numbers, None)
    with _opened(data) as (container, stream, _):
        for place, frame in enumerate(container.decode(stream)):
            if place >= size.frames:
                break
            _check_pixels(frame.width, frame.height, limits)
            if number is not None and place < number and place + 1 < size.frames:
                last = frame
                continue
            last = frame
            picture = _to_picture(frame, size)
            while number is not None and number <= place:
                yield picture
                number = next(numbers, None)
            if number is None:
                return
    if last is None:
        raise MediaError(_DAMAGED)
    while number is not None:
        yield _to_picture(last, size)
        number = next(numbers, None)


def _to_picture(frame: Any, size: MediaSize) -> Image:
    from PIL.Image import Transpose

    picture: Image = frame.to_image()
    turns = {1: Transpose.ROTATE_90, 2: Transpose.ROTATE_180, 3: Transpose.ROTATE_270}
    if (turn := turns.get(_turns(frame))) is not None:
        picture = picture.transpose(turn)
    if picture.size != (size.width, size.height):
        picture = picture.resize((size.width, size.height))  # a stream may change its size
    return picture


def _turns(frame: Any) -> int:
    """Quarter turns to the left."""
    return round(float(getattr(frame, "rotation", 0) or 0) / 90) % 4


def _check_pixels(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_pixels:
        raise MediaError(f"the video has {width} x {height} pixels, and may have {limits.max_pixels} in all; send a smaller one")
