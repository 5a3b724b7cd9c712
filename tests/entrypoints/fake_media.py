"""A checkpoint whose tokenizer knows placeholders of media, and a service that prepares media
without a processor: an image of N bytes has N rows, and its "file of features" is its bytes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from frame import models
from frame.entrypoints.media.media_service import MediaCounters, MediaInputError, MediaPart, PreparedMedia
from frame.interfaces.modality import MediaLayout

TOKENS = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}  # they are the rows' tokens too
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% else %}[<|{{ part.type }}|>]{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
PNG = b"\x89PNG\r\n"


def make_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """The configuration and the tokenizer of frame-tiny, with tokens of media."""
    source = Path(models.__file__).parent / "frame_tiny"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    for number, token in enumerate(TOKENS.values()):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": config["vocab_size"] + number, "content": token, "special": True, **flags})
    config["vocab_size"] += len(TOKENS)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def make_image(rows: int) -> bytes:
    """A file that the fake service takes for an image of so many rows."""
    return PNG + b"x" * (rows - len(PNG))


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class FakeMedia:
    """`held`: the files that were prepared and not released. `files`: URL -> bytes."""

    def __init__(self, folder: Path, modalities: Sequence[str] = ("image", "video", "audio")) -> None:
        self.held: dict[str, str] = {}  # path -> owner
        self.asked: list[MediaPart] = []
        self.files: dict[str, bytes] = {}
        self.counters = MediaCounters()
        self.pool = SimpleNamespace(num_deaths=0)
        self.gate = asyncio.Event()  # preparations wait for it
        self.gate.set()
        self._folder = folder
        self._modalities = modalities
        self._numbers = itertools.count()

    def placeholders(self) -> Mapping[str, str]:
        return {name: TOKENS[name] for name in self._modalities}

    async def prepare(self, parts: Sequence[MediaPart], owner: str) -> list[PreparedMedia]:
        self.asked += parts
        items = []
        try:
            for part in parts:
                items.append(self._prepare(part, owner))
            await self.gate.wait()
        except BaseException:
            self.release(items)
            raise
        return items

    def _prepare(self, part: MediaPart, owner: str) -> PreparedMedia:
        source = part.source
        data = source if isinstance(source, bytes) else self.files.get(source)
        if data is None:
            if not str(source).startswith("data:"):
                raise MediaInputError(f"{part.param}: this address is not allowed", part.param)
            data = base64.b64decode(str(source).partition(",")[2])
        if data.startswith(b"BAD"):
            raise MediaInputError(f"{part.param}: this file is damaged; send another", part.param)
        token, rows = TOKENS[part.modality], len(data)
        path = self._folder / f"{next(self._numbers)}.features"
        path.write_bytes(data)
        self.held[str(path)] = owner
        self.counters.items[part.modality] += 1
        self.counters.bytes += len(data)
        # a video has two frames, each with a run of rows
        expansion = f"{token * rows}" if part.modality != "video" else f"a{token * rows}b{token * rows}"
        grids = ((1, 1, rows),) if part.modality == "image" else ()
        return PreparedMedia(
            part.modality, hashlib.sha256(data).digest(), MediaLayout(expansion, grids, patches=rows), token, token, str(path), []
        )

    def release(self, items: Sequence[PreparedMedia]) -> None:
        for item in items:
            del self.held[item.path]
            Path(item.path).unlink()

    def list_files(self) -> list[str]:
        return [str(path) for path in self._folder.glob("*.features")]
