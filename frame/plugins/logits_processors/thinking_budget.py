"""`thinking_token_budget`: ends the reasoning of a response after so many tokens, by forcing the
token that closes it.

The tokens are counted from the one after the mark that opens the reasoning. Without
`thinking_start_ids` the prompt has opened it. An output that does not begin with the mark has no
reasoning, and stays as it is.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.logits_processors.slot_state import Column, SlotProcessor

_OPENING, _THINKING, _OVER = range(3)


class ThinkingBudget(SlotProcessor):
    """State per request: the ids of the opening mark [length], padded with -1, and how many of them
    the output has; the closing id; the tokens of reasoning so far and their maximum; the phase."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        columns = {"start": Column(torch.int64, -1, (1,))}
        super().__init__(context, columns | {name: Column(torch.int64) for name in ("length", "matched", "end", "used", "budget", "phase")})

    def applies_to(self, params: SamplingParams) -> bool:
        return params.thinking_token_budget is not None

    def add_slot(self, setup: SlotSetup) -> None:
        start, end = setup.params.thinking_start_ids, setup.params.thinking_end_id
        matched, used, phase = 0, 0, _OPENING if start else _THINKING
        for token in setup.token_ids[setup.prompt_len :].tolist():  # of a resumed request
            if phase == _THINKING:
                used, phase = used + 1, _OVER if token == end else _THINKING
            elif phase == _OPENING:
                matched, phase = (matched + 1, phase) if token == start[matched] else (matched, _OVER)
                phase = _THINKING if matched == len(start) else phase
        values = {"length": len(start), "matched": matched, "end": -1 if end is None else end, "used": used, "phase": phase}
        budget = setup.params.thinking_token_budget or 0
        self._state.admit(setup.slot, {**values, "budget": budget, "start": torch.tensor(start or [-1], dtype=torch.int64)})

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        at = self._state.rows(slots)
        phase, used, budget, end = (self._state[name][at] for name in ("phase", "used", "budget", "end"))
        is_spent = (phase == _THINKING) & (used >= budget) & (end >= 0)
        before = logits[rows]
        last = end.clamp(min=0).unsqueeze(1)
        closing = torch.full_like(before, -torch.inf).scatter_(1, last, before.gather(1, last))
        logits[rows] = torch.where(is_spent.unsqueeze(1), closing, before)

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        at = self._state.rows(slots)
        start, length, matched, end, phase = (self._state[name][at] for name in ("start", "length", "matched", "end", "phase"))
        is_opening, is_thinking = phase == _OPENING, phase == _THINKING
        expected = start.gather(1, matched.clamp(max=start.shape[1] - 1).unsqueeze(1)).squeeze(1)
        is_hit = is_opening & (token_ids == expected)
        matched = matched + is_hit
        is_over = (is_opening & ~is_hit) | (is_thinking & (token_ids == end))
        self._state["matched"][at] = matched
        self._state["used"][at] += is_thinking
        self._state["phase"][at] = phase + (is_hit & (matched == length)).long() + (_OVER - phase) * is_over
