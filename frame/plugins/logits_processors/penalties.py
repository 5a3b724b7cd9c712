"""`penalties`: frequency, presence and repetition penalties from each request's token counts.

Frequency and presence penalties (OpenAI) count the output; repetition (Keskar et al. 2019, arXiv
1909.05858 §4.1) prompt and output.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import BaseModel

from frame import kernels
from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.logits_processors.slot_state import Column, SlotProcessor

_IN_PROMPT = 1 << 30  # set if the prompt contains the token; the bits below count the output


class Penalties(SlotProcessor):
    """State: token counts, int32 [requests, vocab]."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        self._vocab_size = context.vocab_size
        scalar, counts = Column(torch.float32), Column(torch.int32, shape=(context.vocab_size,))
        columns = {"counts": counts, "frequency": scalar, "presence": scalar, "repetition": scalar}
        super().__init__(context, columns)

    def applies_to(self, params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 or params.repetition_penalty != 1.0

    def add_slot(self, setup: SlotSetup) -> None:
        prompt, output = setup.token_ids[: setup.prompt_len], setup.token_ids[setup.prompt_len :]
        counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        counts[prompt] |= _IN_PROMPT
        params = setup.params
        self._state.admit(
            setup.slot,
            {
                "counts": torch.from_numpy(counts),
                "frequency": params.frequency_penalty,
                "presence": params.presence_penalty,
                "repetition": params.repetition_penalty,
            },
        )

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        state, at = self._state, self._state.rows(slots)
        if kernels.can_use_triton(logits.device):
            from frame.kernels.sampling.logit_changes import apply_penalties

            penalties = (state["frequency"], state["presence"], state["repetition"])
            apply_penalties(logits, rows, state["counts"], at, penalties, _IN_PROMPT - 1)
            return
        counts = state["counts"].index_select(0, at)
        frequency, presence, repetition = (state[name][at].unsqueeze(1) for name in ("frequency", "presence", "repetition"))
        scores = logits.index_select(0, rows)
        scores = torch.where(counts != 0, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
        counts = counts & (_IN_PROMPT - 1)
        scores -= frequency * counts
        scores -= presence * (counts > 0)
        logits.index_copy_(0, rows, scores)

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        self._state["counts"][self._state.rows(slots), token_ids] += 1
