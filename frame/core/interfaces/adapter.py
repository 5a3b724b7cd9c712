"""The interface of adapter formats: how a fine-tuned adapter is stored (`adapter/1`), and what
layers call to apply low-rank deltas (LoRA, arXiv 2106.09685).

A format turns files into canonical deltas by checkpoint layer name. It must not know ranks, merged
layers, kernels or requests: the layers shard and merge what the axes describe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from frame.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch
    from frame.core.interfaces.model import LazyTensor

PAGE_RANKS = 16  # ranks of an adapter in one page of the adapter pool


class AdapterError(CheckpointError):
    """An adapter's files are invalid, or do not fit the model. One sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class AdapterContext:
    """What an adapter format is built from."""

    dtype: torch.dtype  # of the model's activations


@dataclass(frozen=True, slots=True)
class AdapterCapabilities:
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

    Axes are those of the checkpoint's tensor; the layers cut their parts. The bias of a layer is
    neither changed nor scaled.
    """

    a: torch.Tensor  # [r, inputs], or [experts, r, inputs]
    b: torch.Tensor  # [outputs, r], or [experts, outputs, r]
    scale: float = 1.0
    output_scale: torch.Tensor | None = None  # [outputs]; factors of the rows of the sum; None: 1
    # [outputs]; the rows of the sum are scaled to these norms (DoRA, arXiv 2402.09353); None: they
    # keep theirs. At most one of the two is given.
    output_norm: torch.Tensor | None = None


class AdapterFormat(ABC):
    """Reads adapters of one format. Both methods are pure functions of their arguments.

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


class AdapterOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to every rank: read an adapter into host memory, or (folder empty) forget it."""

    digest: str  # SHA-256 of its files, hexadecimal
    folder: str = ""  # with adapter_config.json and adapter_model.safetensors


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """Before a step: copy an adapter from host memory to a place on the device."""

    place: int
    digest: str
    pages: list[int]  # of the adapter pool, `PAGE_RANKS` ranks each; in the order of its ranks


class Span(Protocol):
    """A rank's range of a dimension; see `frame.models.layers.parameter.Range`."""

    @property
    def full(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def size(self) -> int: ...


class LayerDelta(Protocol):
    """The deltas of one layer, of every adapter on the device. A layer calls `shrink` with its
    input, computes its product, and calls `expand` with both. It sets `gemm` once its weights are
    loaded."""

    gemm: Any  # x [rows, inputs] -> the product without bias and deltas

    @property
    def is_active(self) -> bool:
        """Whether a row of this step may have an adapter. False: the layer computes as without
        adapters."""
        ...

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> the product with each row's `a`, float32 or the model's dtype [rows,
        parts * ranks]. May run beside the layer's product."""
        ...

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Add the deltas to the layer's product `out` [rows, outputs] in place, and scale its rows.
        Rows without an adapter are not written. bias: what `out` has already got. -> `out`."""
        ...


class AdapterLayers(Protocol):
    """What layers register with when they are built (`BuildContext.adapters`), and what tells them
    the adapter of each row at run time."""

    def add_layer(self, names: Sequence[str], inputs: Span, outputs: Sequence[Span], num_experts: int = 0) -> LayerDelta:
        """The deltas of a layer whose outputs are the concatenation of `outputs`, of the checkpoint
        layers `names`. num_experts: experts of this rank; then `names` are those of one expert
        after another, and rows of the layer are pairs of a token and an expert (`select_pairs`)."""
        ...

    def select_rows(self, indices: torch.Tensor | None) -> AbstractContextManager[object]:
        """In the block, layers compute these rows of the batch's tokens alone, int64 [n]; None:
        rows that have no adapter."""
        ...

    def select_pairs(self, tokens: torch.Tensor, experts: torch.Tensor) -> AbstractContextManager[object]:
        """In the block, row i of a layer with experts is token `tokens[i]` with the rank's expert
        `experts[i]`; both int64 [pairs]."""
        ...


class StepAdapters(AdapterLayers, Protocol):
    """A rank's adapters, as its runner uses them. In each step `begin_step`, then before each
    forward pass `set_rows`, and `end_step` after the last layer."""

    is_active: bool  # whether a row of the step has an adapter; set also to capture graphs of such steps

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Copy adapters to the device, and set up and release slots."""
        ...

    def set_rows(self, batch: ForwardBatch) -> None:
        """The rows of a forward pass: `place_tokens`, then `plan_tokens`."""
        ...

    def place_tokens(self, batch: ForwardBatch, size: int) -> None:
        """Write the adapter of each token to a fixed address, and none for further ones up to
        `size`."""
        ...

    def plan_tokens(self, size: int) -> None:
        """Layers compute the first `size` tokens of that address."""
        ...

    def end_step(self) -> None:
        """No row has an adapter."""
        ...

    def start_order(self, order: AdapterOrder) -> PendingOrder:
        """See `ModelRunner.start_order`."""
        ...


class PendingOrder(Protocol):
    """An order that the ranks carry out while steps run."""

    def poll(self) -> str | None:
        """The error of an order that has ended, one sentence, empty where every rank has carried it
        out; None: it has not ended."""
        ...
