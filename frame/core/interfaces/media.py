"""Media of a request: images, videos and audio, from the message to the model.

`MediaItem` is what a request carries; `EncodeOrder` is what a step does with it; `MediaRows`,
`RotaryPositions` and `MediaSpans` are what a forward pass reads. Used by messages, the scheduler,
batches and models. It must not know a file format, a processor or a plugin.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch


class PlaceholderRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive placeholder tokens of an item; each gets the next row of the encoder's output."""

    start: int  # index of the first one in the prompt
    count: int
    # Frames, height and width of the rows, for models with rotary positions of three components
    # (M-RoPE, arXiv 2409.12191); their product is `count`. Zeros: positions as those of text.
    grid: tuple[int, int, int] = (0, 0, 0)
    frame_step: float = 1.0  # positions from one frame to the next, rounded down


class FeatureArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An array in a file of features."""

    name: str  # a keyword of the model's encoder
    dtype: str  # as numpy names it: "uint8", "float32", "int64"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class MediaItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image, a video or an audio file of a request, ready for the model's encoder.

    Two items with the same digest have the same features, rows and grids. The file belongs to the
    main process, which keeps it until the request ends; every rank maps it.
    """

    modality: str  # name of the plugin: "image", "video", "audio"
    digest: bytes  # SHA-256 of the client's bytes and of every option that the features depend on
    runs: list[PlaceholderRun]  # ascending; empty: the input of an encoder-decoder model
    patches: int  # what encoding costs, in positions of the encoder
    path: str  # of the file of features
    arrays: list[FeatureArray]

    @property
    def num_rows(self) -> int:
        """Rows of the encoder's output that the prompt reads."""
        return sum(run.count for run in self.runs)


class EncodeOrder(msgspec.Struct, frozen=True, array_like=True):
    """Before a step: encode an item."""

    item: MediaItem
    rows: np.ndarray  # int32 [item.num_rows]; where the output goes in the table of `MediaRows`
    slot: int = -1  # of an encoder-decoder model: the request slot whose block gets the keys and values
    first_layer: int = 0  # earlier steps have computed those before it; -1: forget these layers, and compute none
    stop_layer: int = 0  # a later step goes on with it; 0: the item is encoded to its end


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Extension of steps with placeholders: which row of the encoders' output each token has in
    place of its embedding."""

    rows: torch.Tensor  # int64 [tokens]; -1: a token of text
    table: torch.Tensor  # [rows, HasEncoders.encoder_width]

    def place(self, embedded: torch.Tensor) -> torch.Tensor:
        """The embeddings of the tokens, [tokens, hidden_size], with the rows of placeholders in
        their place."""
        return self._gather(0, embedded.shape[1], embedded)

    def count_layers(self, hidden_size: int) -> int:
        """The first layers of the decoder after which further columns are added (DeepStack)."""
        return self.table.shape[1] // hidden_size - 1

    def get_addition(self, layer: int, hidden_size: int) -> torch.Tensor:
        """What is added to the stream after this layer, [tokens, hidden_size]; 0 for text."""
        return self._gather(layer + 1, hidden_size, 0)

    def shift(self, query_starts: torch.Tensor) -> MediaRows:
        """Of each token the row of the next one, as a drafter reads it; -1 for the last token of a
        chunk, whose next one the step does not know. query_starts: those of the batch."""
        return MediaRows(self.rows.roll(-1).index_fill(0, query_starts[1:].long() - 1, -1), self.table)

    def _gather(self, block: int, size: int, otherwise: torch.Tensor | float) -> torch.Tensor:
        """`size` columns of the rows. Others get a value of their own, whatever row 0 holds: the
        rows of another request may not be finite."""
        rows = self.table[:, block * size : (block + 1) * size].index_select(0, self.rows.clamp(min=0))
        return rows.where(self.rows.ge(0).unsqueeze(1), otherwise)


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Extension of models with rotary positions of three components: frame, height and width of
    each token. Without it the three are equal to `ForwardBatch.positions`."""

    positions: torch.Tensor  # int64 [3, tokens]


@dataclass(frozen=True, slots=True)
class MediaSpans:
    """Extension of models whose placeholders attend to each other in both directions. Backends that
    say `spans` read it in layers with `AttentionSpec.spans`. A chunk holds an item whole."""

    ends: torch.Tensor  # int32 [tokens]; keys, counted from the sequence's start, that the token sees at least; 0: as text


@runtime_checkable
class HasEncoders(Protocol):
    """Optional protocol of models that read media."""

    @property
    def encoder_width(self) -> int:
        """Numbers in a row of the encoders' output: `hidden_size`, and once more for each decoder
        layer after which further rows are added (DeepStack, arXiv 2406.04334)."""

    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Encode several items of one modality together. items: each one's arrays on the device, by
        name, as the modality's plugin wrote them. -> of each item [rows, encoder_width], in the
        model's dtype. Called before the forward pass, in inference mode."""


@runtime_checkable
class DividesEncoders(HasEncoders, Protocol):
    """Optional protocol of models whose encoders several steps may share."""

    def encode_by_layer(self, modality: str, item: Mapping[str, torch.Tensor]) -> Generator[None, None, torch.Tensor]:
        """As `encode`, of one item, with the same bits. Yields after each layer but the last."""
