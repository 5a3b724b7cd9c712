"""`bad_words`: bans token sequences: the last token of a sequence is banned where the row ends with
the tokens before it.

As in transformers, the row is prompt plus output; a sequence of one token is always banned.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.logits_processors.slot_state import Column, SlotProcessor, add_to

_ANY = -1  # padding of a prefix: matches every token
_NEVER = -2  # padding of a row shorter than the prefix: matches no token
_NONE = -3  # padding of the list of sequences


class BadWords(SlotProcessor):
    """State per request: the sequences' last tokens [words], their prefixes [length, words] and the
    row's last tokens [length], both in reverse order, int64."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        self._vocab_size = context.vocab_size
        columns = {
            "last": Column(torch.int64, _NONE, (0,)),
            "before": Column(torch.int64, _ANY, (0, 0)),
            "history": Column(torch.int64, _NEVER, (0,)),
        }
        super().__init__(context, columns)

    def applies_to(self, params: SamplingParams) -> bool:
        return any(params.bad_words_ids)

    def add_slot(self, setup: SlotSetup) -> None:
        words = [word for word in setup.params.bad_words_ids if word and 0 <= word[-1] < self._vocab_size]
        length = max((len(word) for word in words), default=1) - 1
        before = torch.full((length, len(words)), _ANY, dtype=torch.int64)
        for column, word in enumerate(words):
            before[: len(word) - 1, column] = torch.tensor(word[-2::-1], dtype=torch.int64)
        # a row keeps as many tokens as the longest prefix of all requests has
        depth = max(length, self._state["history"].shape[1] if self._state.capacity else 0)
        history = torch.full((depth,), _NEVER, dtype=torch.int64)
        recent = torch.from_numpy(setup.token_ids[::-1][:depth].astype("int64"))
        history[: len(recent)] = recent
        last = torch.tensor([word[-1] for word in words], dtype=torch.int64)
        self._state.admit(setup.slot, {"last": last, "before": before, "history": history})

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        at = self._state.rows(slots)
        last, before, history = (self._state[name][at] for name in ("last", "before", "history"))
        fits = (before == _ANY) | (before == history[:, : before.shape[1]].unsqueeze(2))
        banned = fits.all(dim=1) & (last >= 0)
        change = logits.new_zeros(last.shape).masked_fill_(banned, -torch.inf)
        add_to(logits, rows, last.clamp(min=0), change)

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        history = self._state["history"]
        if history.shape[1]:
            at = self._state.rows(slots)
            history[at] = torch.cat([token_ids.unsqueeze(1), history[at][:, :-1]], dim=1)
