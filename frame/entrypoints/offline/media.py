"""Media of offline prompts: the forms in which a program gives them, and the service that prepares
them, in an event loop of its own.

Used by `Engine`. A file that the program names is read here, so the allow-lists apply to URLs only.
Must not know an engine.
"""

from __future__ import annotations

import asyncio
import io
import threading
import wave
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from frame.core.interfaces.media import MediaItem
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.media.media_service import MediaInputError, MediaPart, MediaService, PreparedMedia
from frame.entrypoints.media.placement import make_media_texts, place_items
from frame.host.socket_directory import SocketDirectory
from frame.text.chat_template import ChatTemplateError

if TYPE_CHECKING:
    from frame.config.resolved import Resolved
    from frame.text.tokenizer import Tokenizer

T = TypeVar("T")

MODALITIES = ("image", "video", "audio")
# Type of a content part -> what it holds: the forms of this API, and those of OpenAI's
KINDS = {name: name for name in MODALITIES} | {f"{name}_url": name for name in MODALITIES} | {"input_audio": "audio"}
SCHEMES = ("http:", "https:", "data:", "file:")
SAMPLE_RATE = 16_000  # of audio samples that come without one
_SCALE = 32767.0


class OfflineMedia:
    """The media of one engine. The media processes start with the first prompt that has some."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._service: MediaService | None = None

    def encode(self, prompt: Any, tokenizer: Tokenizer, held: ExitStack) -> tuple[list[int], list[MediaItem]]:
        """The token ids and the items of a prompt, a mapping with a text or a conversation. `held`
        keeps their files. Raises InvalidRequestError."""
        messages, parts = read_prompt(prompt)
        if not parts:
            raise InvalidRequestError("the prompt is a dict without image, video or audio; give its text alone", "prompt")
        service = self._open(parts)
        try:
            items: list[PreparedMedia] = self._run(service.prepare(parts, ""))
        except MediaInputError as error:
            raise InvalidRequestError(error.sentence, error.param) from None
        held.callback(self._release, items)
        texts = make_media_texts(items)
        try:
            if isinstance(messages, str):
                ids, order = tokenizer.encode_media(messages, texts)
            else:
                ids, order = tokenizer.encode_media_chat(messages, None, {}, texts)
        except ChatTemplateError as error:
            raise InvalidRequestError(str(error), "messages") from error
        return ids, place_items(ids, items, order, tokenizer.find_token_id)

    def close(self) -> None:
        """End the media processes. A second call does nothing."""
        with self._lock:
            loop, thread, service = self._loop, self._thread, self._service
            self._loop = self._thread = self._service = None
        if loop is None or thread is None or service is None:
            return
        asyncio.run_coroutine_threadsafe(service.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _open(self, parts: Sequence[MediaPart]) -> MediaService:
        """The service, which is started here. Raises InvalidRequestError for a model without
        encoders."""
        if self._resolved.media is None:
            part = parts[0]
            why = self._resolved.lacking_media.get(part.modality)
            sentence = f"{part.modality} parts cannot be read here: {why}"
            if why is None:
                sentence = f"this model takes text only, and this part is {part.modality}; leave it out"
            raise InvalidRequestError(f"{part.param}: {sentence}", part.param)
        with self._lock:
            if self._service is None:
                self._service = self._start()
            return self._service

    def _start(self) -> MediaService:
        folder = SocketDirectory()
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="media", daemon=True)
        self._thread.start()
        service = MediaService(self._resolved, folder.path)
        weakref.finalize(service, folder.remove)
        self._run(service.start())
        return service

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _release(self, items: list[PreparedMedia]) -> None:
        loop, service = self._loop, self._service
        if loop is not None and service is not None:
            loop.call_soon_threadsafe(service.release, items)


def read_prompt(prompt: Any) -> tuple[str | list[dict[str, Any]], list[MediaPart]]:
    """(the text or the messages as chat templates read them, the media in order). Raises
    InvalidRequestError."""
    parts: list[MediaPart] = []
    if isinstance(prompt, Mapping):
        if unknown := sorted(set(prompt) - {"prompt", *MODALITIES}):
            raise InvalidRequestError(f"the prompt has {unknown[0]!r}; it may have prompt, image, video and audio", "prompt")
        for modality in MODALITIES:
            value = prompt.get(modality)
            values = list(value) if isinstance(value, list) else [] if value is None else [value]
            parts += [read_part(modality, each, f"{modality}[{i}]") for i, each in enumerate(values)]
        return str(prompt["prompt"]), parts
    messages = []
    for i, message in enumerate(prompt):
        if not isinstance(message, Mapping) or message.get("content") is None:
            raise InvalidRequestError(f"messages[{i}].content is missing; give a string or a list of parts", f"messages[{i}].content")
        content = message["content"]
        if isinstance(content, list):
            content = [_read_content(part, f"messages[{i}].content[{j}]", parts) for j, part in enumerate(content)]
        messages.append({**message, "content": content})
    return messages, parts


def _read_content(part: Any, place: str, parts: list[MediaPart]) -> dict[str, Any]:
    """A part as chat templates read it; its file is added to `parts`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind not in KINDS:
        raise InvalidRequestError(f"{place}.type is {kind!r}; it must be one of text, {', '.join(KINDS)}", f"{place}.type")
    value, options = part.get(kind), {}
    if isinstance(value, Mapping):  # OpenAI's form
        options = {name: each for name, each in value.items() if name not in ("url", "data", "format")}
        value = f"data:application/octet-stream;base64,{value['data']}" if "data" in value else value.get("url")
    parts.append(read_part(KINDS[kind], value, f"{place}.{kind}", options))
    return {"type": KINDS[kind]}


