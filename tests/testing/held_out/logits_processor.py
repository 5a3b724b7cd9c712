"""Logits processors: a penalty that grows with each use of a token; and others with a bug each."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import BaseModel

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import LogitsProcessor, ProcessorCapabilities, ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from tests.testing.held_out import Wrong

KEY = "fade"


class Fade(LogitsProcessor):
    """Subtracts `custom["fade"]` for each time that a token is in the output."""

    capabilities: ClassVar[ProcessorCapabilities] = ProcessorCapabilities(custom=(KEY,))
    conformance_params = (SamplingParams(custom={KEY: "0.5"}), SamplingParams(custom={KEY: "2"}))

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        self.context = context
        self.counts: torch.Tensor | None = None
        self.rates: torch.Tensor | None = None

    def applies_to(self, params: SamplingParams) -> bool:
        return KEY in params.custom

    def read_rate(self, params: SamplingParams) -> float:
        try:
            rate = float(params.custom[KEY])
        except ValueError:
            rate = math.nan
        if not -100 <= rate <= 100:
            raise ValueError(f"custom[{KEY!r}] must be a number from -100 to 100")
        return rate

    def validate_params(self, params: SamplingParams) -> None:
        self.read_rate(params)

    def allocate(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.counts is None or self.rates is None:
            context = self.context
            self.counts = torch.zeros(context.max_slots, context.vocab_size, device=context.device)
            self.rates = torch.zeros(context.max_slots, device=context.device)
        return self.counts, self.rates

    def add_slot(self, setup: SlotSetup) -> None:
        counts, rates = self.allocate()
        rates[setup.slot] = self.read_rate(setup.params)
        self.clear(counts, setup.slot)
        output = torch.from_numpy(setup.token_ids[self.find_start(setup) :].astype("int64")).to(counts.device)
        counts[setup.slot].index_add_(0, output, torch.ones(len(output), device=counts.device))

    def find_start(self, setup: SlotSetup) -> int:
        return setup.prompt_len

    def clear(self, counts: torch.Tensor, slot: int) -> None:
        counts[slot] = 0.0

    def find_penalties(self, slots: torch.Tensor) -> torch.Tensor:
        counts, rates = self.allocate()
        return counts[slots] * rates[slots].unsqueeze(1)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        logits.index_add_(0, rows, -self.find_penalties(slots))

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        counts, _ = self.allocate()
        counts.index_put_((slots, token_ids), torch.ones(len(slots), device=counts.device), accumulate=True)

    def remove_slot(self, slot: int) -> None:
        return


TWIN = Fade
WRONG = Wrong()


@WRONG.add("A preempted request repeats itself: its output so far is not counted when it enters again.")
class ForgetsOutput(Fade):
    def find_start(self, setup: SlotSetup) -> int:
        return len(setup.token_ids)


@WRONG.add("A preempted request suddenly avoids the words of its prompt: when it enters again, all of its tokens are counted.")
class CountsPromptAgain(Fade):
    def find_start(self, setup: SlotSetup) -> int:
        return 0 if len(setup.token_ids) > setup.prompt_len else setup.prompt_len


@WRONG.add("A request is penalised for the words of the one that had its slot before: a slot is cleared at its first use only.")
class NeverClears(Fade):
    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.cleared: set[int] = set()

    def clear(self, counts: torch.Tensor, slot: int) -> None:
        if slot not in self.cleared:
            super().clear(counts, slot)
            self.cleared.add(slot)


@WRONG.add("equivalent: a slot is there once in each call, also with drafts; the sum is written without accumulation.")
class CountsOnce(Fade):
    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        counts, _ = self.allocate()
        counts[slots, token_ids] += 1


@WRONG.add("Requests get each other's penalties as soon as rows and slots differ: the state is read by row.")
class ReadsByRow(Fade):
    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, rows % self.context.max_slots, positions)


@WRONG.add("Requests without the parameter are changed too when they are before others in the batch: the first rows are written.")
class WritesFirstRows(Fade):
    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        logits[: len(rows)] -= self.find_penalties(slots)


@WRONG.add("Every step waits for the device: counts are read row by row on the host.")
class WaitsForDevice(Fade):
    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        counts, rates = self.allocate()
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if rates[slot].item():
                logits[row] -= counts[slot] * rates[slot]


@WRONG.add("A server that never uses the parameter loses hundreds of MB of the device: the table is allocated at the start.")
class AllocatesAtStart(Fade):
    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.allocate()


@WRONG.add("Requests with a grammar end with an error: banned tokens, whose logits are -inf, become NaN.")
class MakesNan(Fade):
    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        penalties = self.find_penalties(slots)
        chosen = logits[rows]
        logits[rows] = chosen - penalties + chosen * 0.0


@WRONG.add("A client that sends `nan` ends its request with a 500 instead of 400: the range check lets NaN pass.")
class AcceptsNan(Fade):
    def read_rate(self, params: SamplingParams) -> float:
        try:
            rate = float(params.custom[KEY])
        except ValueError:
            raise ValueError(f"custom[{KEY!r}] must be a number") from None
        if rate < -100 or rate > 100:
            raise ValueError(f"custom[{KEY!r}] must be a number from -100 to 100")
        return rate


@WRONG.add("Requests get the rate of an earlier one: rates are remembered by the address of the parameters, which is used again.")
class RemembersByAddress(Fade):
    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.known: dict[int, float] = {}

    def read_rate(self, params: SamplingParams) -> float:
        if id(params) not in self.known:
            self.known[id(params)] = super().read_rate(params)
        return self.known[id(params)]


@WRONG.add("Outputs longer than 255 uses of a token lose their penalty: counts are bytes, which wrap around.")
class CountsInBytes(Fade):
    def find_penalties(self, slots: torch.Tensor) -> torch.Tensor:
        counts, rates = self.allocate()
        return counts[slots].to(torch.uint8).float() * rates[slots].unsqueeze(1)


@WRONG.add("Tokens at the end of a large vocabulary are never penalised: the table has 32,768 columns, and others share the last.")
class SmallTable(Fade):
    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        super().observe_tokens(slots, token_ids.clamp(max=32_767))


@WRONG.add("A request that left takes its parameters to the next without any: `applies_to` says yes once it has said so for a user.")
class RemembersUse(Fade):
    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.last: SamplingParams | None = None

    def applies_to(self, params: SamplingParams) -> bool:
        if super().applies_to(params):
            self.last = params
        return self.last is not None and self.last.temperature == params.temperature

    def read_rate(self, params: SamplingParams) -> float:
        return super().read_rate(params if KEY in params.custom or self.last is None else self.last)
