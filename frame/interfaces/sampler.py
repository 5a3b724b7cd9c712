"""The interface of samplers: how the next tokens are drawn from logits (kind `sampler`).

The core's sampler calls one after the logits processors and the grammar masks, which are applied to
every sampler's logits, and computes log-probabilities from the model's unchanged logits. Imports no
torch. Must not know a request, the plan of a step or the KV cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frame.core.interfaces.device_operations import DeviceOperations, SupportsSlots
from frame.core.interfaces.plugin import Reason, list_batch_obstacles

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    Pair = tuple[torch.Tensor, torch.Tensor]

__all__ = [
    "DRAW_PARAMS", "RowSampler", "SamplerCapabilities", "SamplerContext", "SamplerRequirements", "SupportsSlots", "TokenSampler",
]  # fmt: skip

DRAW_PARAMS = ("top_k", "top_p", "min_p", "seed")  # fields of SamplingParams that a sampler may honour


@dataclass(frozen=True, slots=True)
class SamplerRequirements:
    """What a configuration needs of its sampler."""

    device: str
    compute_capability: tuple[int, int] | None = None  # the lowest of the devices
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too
    deterministic: bool = False  # see `execution.deterministic`
    drafts: bool = False  # there is a drafter


@dataclass(frozen=True, slots=True)
class SamplerCapabilities:
    """What a sampler can do. Every sampler honours `temperature`, of which 0 is greedy.

    Raises ValueError for a parameter that is not among `DRAW_PARAMS`.
    """

    # A request with another of `DRAW_PARAMS` is refused with status 400. `seed`: a token depends on
    # the seed, the position and the row's logits alone.
    params: tuple[str, ...] = DRAW_PARAMS
    custom: tuple[str, ...] = ()  # keys of `SamplingParams.custom` that it reads
    devices: tuple[str, ...] | None = None  # None: all
    min_compute_capability: tuple[int, int] | None = None
    batch_invariant: bool = False  # a row's token does not depend on the rows beside it, in its last bit
    graphs: bool = True  # its draws can be captured in CUDA graphs; False: for a `RowSampler` only
    drafts: bool = True  # its draws may verify drafts: several tokens of a row are drawn at once

    def __post_init__(self) -> None:
        if unknown := [name for name in self.params if name not in DRAW_PARAMS]:
            raise ValueError(f"params holds {unknown[0]!r}; a sampler honours temperature and may honour {', '.join(DRAW_PARAMS)}")

    def unsupported(self, requirements: SamplerRequirements) -> list[Reason]:
        """All reasons why it cannot be used; empty: it can."""
        reasons, low = list_batch_obstacles(self, requirements), self.min_compute_capability
        if self.devices is not None and requirements.device not in self.devices:
            reasons.append(Reason(f"runs on {' or '.join(self.devices)}, not on {requirements.device}"))
        if low and requirements.compute_capability and requirements.compute_capability < low:
            reasons.append(Reason(f"needs compute capability {low[0]}.{low[1]} or later"))
        if requirements.drafts and not self.drafts:
            reasons.append(Reason("draws the tokens of a row one after the other and verifies no drafts", "speculative.algorithm: null"))
        return reasons


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """What a sampler is built for. `operations`: of the device, to draw with from changed logits.
    `reference`: the same in plain torch."""

    vocab_size: int
    num_slots: int  # request slots; the last one is that of padding rows
    device: torch.device
    operations: DeviceOperations
    reference: DeviceOperations


class TokenSampler(ABC):
    """Draws the next tokens. Derive from `RowSampler`, unless the plugin has fused kernels with
    filters."""

    def __init__(self, context: SamplerContext, options: BaseModel | None = None) -> None:
        self.context = context

    @abstractmethod
    def make_operations(self) -> DeviceOperations:
        """The functions that draw tokens, mask logits and compute log-probabilities. Called once.
        Their work does not depend on values, and they do not synchronise."""


class RowSampler(TokenSampler):
    """Draws each row's token from its logits and the parameters of its request.

    Contract: a token depends on its own row, and on what `SupportsSlots` keeps of its slot. Draws
    are repeated: a step may draw the tokens of a position again, with filters or under a mask, and
    only the last ones count. Draws therefore leave no other trace than the next draw of the same
    slot would. Works on tensors, without a loop over rows, and never synchronises. A row of NaN or
    infinite logits gets any token of the vocabulary; its request ends. A failed draw ends the
    requests of its step.
    """

    @abstractmethod
    def draw_tokens(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        """-> token ids, int64 [rows], a new tensor.

        logits: [rows, vocab] of any float dtype, which must not be changed; -inf excludes a token.
        params: of each row `temperature` (float32, times ln 2; 0: greedy) and `key` (int64, a hash
        of seed and position), and if a row has a filter `top_k` (int32; 0: off), `top_p` (float32)
        and `log_min_p` (float32, base-2 logarithm), both of probabilities at the temperature.
        slots: int64 [rows], the row's request slot. Padding rows of CUDA graphs share the last
        slot. Rows of drafts share that of their request.
        """

    def draw_with_maxima(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> Pair:
        """The drawn tokens, and the greatest logits, which show rows that are not finite."""
        return self.draw_tokens(logits, params, slots), logits.amax(dim=-1).float()

    def make_operations(self) -> DeviceOperations:
        base = self.context.operations

        def draw(logits: torch.Tensor, params: Mapping[str, torch.Tensor], last_tokens: Pair) -> Pair:
            table, slots = last_tokens
            token_ids, best = self.draw_with_maxima(logits, params, slots)
            table.index_copy_(0, slots, token_ids)
            return token_ids, best

        def draw_plain(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, last_tokens: Pair | None = None) -> Pair:
            if last_tokens is None:  # the draws of a drafter
                return base.draw_plain(logits, temperature, keys, None)
            return draw(logits, {"temperature": temperature, "key": keys}, last_tokens)

        def draw_filtered(
            logits: torch.Tensor, params: Mapping[str, torch.Tensor], plain: Pair | None = None, last_tokens: Pair | None = None
        ) -> Pair:
            if last_tokens is None:
                raise ValueError("the rows of a graph have slots")
            return draw(logits, params, last_tokens)

        return DeviceOperations(
            draw_plain=draw_plain, mask_logits=base.mask_logits, compute_logprobs=base.compute_logprobs, draw_filtered=draw_filtered
        )