def read_part(modality: str, value: Any, param: str, options: Mapping[str, Any] | None = None) -> MediaPart:
    """A file: a path, a URL, bytes, an image of PIL, an array of pixels (uint8 [height, width, 3])
    or of samples (float [n], alone or with its rate). Raises InvalidRequestError."""
    source: str | bytes
    if isinstance(value, bytes) or (isinstance(value, str) and value[:6].lower().startswith(SCHEMES)):
        source = value
    elif isinstance(value, str | Path):
        try:
            source = Path(value).read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{param}: {value} cannot be read ({error.strerror})", param) from None
    elif modality == "image" and (isinstance(value, np.ndarray) or hasattr(value, "getexif")):
        source = _encode_image(value, param)
    elif modality == "audio" and isinstance(value, np.ndarray | tuple):
        source = _encode_audio(value, param)
    else:
        raise InvalidRequestError(f"{param} is {type(value).__name__}; give a path, a URL, bytes, an image or an array of samples", param)
    return MediaPart(modality, source, param, dict(options or {}))


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")


def _encode_image(value: Any, param: str) -> bytes:
    """An image of PIL, turned as its EXIF data say, or pixels, as PNG: without loss, but for modes
    that PNG does not have, which become RGB."""
    from PIL import Image, ImageOps

    try:
        image = Image.fromarray(value) if isinstance(value, np.ndarray) else ImageOps.exif_transpose(value)
        if image.mode not in _PNG_MODES:
            image = image.convert("RGBA" if image.mode in ("RGBa", "La", "PA") else "RGB")
        data = io.BytesIO()
        image.save(data, "PNG", compress_level=1)
    except (TypeError, ValueError, OSError) as error:
        raise InvalidRequestError(f"{param} is no image ({error}); give uint8 of the shape [height, width, 3]", param) from None
    return data.getvalue()


def _encode_audio(value: Any, param: str) -> bytes:
    """Samples from -1 to 1 as WAV of 16 bits."""
    samples, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, SAMPLE_RATE)
    samples = np.asarray(samples)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise InvalidRequestError(f"{param} has the shape {samples.shape} of {samples.dtype}; give float samples of the shape [n]", param)
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(int(rate))
        file.writeframes((np.clip(samples, -1.0, 1.0) * _SCALE).round().astype("<i2").tobytes())
    return data.getvalue()
