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

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from frame.core.interfaces.plugin import Reason
from frame.core.interfaces.sampling_params import MAX_DRAFT

if TYPE_CHECKING:
    from frame.core.interfaces.batch import SlotSetup

MAX_STEPS = MAX_DRAFT  # largest number of tokens of a draft
MAX_TREE_KEYS = 31  # tokens of a row with a tree: a token's word in `TreeMask` names those before it


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Trees of drafted tokens as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858): of the tokens
    reached in `depth` passes over `width` branches, the likeliest are verified."""

    width: int
    depth: int
    num_nodes: int  # maximum number of drafted tokens

    @property
    def num_extended(self) -> int:
        """Tokens of a tree that the drafter's model reads."""
        return self.width * (self.depth - 1)


class TreeOptions(BaseModel):
    """Options of a drafter that drafts trees where `DrafterContext.tree` is set; SGLang's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eagle_topk: int = Field(1, ge=1, le=8, description="Branches that each of the num_steps passes extends; 1: drafts are chains.")
    num_draft_tokens: int | None = Field(
        None,
        ge=2,
        le=MAX_STEPS + 1,
        description="Tokens of a tree that a step verifies, with the last one of the sequence. Default: num_steps * eagle_topk + 1.",
    )


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The model and the slots that a drafter is built for."""

    vocab_size: int
    max_slots: int
    max_context: int  # tokens of a sequence, prompt and output
    num_steps: int  # maximum length of a draft
    draft_model_path: str | None = None  # folder of a checkpoint
    tree: TreeShape | None = None  # None: drafts are chains


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
    """Drafted tokens of several slots. A draft is a chain, or a tree: token i of a slot's draft is
    node i + 1, and node 0 is the slot's last token."""

    token_ids: np.ndarray  # int32 [sum of counts]; the slots' drafts, one after the other
    counts: np.ndarray  # int32 [n]; tokens of each slot's draft; 0: none
    parents: np.ndarray | None = None  # int32 [sum of counts]; the node that each token follows, an earlier one; None: chains

    @property
    def offsets(self) -> np.ndarray:
        """int64 [sum of counts]: the tokens of the same draft before each token."""
        return np.arange(len(self.token_ids)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)

    def shorten(self, counts: np.ndarray) -> Drafts:
        """The first `counts` tokens of each draft, int32 [n]."""
        if (counts == self.counts).all():
            return self
        kept = self.offsets < np.repeat(counts, self.counts)
        return Drafts(self.token_ids[kept], counts, None if self.parents is None else self.parents[kept])


class Drafter(ABC):
    """Proposes the next tokens of request slots, on the host.

    Contract:
    - `add_slot` sets a slot up, or sets it up again with more tokens of the same request.
      `remove_slot` ends its use; a slot that is set up again afterwards has no tokens of the
      request before. With `keeps_texts`, drafts may come from other requests with the same
      `setup.tenant`, and from no others.
    - `observe_tokens` gets every output token of the slots after `setup.token_ids`, in order.
    - `propose_tokens` continues the tokens so far, changes nothing, and returns at most
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
        """`setup.token_ids`: the prompt, then the output so far. A negative one stands for a
        placeholder of a certain image, video or audio file; drafts end, or are cut, before one."""

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
