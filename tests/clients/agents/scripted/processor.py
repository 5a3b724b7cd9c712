"""A logits processor that makes any model say the texts of a script, for tests of programs that act
on what a model says.

The script is a JSON file with `tokenizer`, the path of a tokenizer.json, and `replies`, a list of
`{"says", "after", "has"}`. A request gets the first reply whose text `has` is in its prompt and
whose number `after` is that of the tool results in the prompt; both are optional. A prompt with
`[[say]]…[[end]]` brings its own reply.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from pydantic import BaseModel
from tokenizers import Tokenizer

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import LogitsProcessor, ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams

SAY, END = "[[say]]", "[[end]]"
RESULT = "<tool_response>"  # what the template writes before the result of a tool
MAX_TOKENS = 4096  # of a reply


class Scripted(LogitsProcessor):
    """Forces the tokens of a reply, then the end token."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        script = json.loads(options.script.read_text())  # type: ignore[union-attr, attr-defined]
        self._replies: list[dict[str, Any]] = script["replies"]
        self._tokenizer = Tokenizer.from_file(script["tokenizer"])
        self._end = context.eos_token_ids[0]
        self._tokens = torch.full((context.max_slots, MAX_TOKENS), self._end, device=context.device)
        self._starts = torch.zeros(context.max_slots, dtype=torch.int64, device=context.device)

    def applies_to(self, params: SamplingParams) -> bool:
        return True

    def add_slot(self, setup: SlotSetup) -> None:
        prompt = self._tokenizer.decode(setup.token_ids[: setup.prompt_len].tolist(), skip_special_tokens=False)
        ids = self._tokenizer.encode(self._choose(prompt), add_special_tokens=False).ids
        self._tokens[setup.slot] = self._end
        self._tokens[setup.slot, : len(ids)] = torch.tensor(ids)
        self._starts[setup.slot] = setup.prompt_len

    def _choose(self, prompt: str) -> str:
        if SAY in prompt:
            return prompt.rpartition(SAY)[2].partition(END)[0]
        count = prompt.count(RESULT)
        for reply in self._replies:
            if reply.get("has", "") in prompt and reply.get("after", count) == count:
                return str(reply["says"])
        return "done"

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        tokens = self._tokens[slots, (positions - self._starts[slots]).clamp(0, MAX_TOKENS - 1)]
        logits[rows] = -1e30  # finite: a thinking budget may force another token
        logits[rows, tokens] = 0.0

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        return

    def remove_slot(self, slot: int) -> None:
        return
