"""`BuildContext`: the only thing that a model, layer or backend gets at construction. No globals, no `get_*_context()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.model import Task
    from frame.core.interfaces.moe import MoEDispatcher, MoERunner
    from frame.core.interfaces.quantization import QuantizationMethod


class Collective(Protocol):
    """One group of ranks, by value. A group of one does nothing and costs nothing."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; may be in place; returns the sum."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenation over the ranks along `dim`."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The source rank's tensor on every rank; in place elsewhere."""
        ...


class LoadCode(Protocol):
    """Runs Python code of a checkpoint: `reference` (module.Class) as its JSON files have it, `part` for errors."""

    def __call__(self, part: str, reference: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The greatest sizes that a step can have; buffers of fixed address are made for these."""

    max_running_requests: int
    max_tokens_per_step: int
    max_context: int  # tokens, prompt and output together
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What is fixed when a rank's model is built. `tp` is the tensor-parallel group."""

    device: torch.device
    dtype: torch.dtype
    tp: Collective
    limits: Limits
    attention: AttentionBackend | None = None  # None only while the backend itself is being built
    quantization: QuantizationMethod | None = None
    moe_runner: MoERunner | None = None
    moe_dispatcher: MoEDispatcher | None = None
    task: Task = "generate"
    load_code: LoadCode | None = None  # imports a class of the checkpoint's own code; None unless model.trust_remote_code allows it
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: `dtype`
