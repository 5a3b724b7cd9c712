"""`logit_bias`: adds a bias to single logits, by token id."""

from __future__ import annotations

import torch
from pydantic import BaseModel

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.logits_processors.slot_state import Column, SlotProcessor, add_to


class LogitBias(SlotProcessor):
    """State: ids and biases, [requests, maximum number of biases]. Padding adds 0 to token 0."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        columns = {"ids": Column(torch.int64, shape=(0,)), "values": Column(torch.float32, shape=(0,))}
        super().__init__(context, columns)

    def applies_to(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def add_slot(self, setup: SlotSetup) -> None:
        bias = setup.params.logit_bias
        self._state.admit(setup.slot, {"ids": torch.tensor(list(bias)), "values": torch.tensor(list(bias.values()))})

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        at = self._state.rows(slots)
        add_to(logits, rows, self._state["ids"][at], self._state["values"][at])
