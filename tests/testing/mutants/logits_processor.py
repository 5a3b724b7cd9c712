"""Logits processors with one deliberate bug each. Used by the tests of the conformance suite.

The correct one subtracts `frequency_penalty` for each time that a token is in the output.
"""

from __future__ import annotations

from dataclasses import replace as replace_field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from msgspec.structs import replace

from frame.core.interfaces.sampling import LogitsProcessor, ProcessorCapabilities, ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.plugins.logits_processors.bad_words import BadWords
from frame.plugins.logits_processors.logit_bias import LogitBias
from frame.plugins.logits_processors.min_tokens import MinTokens
from frame.plugins.logits_processors.penalties import Penalties
from tests.testing.mutants import MutantList

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.batch import SlotSetup


class CountPenalty(LogitsProcessor):
    """State: token counts [slots, vocab] and penalties [slots], allocated with the first
    request."""

    conformance_params = (SamplingParams(frequency_penalty=0.7), SamplingParams(frequency_penalty=-0.4))

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        self.shape = (context.max_slots, context.vocab_size)
        self.counts: torch.Tensor = torch.zeros(0)
        self.penalties = torch.zeros(self.shape[0])

    def applies_to(self, params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0

    def add_slot(self, setup: SlotSetup) -> None:
        if not len(self.counts):
            self.counts = torch.zeros(self.shape)
        output = setup.token_ids[setup.prompt_len :]
        self.counts[setup.slot] = torch.from_numpy(np.bincount(output, minlength=self.shape[1]))
        self.penalties[setup.slot] = setup.params.frequency_penalty

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        logits.index_add_(0, rows, -self.penalties[slots].unsqueeze(1) * self.counts[slots])

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.counts[slots, token_ids] += 1

    def remove_slot(self, slot: int) -> None:
        """The next request of the slot overwrites its row."""


mutant = MUTANTS = MutantList(
    "logits_processor", reference=CountPenalty, capabilities=ProcessorCapabilities(("frequency_penalty",), custom=())
)


@mutant
class AppliesToAll(CountPenalty):
    """Applies to every request, so that all pay."""

    def applies_to(self, params: SamplingParams) -> bool:
        return True


@mutant
class AppliesOnce(CountPenalty):
    """Says only the first time that it applies to a request."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.seen: set[float] = set()

    def applies_to(self, params: SamplingParams) -> bool:
        is_new = params.frequency_penalty not in self.seen
        self.seen.add(params.frequency_penalty)
        return is_new and super().applies_to(params)


@mutant
class StateByRow(CountPenalty):
    """Reads the state by row of the batch instead of slot."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, torch.arange(len(slots)), positions)


@mutant
class AllRows(CountPenalty):
    """Changes the first rows of the batch instead of the rows that it is given."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, torch.arange(len(rows)), slots, positions)


@mutant
class ReturnsACopy(CountPenalty):
    """Returns changed logits instead of changing them in place."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> Any:
        changed = logits.clone()
        super().apply(changed, rows, slots, positions)
        return changed


@mutant
class CountsApplications(CountPenalty):
    """Raises the penalty with each call of apply."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        self.penalties[slots] *= 1.1
        super().apply(logits, rows, slots, positions)


@mutant
class IgnoresTokens(CountPenalty):
    """Does not observe tokens, so that a request has another state after a preemption."""

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        return


@mutant
class ForgetsTheOutput(CountPenalty):
    """Starts with empty counts when a request comes back with output."""

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.counts[setup.slot] = 0


@mutant
class CountsThePrompt(CountPenalty):
    """Counts the prompt when a request is added, but not the output so far."""

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        prompt = setup.token_ids[: setup.prompt_len]
        self.counts[setup.slot] = torch.from_numpy(np.bincount(prompt, minlength=self.shape[1]))


@mutant
class ObservesInOrder(CountPenalty):
    """Takes the observed tokens to be those of the first slots."""

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.counts[torch.arange(len(token_ids)), token_ids] += 1


@mutant
class KeepsTheSlot(CountPenalty):
    """Adds the counts of a new request to those of the slot's last one."""

    def add_slot(self, setup: SlotSetup) -> None:
        before = self.counts[setup.slot].clone() if len(self.counts) else 0
        super().add_slot(setup)
        self.counts[setup.slot] += before


@mutant
class ClearsAll(CountPenalty):
    """Frees the state of all requests when one ends."""

    def remove_slot(self, slot: int) -> None:
        self.counts.zero_()


@mutant
class SharesState(CountPenalty):
    """Keeps the penalties in a dictionary of the class, which two engines share."""

    by_slot: ClassVar[dict[int, float]] = {}

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.by_slot[setup.slot] = setup.params.frequency_penalty

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        for slot, penalty in self.by_slot.items():
            self.penalties[slot] = penalty
        super().apply(logits, rows, slots, positions)


@mutant
class KeepsTensors(CountPenalty):
    """Keeps the tensors of a step and counts them in the next one, when they hold other values."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.last: tuple[torch.Tensor, torch.Tensor] | None = None

    def add_slot(self, setup: SlotSetup) -> None:
        self._resolve()
        super().add_slot(setup)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, slots, positions)

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        self._resolve()
        self.last = (slots, token_ids)

    def _resolve(self) -> None:
        if self.last is not None:
            self.counts[self.last] += 1
        self.last = None


@mutant
class ChangesSlots(CountPenalty):
    """Numbers its slots from 1 and adds 1 to the tensor that it was given."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.shape = (self.shape[0] + 1, self.shape[1])
        self.penalties = torch.zeros(self.shape[0])

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(replace(setup, slot=setup.slot + 1))

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        slots += 1
        super().apply(logits, rows, slots, positions)

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        super().observe_tokens(slots + 1, token_ids)


@mutant
class LacksTheLastSlot(CountPenalty):
    """Has no state for the last slot."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.shape = (self.shape[0] - 1, self.shape[1])


@mutant
class KnowsOneVocabulary(CountPenalty):
    """Has counts for 97 tokens, whatever the vocabulary."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.shape = (self.shape[0], 97)


@mutant
class ScalesBanned(CountPenalty):
    """Multiplies by the counts, so that a banned token times 0 is NaN."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        change = self.penalties[slots].unsqueeze(1) * self.counts[slots]
        logits[rows] -= change + logits[rows] * change * 1e-3


@mutant
class ClampsLogits(CountPenalty):
    """Limits logits to the range of float32, which allows banned tokens again."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, slots, positions)
        logits[rows] = logits[rows].clamp(min=torch.finfo(torch.float32).min)


@mutant
class LacksTheMaximum(CountPenalty):
    """Computes a softmax without subtracting the maximum."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, slots, positions)
        weights = logits[rows].exp()
        logits[rows] = (weights / weights.sum(dim=1, keepdim=True)).log()


@mutant
class ComputesInHalf(CountPenalty):
    """Computes in float16, which overflows above 65,504."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, slots, positions)
        logits[rows] = logits[rows].half().float()


@mutant
class RoundsToBfloat16(CountPenalty):
    """Rounds the rows to bfloat16."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, slots, positions)
        logits[rows] = logits[rows].bfloat16().float()


@mutant
class LoopsOverRequests(CountPenalty):
    """Changes one row after the other."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        for i in range(len(rows)):
            super().apply(logits, rows[i : i + 1], slots[i : i + 1], positions)


@mutant
class ReadsTheSlots(CountPenalty):
    """Copies the slots to the host, which waits for the device."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, torch.tensor(slots.tolist()), positions)


@mutant
class FindsNonzero(CountPenalty):
    """Looks for the tokens with a count, whose number the host has to wait for."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        if (self.counts[slots] > 0).any():
            super().apply(logits, rows, slots, positions)


@mutant
class AllocatesAtStart(CountPenalty):
    """Allocates its counts for all slots before a request needs them."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.counts = torch.zeros(self.shape)


@mutant
class KeepsSetups(CountPenalty):
    """Keeps the setup of each request, for a log, and removes none."""

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.log: list[SlotSetup] = []

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.log.append(setup)


@mutant
class MixesRows(CountPenalty):
    """Normalises the penalties over the batch, so that rows depend on each other."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        change = self.penalties[slots].unsqueeze(1) * self.counts[slots]
        logits.index_add_(0, rows, -change / change.abs().amax().clamp(min=1e-6))


class BansTokens(CountPenalty):
    """Bans the token ids that a request lists under `custom["banned"]`."""

    conformance_params = (SamplingParams(custom={"banned": "1,2"}), SamplingParams(custom={"banned": "3"}))

    def applies_to(self, params: SamplingParams) -> bool:
        return "banned" in params.custom

    def validate_params(self, params: SamplingParams) -> None:
        parts = params.custom["banned"].split(",")
        if not all(part.isdecimal() and part.isascii() and len(part) < 9 and int(part) < self.shape[1] for part in parts):
            raise ValueError(f"banned must list token ids from 0 to {self.shape[1] - 1}, separated by commas")

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.counts[setup.slot] = 0
        self.counts[setup.slot, [int(part) for part in setup.params.custom["banned"].split(",")]] = torch.inf
        self.penalties[setup.slot] = 1.0

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Sampled tokens change nothing."""


@mutant
class ValidatesNothing(BansTokens):
    """Reads a client's parameter when the request is admitted, and fails on a bad one."""

    def validate_params(self, params: SamplingParams) -> None:
        return


@mutant
class IgnoresTheRange(BansTokens):
    """Takes token ids past the vocabulary, which stop a GPU."""

    def validate_params(self, params: SamplingParams) -> None:
        if not all(part.isdecimal() and part.isascii() for part in params.custom["banned"].split(",")):
            raise ValueError("banned must list token ids, separated by commas")


@mutant
class NamesNoField(BansTokens):
    """Refuses a parameter with the error of `int`, which does not say which."""

    def validate_params(self, params: SamplingParams) -> None:
        for part in params.custom["banned"].split(","):
            int(part)


@mutant
class RefusesWithKeyError(BansTokens):
    """Raises KeyError for a parameter that it cannot use, which ends the request as a fault."""

    def validate_params(self, params: SamplingParams) -> None:
        try:
            super().validate_params(params)
        except ValueError as error:
            raise KeyError("banned") from error


@mutant
class RefusesAll(BansTokens):
    """Refuses good parameters."""

    def validate_params(self, params: SamplingParams) -> None:
        raise ValueError("banned is not supported")


@mutant.using(capabilities=ProcessorCapabilities(("presence_penalty",), custom=()))
class NamesAnotherParameter(CountPenalty):
    """Its record names `presence_penalty`, so that requests with its own parameter are refused."""


@mutant.using(capabilities=ProcessorCapabilities(("frequency_penalty", "logit_bias"), custom=()))
class NamesTooMany(CountPenalty):
    """Its record names `logit_bias` too, which is then ignored silently."""


@mutant.using(capabilities=ProcessorCapabilities(custom=("bans",)))
class NamesAnotherKey(BansTokens):
    """Its record names `custom["bans"]`, so that requests with `custom["banned"]` are refused."""


@mutant.using(capabilities=ProcessorCapabilities(("logit_bias",), custom=()))
class KeepsFewBiases(LogitBias):
    """Keeps the first 300 biases of a request."""

    def add_slot(self, setup: SlotSetup) -> None:
        few = dict(list(setup.params.logit_bias.items())[:300])
        super().add_slot(replace(setup, params=replace(setup.params, logit_bias=few)))


@mutant.using(capabilities=ProcessorCapabilities(("bad_words", "bad_words_ids"), custom=()))
class CutsBannedWords(BadWords):
    """Keeps the last 16 tokens of a banned word, and so bans more."""

    def add_slot(self, setup: SlotSetup) -> None:
        ends = tuple(word[-16:] for word in setup.params.bad_words_ids)
        super().add_slot(replace(setup, params=replace(setup.params, bad_words_ids=ends)))


@mutant.using(capabilities=ProcessorCapabilities(("repetition_penalty", "frequency_penalty", "presence_penalty"), custom=()))
class ReadsTheEndOfThePrompt(Penalties):
    """Counts the last 4,096 tokens of a prompt."""

    def add_slot(self, setup: SlotSetup) -> None:
        cut = max(0, setup.prompt_len - 4096)
        super().add_slot(replace(setup, token_ids=setup.token_ids[cut:], prompt_len=setup.prompt_len - cut))


@mutant.using(capabilities=ProcessorCapabilities(("min_tokens",), custom=()))
class BansOneEnd(MinTokens):
    """Knows the first end token of the model."""

    def __init__(self, context: ProcessorContext, options: Any = None) -> None:
        super().__init__(replace_field(context, eos_token_ids=context.eos_token_ids[:1]), options)


@mutant.using(capabilities=ProcessorCapabilities(("logit_bias",), custom=()))
class HidesNaN(LogitBias):
    """Replaces what is not finite, in all rows of a step."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, slots, positions)
        torch.nan_to_num_(logits, nan=0.0, posinf=1e9, neginf=-torch.inf)


SETUPS: list[SlotSetup] = []


@mutant
class KeepsRequestsInItsModule(CountPenalty):
    """Keeps all requests in a list of its module."""

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        SETUPS.append(setup)


@mutant
class ReadsDigitsOfAnyScript(BansTokens):
    """Takes superscripts for digits, and fails with Python's own words."""

    def validate_params(self, params: SamplingParams) -> None:
        if not all(part.isdigit() and int(part) < self.shape[1] for part in params.custom["banned"].split(",")):
            raise ValueError("banned must list token ids, separated by commas")


@mutant
class WaitsForOneRow(CountPenalty):
    """Cuts the row of a step of one request out by numbers that it asks the device for."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        if len(rows) > 1:
            super().apply(logits, rows, slots, positions)
        else:
            logits[rows[0] : rows[0] + 1] -= self.penalties[slots].unsqueeze(1) * self.counts[slots]
