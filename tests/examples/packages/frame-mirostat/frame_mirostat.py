"""A sampler with a value by request: Mirostat 2 (Basu et al. 2021), which keeps the surprise of
each token near `"custom": {"tau": "3"}`, in bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from frame.core.interfaces.sampling_params import SamplingParams
from frame.interfaces.sampler import RowSampler, SamplerCapabilities, SamplerContext, SupportsSlots
from frame.registration import KindRegistry, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from frame.core.interfaces.batch import SlotSetup


class Options(BaseModel):
    """`eta`: how much of its error a token corrects."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eta: float = Field(0.1, gt=0, le=1)


def read_tau(params: SamplingParams) -> float:
    """The surprise that a request asks for."""
    text = params.custom.get("tau", "5")
    try:
        tau = float(text)
    except ValueError:
        tau = math.nan
    if not 0 < tau <= 100:
        raise ValueError(f"custom['tau'] is {text[:20]!r}; it must be above 0 and at most 100 bits")
    return tau


class Mirostat(RowSampler, SupportsSlots):
    """Draws among the tokens whose surprise is at most `mu` of the slot."""

    conformance_params = (SamplingParams(custom={"tau": "3"}), SamplingParams(custom={"tau": "0.5"}), SamplingParams())

    def __init__(self, context: SamplerContext, options: Options) -> None:
        import torch

        super().__init__(context, options)
        self._eta = options.eta
        self._tau = torch.ones(context.num_slots, device=context.device)
        self._mu, self._surprise = 2 * self._tau, self._tau.clone()

    def validate_params(self, params: SamplingParams) -> None:
        read_tau(params)

    def add_slot(self, setup: SlotSetup) -> None:
        tau = read_tau(setup.params)
        self._tau[setup.slot], self._mu[setup.slot], self._surprise[setup.slot] = tau, 2 * tau, tau

    def remove_slot(self, slot: int) -> None: ...

    def draw_tokens(self, logits: torch.Tensor, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        import torch

        temperature = params["temperature"].unsqueeze(1)  # times ln 2, as powers of 2 are drawn from
        scaled = logits.float() / torch.where(temperature > 0, temperature, math.log(2))
        surprise = (torch.logsumexp(scaled * math.log(2), -1, keepdim=True) / math.log(2)) - scaled
        limit = torch.maximum(self._mu[slots].unsqueeze(1), surprise.amin(-1, keepdim=True))
        kept = logits.float().masked_fill(surprise > limit, -torch.inf)
        token_ids = self.context.operations.draw_plain(kept, params["temperature"], params["key"], None)[0]
        self._surprise.index_copy_(0, slots, surprise.gather(1, token_ids.unsqueeze(1)).squeeze(1))
        return token_ids

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        moved = self._mu[slots] - self._eta * (self._surprise[slots] - self._tau[slots])
        self._mu.index_copy_(0, slots, moved)


@hookimpl
def register_samplers(registry: KindRegistry) -> None:
    """Add `mirostat`."""
    can = SamplerCapabilities(params=(), custom=("tau",), drafts=False)
    summary = "Keeps the surprise of tokens near a value."
    registry.add("mirostat", Mirostat, api="sampler/1", capabilities=can, options=Options, summary=summary)
