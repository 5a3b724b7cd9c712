"""The interface of modalities: how a client's file becomes placeholders of the prompt and arrays
for the model's encoder (`modality/1`), and `MediaPlan`, how a server reads them.

A modality runs in the media processes, where alone a client's bytes are decoded. It must not know a
request, a token id, a device or the encoder.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.core.errors import ConfigurationError
from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    import numpy as np
    from pydantic import BaseModel

    from frame.core.interfaces.model import ModelConfig


ITEM_NUMBER = "\N{OBJECT REPLACEMENT CHARACTER}"  # in an expansion: how many items of the modality come before it in the prompt
_LONGEST = 8192  # patches that one of them attends to, at most: pictures of a video and tiles attend to themselves


class MediaError(ValueError):
    """A file cannot be used. One sentence for the client with the remedy, which never holds a
    decoder's message."""


@dataclass(frozen=True, slots=True)
class ModalityCapabilities(Anything):
    """What a modality reads."""

    modality: str  # "image", "video", "audio": what a part of a request says, and `ModelCapabilities.modalities`
    formats: tuple[str, ...] = ()  # by content: "PNG", "JPEG", "WAV"


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds of one file, checked in its header and again while it is decoded."""

    max_pixels: int = 64_000_000  # of an image, or a frame of a video
    max_frames: int = 768  # of a video that the model gets
    max_seconds: float = 3600.0  # of a video or audio file


@dataclass(frozen=True, slots=True)
class ModalityContext:
    """What a modality is built from."""

    folder: Path  # of the checkpoint
    model_config: ModelConfig
    limits: MediaLimits = field(default_factory=MediaLimits)
    processor_options: Mapping[str, Any] = field(default_factory=dict)  # those of the server (`--mm-processor-kwargs`)


@dataclass(frozen=True, slots=True)
class MediaSize:
    """What a file's header says."""

    format: str
    width: int = 0  # pixels, as the picture is shown: after the rotation that the file asks for
    height: int = 0
    frames: int = 0  # of a video or animation; 0: unknown
    seconds: float = 0.0  # of a video or audio file; 0: unknown


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """What an item becomes in the prompt."""

    expansion: str  # the text that stands in place of `Modality.placeholder`; see `ITEM_NUMBER`
    # Of each run of row tokens in the expansion, in order: frames, height and width of its rows;
    # (0, 0, 0): positions as those of text. Empty: so for all runs.
    grids: tuple[tuple[int, int, int], ...] = ()
    frame_step: float = 1.0  # see `PlaceholderRun`
    patches: int = 0  # what encoding costs, in positions of the encoder


class Modality(ABC):
    """Reads files of one modality for one checkpoint.

    Contract: the methods are pure functions of their arguments, which several threads may call.
    Header and decoder agree: an item has as many rows as its layout says. Pixels are turned as the
    file asks, those of 16 bits keep their upper eight, alpha and colours that the file says are
    transparent are laid over white, and frames are in the order of time. The channels of a sound
    are averaged, and other rates than the model's are resampled with a low-pass filter. Patches of
    a grid are in its order, row by row or, where rows are merged, block by block.
    """

    def __init__(self, context: ModalityContext, options: BaseModel | None = None) -> None:
        self.context = context

    @property
    @abstractmethod
    def placeholder(self) -> str:
        """The text that the checkpoint's chat template writes for one item."""

    @property
    @abstractmethod
    def row_token(self) -> str:
        """The token of an expansion that gets a row of the encoder's output."""

    @abstractmethod
    def read_size(self, data: bytes) -> MediaSize:
        """Read the header, without decoding. Raises MediaError for a format that is not listed, and
        for a file beyond the limits."""

    @abstractmethod
    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        """The item's place in the prompt, from its size alone. options: those of the request's
        part, such as "detail" and "fps". Raises MediaError for options that it does not read, or
        with unusable values."""

    @abstractmethod
    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Decode the file, to the keywords of the model's encoder.

        Pixels that were resized stay bytes. The encoder computes `bytes * scale + offset` in
        float32, with the arrays `<name>.scale` and `<name>.offset`, float32 [channels], of the
        array `<name>`, uint8, whose axis 1 has the channels: [tiles, channels, height, width].
        Bytes of patches are [patches, channels, frames, height, width] in the processor's order.
        One frame stands for `temporal_patch_size` equal ones; the encoder repeats it, and flattens
        all axes but the first. An array without these two has the processor's own numbers and
        shape. Other arrays are the processor's further outputs, int64 with an axis of items
        ("image_grid_thw" [1, 3]).

        Raises MediaError for a file that is damaged, or differs from its header."""


def need_package(name: str, extra: str) -> ConfigurationError:
    """The error of a package that is not installed."""
    return ConfigurationError(f"{name} is not installed; run: pip install 'frame-serve[{extra}]'.")


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """What encoding costs, in prompt tokens that take as long."""

    num_layers: int
    patch: float  # tokens for a patch in all layers, without attention
    pair: float  # tokens for two patches of which one attends to the other

    def count_tokens(self, patches: int) -> float:
        return patches * (self.patch + self.pair * min(patches, _LONGEST))

    def find_patches(self, tokens: float) -> int:
        """The most patches that cost so many tokens."""
        count = 2 * tokens / (self.patch + math.sqrt(self.patch**2 + 4 * self.pair * tokens))
        return int(count if count <= _LONGEST else tokens / (self.patch + self.pair * _LONGEST))


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """How a model with encoders reads media."""

    table_rows: int  # of the device's table of encoded media
    encode_budget: int  # positions of the encoder in a step; an item with more is encoded alone, or by layers beside decodes
    modalities: tuple[str, ...]
    whole_items: bool = False  # a chunk holds an item's consecutive placeholders together, see `MediaSpans`
    rotary_positions: bool = False  # positions of three components, see `RotaryPositions`
    costs: Mapping[str, EncoderCost] = field(default_factory=dict)  # by modality, of encoders that steps can divide
    processes: int = 2  # that decode files

    @property
    def held_patches(self) -> int:
        """Most patches of an item whose encoding several steps divide: what it has computed stays
        on the device between them. One of 4K pixels has fewer at the default budget."""
        return 4 * self.encode_budget if self.costs else 0
