"""The interface of drafters (kind `drafter`), which propose tokens that the model verifies.

A draft is verified by replay: the row computes the drafted tokens as an extend, the sampler draws
the token of each position, and a drafted token is accepted while it equals the token drawn there.
The output therefore does not depend on the drafter; only the number of steps does. The scheduler
calls host drafters; `device_drafter` has the interface of those with a model. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from frame.core.interfaces.plugin import Reason
from frame.core.interfaces.sampling_params import MAX_DRAFT

if TYPE_CHECKING:
    import numpy as np
    from pydantic import BaseModel

    from frame.core.interfaces.batch import SlotSetup

MAX_STEPS = MAX_DRAFT  # largest number of tokens of a draft


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The model and the slots that a drafter is built for."""

    vocab_size: int
    max_slots: int
    max_context: int  # tokens of a sequence, prompt and output
    num_steps: int  # most tokens of a draft
    draft_model_path: str | None = None  # folder of a checkpoint


@dataclass(frozen=True, slots=True)
class DrafterRequirements:
    """The configuration that a drafter has to fit."""

    device: str
    draft_model: bool = False  # whether `speculative.draft_model_path` is set
    draft_layers: int = 0  # layers of the checkpoint that only a drafter uses
    pp: int = 1  # stages
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too


@dataclass(frozen=True, slots=True)
class DrafterCapabilities:
    """Where a drafter runs and what it needs."""

    runs_on: Literal["host", "device"] = "host"  # host: the scheduler calls it with committed tokens; device: a `DeviceDrafter`
    needs_draft_model: bool = False  # reads `speculative.draft_model_path`
    loads_model: bool = False  # the draft model is that of the model plugin for its architecture
    head_field: str = ""  # of the draft model's config.json, which the drafter's heads have and other checkpoints do not
    needs_draft_layers: bool = False  # reads layers of the target's checkpoint that only a drafter uses
    keeps_texts: bool = False  # uses texts of ended requests, for requests of the same tenant

    def unsupported(self, requirements: DrafterRequirements) -> list[Reason]:
        if self.needs_draft_model and not requirements.draft_model:
            return [Reason("it needs a draft model; set speculative.draft_model_path")]
        if requirements.draft_model and not self.needs_draft_model:
            return [Reason("it reads no draft model; leave speculative.draft_model_path open")]
        if self.needs_draft_layers and not requirements.draft_layers:
            return [Reason("it reads multi-token-prediction layers; config.json has no num_nextn_predict_layers or mtp_num_hidden_layers")]
        if self.runs_on == "device" and requirements.pp > 1:
            return [Reason("it drafts on the device, which stages cannot share", "parallel.pp: 1")]
        return []


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens of several slots."""

    token_ids: np.ndarray  # int32 [sum of counts]; the slots' drafts, one after the other
    counts: np.ndarray  # int32 [n]; tokens of each slot's draft; 0: none


class Drafter(ABC):
    """Proposes the next tokens of request slots, on the host.

    Contract:
    - `add_slot` sets a slot up, or sets it up again with more tokens of the same request.
      `remove_slot` ends its use; a slot that is set up again afterwards has no tokens of the
      request before. With `keeps_texts`, drafts may come from other requests with the same
      `setup.tenant`, and from no others.
    - `observe_tokens` gets every output token of the slots after `setup.token_ids`, in order.
    - `propose_tokens` continues the tokens given so far, changes nothing, and returns at most
      `max_tokens[i]` token ids of the vocabulary for each slot. A draft that is wrong costs time
      and changes no output.
    - The methods work on arrays of slots. Their time does not grow with the length of a text.
    - State is kept for the slots in use only; with `keeps_texts` also in a bounded amount of
      memory.
    - After an error that a method raises, the drafter gets no more calls, and its requests continue
      without drafts.
    """

    def __init__(self, context: DrafterContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def add_slot(self, setup: SlotSetup) -> None:
        """`setup.token_ids`: the prompt, then the output so far."""

    @abstractmethod
    def remove_slot(self, slot: int) -> None: ...

    @abstractmethod
    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """New output tokens. slots: int64 [n], each once. token_ids: int32 [n, width], of which the
        first `counts[i]` of row i are valid. counts: int32 [n], at least 1."""

    @abstractmethod
    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        """The drafts of these slots. slots: int64 [n], each once. max_tokens: int32 [n], 1 to
        `DrafterContext.num_steps`."""
