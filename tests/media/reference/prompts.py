"""Prompts with images, videos and audio, made from seeds."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from tests.models.media_checkpoints import find_family

Chat = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """A prompt as `Engine` takes it, and its images in order."""

    name: str
    given: Any  # a chat, or a text with media
    images: tuple[Image.Image, ...] = ()


def make_image(seed: int, width: int = 90, height: int = 70) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def make_chat(*parts: Any, name: str = "") -> Prompt:
    """A user's message of texts and images."""
    content = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each} for each in parts]
    return Prompt(name, [{"role": "user", "content": content}], tuple(each for each in parts if not isinstance(each, str)))


def continue_chat(prompt: Prompt, response: str, *parts: Any, name: str) -> Prompt:
    """The next turn of a conversation."""
    added = make_chat(*parts)
    return Prompt(f"{prompt.name}, {name}", [*prompt.given, {"role": "assistant", "content": response}, *added.given],
                  prompt.images + added.images)  # fmt: skip


def make_prompts(architecture: str) -> list[Prompt]:
    """The forms that every architecture with images is tried in."""
    first, second, third = make_image(1), make_image(2, 60, 56), make_image(3, 120, 48)
    written = find_family(architecture).placeholders["image"]
    return [
        make_chat("look at", first, name="one image"),
        make_chat("look at", make_image(9), name="the same text and another image of equal size"),
        make_chat("a", first, "and then", second, "and at last", third, "compare them", name="three images"),
        make_chat(make_image(4, 31, 97), "is tall,", make_image(5, 101, 29), "is wide", name="odd sizes"),
        make_chat("once", first, "twice", first, "say", name="an image twice"),
        make_chat(first, second, third, "say", name="adjacent images"),
        Prompt("an image at both ends", {"prompt": f"{written}between{written}", "image": [first, second]}, (first, second)),
        make_chat("a question without an image, which is served beside the others", name="text"),
    ]


@cache
def make_video(seed: int, seconds: float = 2.0, rate: int = 4, width: int = 64, height: int = 56) -> bytes:
    """A video of noise in blocks, as MP4."""
    import av

    data, draw = io.BytesIO(), np.random.default_rng(seed)
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(int(seconds * rate)):
            blocks = draw.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(blocks.repeat(8, 0).repeat(8, 1)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return data.getvalue()


def make_sound(seed: int, seconds: float) -> np.ndarray:
    """Samples of 16 kHz."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, int(seconds * 16_000)).astype(np.float32)


def make_mixed_chats() -> list[Prompt]:
    """Prompts of several modalities, whose parts alternate and have odd sizes."""
    pictures = [make_image(1), make_image(4, 31, 97)]
    sounds = [make_sound(1, 1.3), make_sound(2, 0.371), make_sound(3, 2.0107)]
    film = make_video(1)  # of two seconds: its positions are whole numbers
    forms: dict[str, tuple[Any, ...]] = {
        "an image and a sound": ("look at", pictures[0], "and hear", sounds[0], "then say"),
        "the same text, and another sound": ("look at", pictures[0], "and hear", sounds[1], "then say"),
        "sounds around an image": (sounds[1], sounds[0], pictures[1], "say", sounds[2]),
        "two sounds": ("hear", sounds[2], "and", sounds[1], "say"),
        "all": ("see", film, "hear", sounds[1], "look", pictures[1], "again", sounds[1], pictures[0], "say"),
        "text": ("nothing to see or hear",),
    }
    prompts = []
    for name, parts in forms.items():
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": kind, kind: part}
            for part in parts
            for kind in ["image" if isinstance(part, Image.Image) else "audio" if isinstance(part, np.ndarray) else "video"]
        ]
        prompts.append(Prompt(name, [{"role": "user", "content": content}], tuple(p for p in parts if isinstance(p, Image.Image))))
    return prompts


def make_files_chat(kind: str, *parts: Any, name: str) -> Prompt:
    """A user's message of texts and files of one kind."""
    content = [{"type": "text", "text": each} if isinstance(each, str) else {"type": kind, kind: each} for each in parts]
    return Prompt(f"{kind}: {name}", [{"role": "user", "content": content}])
