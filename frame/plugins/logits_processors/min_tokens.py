"""`min_tokens`: bans the end tokens (end of sequence, `stop_token_ids`) until the output has its
minimum length."""

from __future__ import annotations

import torch
from pydantic import BaseModel

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.logits_processors.slot_state import Column, SlotProcessor, add_to


class MinTokens(SlotProcessor):
    """State: the position from which the end is allowed, and the end ids [requests, maximum number
    of ids], padded with -1."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        self._vocab_size = context.vocab_size
        self._eos_token_ids = context.eos_token_ids
        columns = {"until": Column(torch.int64), "ids": Column(torch.int64, -1, (0,))}
        super().__init__(context, columns)

    def applies_to(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0 and (not params.ignore_eos or bool(params.stop_token_ids))

    def add_slot(self, setup: SlotSetup) -> None:
        ends = setup.params.ends(self._eos_token_ids)
        ids = torch.tensor(sorted(i for i in ends if 0 <= i < self._vocab_size), dtype=torch.int64)
        self._state.admit(setup.slot, {"until": setup.prompt_len + setup.params.min_tokens, "ids": ids})

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        at = self._state.rows(slots)
        ids = self._state["ids"][at]
        banned = (ids >= 0) & (positions < self._state["until"][at]).unsqueeze(1)
        change = logits.new_zeros(ids.shape).masked_fill_(banned, -torch.inf)
        add_to(logits, rows, ids.clamp(min=0), change)
