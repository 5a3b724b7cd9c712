"""`DeviceOperations`: the tensor code of a device that draws tokens and moves rows of the KV cache;
and what the core calls of samplers that keep something by request slot.

Chosen once, where a runner is built: `TORCH` of `core.sampling.sampler`, or the Triton kernels of
`frame.kernels.sampling`. Used by the sampler, the CUDA graphs and the device drafters. Must not
know a request or the plan of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.batch import SlotSetup
    from frame.core.interfaces.sampling_params import SamplingParams

    Pair = tuple[torch.Tensor, torch.Tensor]
    # (addresses int64 [tensors], bytes of a row, sources, targets, first, counts); see
    # `KVPool.move_tokens`
    MoveRows = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class DrawsBySlot(Protocol):
    """What draws each row's token with what it keeps of the row's request slot."""

    def draw_with_maxima(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> Pair:
        """The drawn tokens, and the greatest logits, which show rows that are not finite."""
        ...


class SupportsSlots(ABC):
    """Optional, for a `RowSampler`: keeps something by request slot, such as a parameter of
    `SamplingParams.custom` or a value that moves with each token.

    An error that `add_slot` raises ends that request alone; one of `observe_tokens` ends the
    requests of its step.
    """

    def validate_params(self, params: SamplingParams) -> None:
        """Raise ValueError with one sentence that names the field for parameters that the sampler
        cannot use; the request is refused with status 400. By default every parameter is taken."""

    @abstractmethod
    def add_slot(self, setup: SlotSetup) -> None:
        """Set the slot up for a request that enters, or enters again with its output so far. What
        an earlier request has left there is replaced."""

    @abstractmethod
    def remove_slot(self, slot: int) -> None: ...

    @abstractmethod
    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """The tokens that were output for these slots, both int64 [rows], after each step. Not
        called for steps with drafts, so that a sampler whose draws depend on it has no capability
        `drafts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOperations:
    """Functions of logits [rows, vocab] of any float dtype. CUDA graphs can capture them, because
    their work does not depend on the values.

    draw_plain: (logits, temperature float32 [rows], times ln 2, 0: greedy, keys int64 [rows],
      last_tokens) -> (token ids int64, greatest logits float32). last_tokens: a table of token ids,
      int64 [slots], and the slot of each row, int64 [rows], to which its token is written, or None.
    draw_filtered: (logits, parameters by name, of `SamplingArrays.list_parameters`, plain,
      last_tokens) -> as above. plain: the result of `draw_plain` for the same rows, which is
      overwritten, or None. None: the sampler filters, from plans with the rows that use a filter.
    mask_logits: (logits, rows int64 [m], mask int32 [m, ceil(vocab / 32)]) sets the logits of
      tokens whose bit is 0 to -inf, in place. -1 has no row.
    compute_logprobs: (logits [n, vocab], token ids [n], num_top) -> (log-probabilities of the ids,
      float32 [n]; ids of the `num_top` likeliest tokens [n, k]; their log-probabilities [n, k]).
    move_rows: copies rows within several tensors; None: the KV pool does, tensor by tensor.
    """

    draw_plain: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pair | None], Pair]
    mask_logits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    compute_logprobs: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    draw_filtered: Callable[[torch.Tensor, Mapping[str, torch.Tensor], Pair | None, Pair | None], Pair] | None = None
    move_rows: MoveRows | None = None
