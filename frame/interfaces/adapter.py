"""The interface of adapter formats: how a fine-tuned adapter is stored (`adapter/1`; LoRA, arXiv
2106.09685).

A format turns files into canonical deltas by checkpoint layer name. It must not know ranks, merged
layers, kernels or requests: the layers shard and merge what the axes describe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frame.core.errors import CheckpointError
from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.model import LazyTensor

PAGE_RANKS = 16  # ranks of an adapter in one page of the adapter pool


class AdapterError(CheckpointError):
    """An adapter's files are invalid, or do not fit the model. One sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class AdapterContext:
    """What an adapter format is built from."""

    dtype: torch.dtype  # of the model's activations


@dataclass(frozen=True, slots=True)
class AdapterCapabilities(Anything):
    """What an adapter format reads."""

    # (key, value) pairs that adapter_config.json must have; a key that is absent has the value None
    selects: tuple[tuple[str, str | bool | None], ...]

    def reads(self, config: Mapping[str, Any]) -> bool:
        """Whether adapters with this configuration are of the format."""
        return all(config.get(key) == value or (value is None and not config.get(key)) for key, value in self.selects)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's `adapter_config.json` in one vocabulary."""

    rank: int  # the largest of its deltas
    base_model: str = ""  # as the adapter names it
    # token ids (aLoRA, arXiv 2504.12397): the adapter is active from the last occurrence of these
    # tokens in the prompt on, and not at all without one; empty: for all tokens
    invocation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LowRankDelta:
    """What an adapter adds to one stored weight W [outputs, inputs], or to each of W [experts,
    outputs, inputs]: W + scale * b @ a, whose rows are then scaled.

    Axes are those of the checkpoint's tensor; the layers cut their parts. Experts have outputs
    before inputs however a checkpoint stores them, which an adapter's files do not say. The bias of
    a layer is neither changed nor scaled.
    """

    a: torch.Tensor  # [r, inputs], or [experts, r, inputs]
    b: torch.Tensor  # [outputs, r], or [experts, outputs, r]
    scale: float = 1.0
    output_scale: torch.Tensor | None = None  # [outputs]; factors of the rows of the sum; None: 1
    # [outputs]; the rows of the sum are scaled to these norms (DoRA, arXiv 2402.09353); None: they
    # keep theirs. At most one of the two is given.
    output_norm: torch.Tensor | None = None


class AdapterFormat(ABC):
    """Reads adapters of one format. Both methods are pure functions of what their arguments hold
    now, which the caller may change afterwards.

    Contract: every option of the configuration that changes the product is implemented or refused
    with AdapterError, and so is every tensor: none is skipped, except copies of the base model's
    own weights. Values are returned as they are stored; `read_deltas` computes in float32 where it
    must compute.
    """

    def __init__(self, context: AdapterContext, options: BaseModel | None = None) -> None:
        self.context = context

    @abstractmethod
    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        """Read `adapter_config.json`. Raises AdapterError, one sentence, which names the option."""

    @abstractmethod
    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Iterable[tuple[str, LowRankDelta]]:
        """Yield (name, delta) of all that the adapter changes, each once. A name is that of a
        checkpoint's layer ("model.layers.0.self_attn.q_proj"), whose tensor is `name.weight`, or of
        a stacked tensor itself ("model.layers.0.mlp.experts.gate_up_proj"). Raises AdapterError,
        one sentence, which names the tensor."""
