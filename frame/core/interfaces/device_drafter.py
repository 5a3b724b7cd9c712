"""The interface of device drafters: drafters with a model of their own, which drafts on the device
after each step.

The plugin class has two halves. Each rank's runner builds the model and calls it. The scheduler
has an instance that holds the drafts of the last step by slot, which `DeviceDrafter` implements.
Used by the model runner and the scheduler. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from frame.core.interfaces.drafter import Drafter, DrafterContext, Drafts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch, SlotSetup
    from frame.core.interfaces.model import LazyTensor, Model, ModelConfig, ModelContext


@dataclass(frozen=True, slots=True)
class DraftModelContext:
    """What a draft model is built from: the loaded target model, the context that its layers take,
    and the index of its first attention layer."""

    target: Model
    context: ModelContext  # its `model_config` is that of `DeviceDrafter.read_config`, or the target's
    first_layer: int  # the layers are numbered from here; their keys are in the target's pages
    make_model: Callable[[], Model] | None = None  # for drafters with `loads_model`: makes the model of the draft checkpoint


class DraftModel(ABC):
    """The model of a device drafter. Implementations also derive from `torch.nn.Module`.

    A step drafts in passes. The first one has all tokens of the step, so that the model's cache
    also covers prompts. Each further pass has one token of each row that drafts.

    Contract:
    - Entry p of the model's cache depends on tokens 0 to p, and with `reads_next` on token p + 1,
      which is then the id of the entry in `batch.token_ids`. Positions are those of the entries.
    - `forward` returns the states of all tokens, or of the batch's `SelectedTokens` where present.
    - Nothing waits for the device, and no shape depends on values, so that CUDA graphs can capture
      the passes.
    - A wrong draft costs time and changes no output.
    """

    reads_next: ClassVar[bool] = True
    tapped_layers: frozenset[int] = frozenset()  # see `HiddenStateOutputs`
    needs_passes: ClassVar[bool] = True  # False: all tokens of a draft come from the states of the first pass

    def read_states(self, hidden: torch.Tensor, hidden_outputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The states of the first pass, [tokens, width]. hidden: what the target's `forward`
        returns, [tokens, hidden_size]; hidden_outputs: the `tapped_layers`."""
        return hidden

    @abstractmethod
    def forward(self, batch: ForwardBatch, states: torch.Tensor) -> torch.Tensor:
        """One pass. states: those of `read_states`, later those of the pass before. -> states
        [tokens or selected tokens, width]."""

    @abstractmethod
    def compute_logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        """The logits of the draft's token number `place`, from 0, over the target's vocabulary: [n,
        width] -> [n, vocab]."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        """As `Model.load_weights`; the weights are those of `DeviceDrafter.get_folder`."""


class DeviceDrafter(Drafter):
    """Proposes the next tokens of request slots, on the device.

    After each step and its verification the runner passes the step's tokens and hidden states to
    the model of `build_model`, draws the draft of each row with the row's own random numbers, and
    sends the drafts to the host with the step's result. Where the target draws at a temperature,
    the draft is drawn at that temperature too, so that equal distributions draw equal tokens.
    """

    def __init__(self, context: DrafterContext, options: BaseModel | None = None) -> None:
        self.context = context
        self._drafts = np.zeros((context.max_slots, context.num_steps), np.int32)
        self._parents = np.zeros_like(self._drafts)  # of trees
        self._counts = np.zeros(context.max_slots, np.int32)

    # the runner's half ----------------------------------------------------------------------------

    def get_folder(self) -> str | None:
        """The folder of the draft model's checkpoint; None: its weights are in the target's."""
        return self.context.draft_model_path

    def read_config(self, target: ModelConfig) -> ModelConfig:
        """The configuration that the draft model's layers are built from; default: the target's."""
        return target

    @abstractmethod
    def build_model(self, context: DraftModelContext) -> DraftModel:
        """Build the draft model on the meta device."""

    # the scheduler's half -------------------------------------------------------------------------

    def add_slot(self, setup: SlotSetup) -> None:
        self._counts[setup.slot] = 0

    def remove_slot(self, slot: int) -> None:
        self._counts[slot] = 0

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        self._counts[slots] = 0

    def store_drafts(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """The drafts of these slots after their last token. slots: int64 [n], each once; token_ids:
        int32 [n, width] or [n, 2, width], see `StepResult.drafts`."""
        width = token_ids.shape[-1]
        if self.context.tree is not None:
            token_ids, self._parents[slots, :width] = token_ids[:, 0], token_ids[:, 1]
        self._drafts[slots, :width] = token_ids
        self._counts[slots] = width

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        counts = np.minimum(self._counts[slots], max_tokens)
        is_drafted = np.arange(self._drafts.shape[1]) < counts[:, None]
        parents = None if self.context.tree is None else self._parents[slots][is_drafted]
        return Drafts(self._drafts[slots][is_drafted], counts, parents)
