"""Content parts with media, in the shapes of the chat APIs, as `MediaPart`.

Used by the request schemas, which put the parts into the messages of a chat request. A part that
cannot be served raises ApiError 400 with its place. Must not know a file beyond its first bytes.
"""

from __future__ import annotations

import binascii
import mimetypes
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.validation_errors import type_name
from frame.entrypoints.media.media_service import MediaPart

MODALITIES = ("image", "video", "audio")
URL_PARTS = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
PARTS = (*URL_PARTS, "input_audio", "file")  # of chat completions
SCHEMES = ("http:", "https:", "data:", "file:")
MAX_OPTIONS = 8  # of a part
_HEAD = 64  # characters of base64 that say what a file is
_BASE64 = re.compile(r"data:[^,]{0,256};base64,", re.IGNORECASE)
# First bytes of a file -> what it is
_MAGIC = (
    (rb"\x89PNG\r\n", "image"), (rb"\xff\xd8\xff", "image"), (rb"GIF8[79]a", "image"), (rb"BM....\x00\x00\x00\x00", "image"),
    (rb"RIFF....WEBP", "image"), (rb"RIFF....WAVE", "audio"), (rb"OggS", "audio"), (rb"fLaC", "audio"), (rb"ID3", "audio"),
    (rb"\xff[\xe2-\xff]", "audio"), (rb"....ftypM4[AB]", "audio"), (rb"....ftyp", "video"), (rb"\x1aE\xdf\xa3", "video"), (rb"%PDF", "pdf"),
)  # fmt: skip
_KINDS = tuple((re.compile(pattern, re.DOTALL), kind) for pattern, kind in _MAGIC)


def read_chat_part(kind: str, part: Mapping[str, Any], place: str) -> MediaPart:
    """A part of chat completions of one of the kinds `PARTS`. Raises ApiError 400."""
    value, here = part.get(kind), f"{place}.{kind}"
    if kind == "file":
        return read_file_part(_object(value, here), here)
    if kind == "input_audio":
        return read_audio_part(_object(value, here), here)
    if isinstance(value, str):
        return MediaPart(URL_PARTS[kind], check_url(value, here), here)
    fields = _object(value, here)
    return MediaPart(URL_PARTS[kind], check_url(fields.get("url"), f"{here}.url"), f"{here}.url", read_options(fields, {"url"}, here))


def read_audio_part(fields: Mapping[str, Any], place: str) -> MediaPart:
    """OpenAI's `{"data": BASE64, "format": "wav"}`; the format is that of the content."""
    options = read_options(fields, {"data", "format"}, place)
    return MediaPart("audio", from_base64(fields.get("data"), f"{place}.data"), f"{place}.data", options)


def read_file_part(fields: Mapping[str, Any], place: str) -> MediaPart:
    """An image, a video or an audio file, by its content. Raises ApiError 400 for others, and for
    the id of a file."""
    if fields.get("file_id"):
        raise ApiError(400, f"{place}.file_id is not supported; send the file itself in file_data", f"{place}.file_id")
    name = fields.get("filename")
    if url := fields.get("file_url"):
        here = f"{place}.file_url"
        kind = _kind_of_name(urlsplit(check_url(url, here)).path) or _kind_of_name(name)
        return MediaPart(_modality(kind, here), url, here)
    here = f"{place}.file_data"
    source = from_base64(fields.get("file_data"), here)
    start = source.index(",") + 1
    return MediaPart(_modality(_kind_of(source[start : start + _HEAD]), here), source, here)


def read_options(fields: Mapping[str, Any], known: set[str], place: str) -> dict[str, Any]:
    """The other fields of a part, which its modality reads. Raises ApiError 400 for those that are
    no plain values."""
    options = {name: value for name, value in fields.items() if name not in known and value is not None}
    if options.get("detail") == "auto":
        del options["detail"]
    if len(options) > MAX_OPTIONS:
        raise ApiError(400, f"{place} has {len(options)} options; it may have {MAX_OPTIONS}", place)
    for name, value in options.items():
        if not isinstance(value, str | int | float):
            raise ApiError(400, f"{place}.{name[:64]} is {type_name(value)}; send a text or a number", f"{place}.{name[:64]}")
    return options


def from_base64(data: Any, place: str) -> str:
    """A file in base64, or a data: URL of it, as a data: URL. Raises ApiError 400."""
    if not isinstance(data, str) or not data:
        raise ApiError(400, f"{place} is {_describe(data)}; send the file in base64", place)
    if data[:5].lower() != "data:":
        return f"data:application/octet-stream;base64,{data}"
    if _BASE64.match(data) is None:
        raise ApiError(400, f"{place} is a data: URL without base64; send data:TYPE;base64,DATA", place)
    return data


def _describe(value: Any) -> str:
    return "empty" if value == "" else type_name(value)


def from_text(source: Any, place: str) -> str:
    """A URL, or a file in base64, as a URL. Raises ApiError 400."""
    is_url = isinstance(source, str) and source[:6].lower().startswith(SCHEMES)
    return check_url(source, place) if is_url else from_base64(source, place)


def check_url(url: Any, place: str) -> str:
    """The URL. Raises ApiError 400 for what is none."""
    if not isinstance(url, str) or not url:
        raise ApiError(400, f"{place} is {_describe(url)}; send a URL (data:, https: or http:)", place)
    if not url[:6].lower().startswith(SCHEMES):
        raise ApiError(400, f"{place} is {quoted(url)}; send a URL that begins with data:, https: or http:", place)
    if url[:5].lower() == "data:":
        return from_base64(url, place)
    return url


def _kind_of(head: str) -> str | None:
    """What a file is, by its first characters in base64."""
    head = head[: len(head) // 4 * 4]
    try:
        start = binascii.a2b_base64(head)
    except binascii.Error:
        return None
    return next((kind for pattern, kind in _KINDS if pattern.match(start)), None)


def _kind_of_name(name: Any) -> str | None:
    kind = (mimetypes.guess_type(name)[0] if isinstance(name, str) else None) or ""
    return "pdf" if kind == "application/pdf" else next((each for each in MODALITIES if kind.startswith(f"{each}/")), None)


def _modality(kind: str | None, place: str) -> str:
    if kind == "pdf":
        raise ApiError(400, f"{place} is a PDF, which is not supported; send its pages as images, or its text", place)
    if kind is None:
        raise ApiError(400, f"{place} is no image, video or audio file of a known format; send one of those", place)
    return kind


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(400, f"{place} is {type_name(value)}; send an object", place)
    return value
