"""What a model architecture is (`model/1`), and the facts of a checkpoint that need no torch to read.

A model file holds names and wiring. It knows no parallel arithmetic, no config section and no backend by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext

API = "model/1"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `config.json` says, in one vocabulary; read without torch by `frame.core.model_facts`. Sizes of the whole model."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # for mla: nope + rope
    v_head_dim: int
    kind: Literal["mha", "mla"]
    latent: tuple[int, int] | None  # mla: (kv_lora_rank, qk_rope_head_dim)
    max_context: int
    dtype: str
    num_experts: int = 0
    sliding_window: int | None = None
    quantization: str | None = None  # quant_method of the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)  # the whole of config.json (text part)


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """Which checkpoints a model plugin serves: names in `architectures`, or any (the fallback).

    `expands_mla`: it caches the expanded keys and values of latent attention, so for the cache and the backend the model is mha.
    """

    architectures: tuple[str, ...] | None
    tensor_parallel: bool = True
    expands_mla: bool = False

    def unsupported(self, needs: ModelNeeds) -> list[Reason]:
        reasons = []
        if self.architectures is not None and needs.architecture not in self.architectures:
            reasons.append(Reason(f"implements {', '.join(self.architectures)}, not {needs.architecture}"))
        if needs.tp > 1 and not self.tensor_parallel:
            reasons.append(Reason("has no tensor parallelism", "parallel.tp: 1"))
        return reasons


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a checkpoint and a configuration ask of a model plugin."""

    architecture: str
    tp: int = 1


class LazyTensor(Protocol):
    """A tensor of a checkpoint that is read (mmapped) only as far as it is sliced."""

    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class CausalLM(ABC):
    """A decoder, built on the meta device from facts and a build context.

    Laws:
    - `forward` reads nothing but the batch and its own parameters, and returns hidden states after the final norm.
    - `logits` is called with the rows that need logits only; it returns the full vocabulary on every rank.
    - `load_weights` consumes every (name, tensor) it is given and returns the names of parameters it set, so that the loader
      can name what is missing; a name that it does not know is an error, unless `ignored` matches it.
    Implementations also derive from `torch.nn.Module`.
    """

    ignored: ClassVar[tuple[str, ...]] = ()  # regular expressions of checkpoint names that are left out on purpose

    def __init__(self, facts: ModelFacts, context: BuildContext) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """-> hidden states [tokens, hidden_size]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        """Set the parameters from a checkpoint's tensors, each sliced to this rank's part."""
