"""What a runner calls in each step to read media, and what bounds their memory.

`frame.media` implements it. Must not know a file, a modality or a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch


@dataclass(frozen=True, slots=True)
class MediaSizes:
    """What bounds the memory of a rank's encoders."""

    table_rows: int  # of `MediaRows.table`
    step_patches: int  # that one step encodes; see `MediaItem.patches`
    held_patches: int = 0  # most of an item whose encoding several steps divide


class StepMedia(Protocol):
    """A rank's media, as its runner uses them: `begin_step`, then `find_positions`, `list_arrays`
    and `make_extensions` of the step's batch."""

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Encode the items of the batch, and set up its slots. Raises RuntimeError for features
        that cannot be read or encoded."""

    def find_positions(self, slots: np.ndarray, positions: np.ndarray, batch: ScheduledBatch | None = None) -> np.ndarray:
        """The rotary positions of tokens, of three components the first one. slots, positions: of
        each token, int64 [n]; the positions as those of text alone. batch: whose tokens these are;
        None: they come after the prompt. -> int64 [n]."""

    def list_arrays(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """The arrays that `make_extensions` reads on the device; empty for a step of text."""

    def make_extensions(self, tensors: Mapping[str, torch.Tensor], positions: torch.Tensor) -> dict[type, Any]:
        """The extensions of the step. positions: int64 [tokens], those of its `ForwardBatch`."""

    def get_fixed(self, size: int) -> dict[type, Any]:
        """The extensions of every step of up to `size` tokens, at fixed addresses."""

    def place_tokens(self, batch: ForwardBatch) -> None:
        """Copy the extensions of a step to these addresses."""

    def shift_positions(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The rotary positions of tokens after the prompt, which are at these places of these
        request slots; int64 [n] each."""
