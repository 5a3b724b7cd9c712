"""Samplers with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.device_operations import DeviceOperations
from frame.core.interfaces.sampling_params import SamplingParams
from frame.interfaces.sampler import RowSampler, SamplerCapabilities, SamplerContext, SupportsSlots
from tests.testing.mutants import MutantList, sampler_values

Params = Mapping[str, torch.Tensor]
NO_LIMIT = 1e9


def read(params: SamplingParams, key: str, default: float) -> float:
    if key not in params.custom:
        return default
    try:
        value = float(params.custom[key])
    except ValueError:
        value = math.nan
    if not 0 < value < NO_LIMIT:
        raise ValueError(f"custom[{key!r}] must be a number above 0")
    return value


class Sigma(RowSampler, SupportsSlots):
    """Leaves out the tokens whose logits lie some standard deviations below the greatest one; a
    request says how many. Drawn by the device's race."""

    conformance_params = (SamplingParams(), SamplingParams(custom={"width": "0.5"}), SamplingParams(custom={"width": "1.5"}))

    def __init__(self, context: SamplerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.widths = torch.full((context.num_slots,), NO_LIMIT)

    def validate_params(self, params: SamplingParams) -> None:
        read(params, "width", NO_LIMIT)

    def add_slot(self, setup: SlotSetup) -> None:
        self.widths[setup.slot] = read(setup.params, "width", NO_LIMIT)

    def remove_slot(self, slot: int) -> None:
        self.widths[slot] = NO_LIMIT

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None: ...

    def find_limit(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        is_allowed = logits > -torch.inf
        count = is_allowed.sum(-1, keepdim=True).clamp(min=1)
        mean = logits.where(is_allowed, 0.0).sum(-1, keepdim=True) / count
        deviation = ((logits - mean).where(is_allowed, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
        return logits.amax(-1, keepdim=True) - self.widths[slots].unsqueeze(1) * deviation

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        return self.race(logits.masked_fill(logits < self.find_limit(logits, slots), -torch.inf), params)

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        return self.context.operations.draw_plain(logits, params["temperature"], params["key"], None)[0]


class Surprise(RowSampler, SupportsSlots):
    """Mirostat 2: draws among the tokens whose surprise is at most a value of the slot, which moves
    with each token."""

    conformance_params = (SamplingParams(custom={"tau": "3"}), SamplingParams(custom={"tau": "0.5"}), SamplingParams())

    def __init__(self, context: SamplerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.tau = torch.ones(context.num_slots)
        self.mu, self.last = 2 * self.tau, self.tau.clone()

    def validate_params(self, params: SamplingParams) -> None:
        read(params, "tau", 5.0)

    def add_slot(self, setup: SlotSetup) -> None:
        tau = read(setup.params, "tau", 5.0)
        self.tau[setup.slot], self.mu[setup.slot], self.last[setup.slot] = tau, 2 * tau, tau

    def remove_slot(self, slot: int) -> None: ...

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        temperature = params["temperature"].unsqueeze(1)
        scaled = logits.float() / torch.where(temperature > 0, temperature, math.log(2))
        surprise = (torch.logsumexp(scaled * math.log(2), -1, keepdim=True) / math.log(2)) - scaled
        limit = torch.maximum(self.mu[slots].unsqueeze(1), surprise.amin(-1, keepdim=True))
        kept = logits.float().masked_fill(surprise > limit, -torch.inf)
        token_ids = self.context.operations.draw_plain(kept, params["temperature"], params["key"], None)[0]
        self.note(slots, surprise.gather(1, token_ids.unsqueeze(1)).squeeze(1))
        return token_ids

    def note(self, slots: torch.Tensor, surprise: torch.Tensor) -> None:
        self.last.index_copy_(0, slots, surprise)

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.mu.index_copy_(0, slots, self.mu[slots] - 0.1 * (self.last[slots] - self.tau[slots]))


CAN = SamplerCapabilities(params=("seed",), custom=("width",))
MOVES = SamplerCapabilities(params=(), custom=("tau",), drafts=False)
FILTERS = SamplerCapabilities(custom=("width",))
mutant = MUTANTS = MutantList("sampler", reference=Sigma, capabilities=CAN)


@mutant
class ReadsTheRowForTheSlot(Sigma):
    """Takes the row's number for its request slot."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        return super().draw_tokens(logits, params, torch.arange(len(slots)))


@mutant
class HasNoGreedyRows(Sigma):
    """Divides by temperature 0, so that a greedy request is drawn from."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        return super().race(logits, {**params, "temperature": params["temperature"].clamp(min=0.5)})


@mutant
class IgnoresTheTemperature(Sigma):
    """Draws at temperature 1 whatever a request asks for, except for 0."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        return super().race(logits, {**params, "temperature": math.log(2) * (params["temperature"] > 0)})


@mutant
class DrawsWithTheGlobalGenerator(Sigma):
    """Draws with the generator of the process, so that a seed has no effect."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        weights = torch.where(params["temperature"] > 0, params["temperature"], 1.0).unsqueeze(1)
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        return torch.where(params["temperature"] > 0, (logits * math.log(2) / weights + noise).argmax(-1), logits.argmax(-1))


@mutant
class FailsOnNaN(Sigma):
    """Draws with torch.multinomial, which fails for the whole step where a row is NaN."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        torch.multinomial(logits.softmax(-1), 1)
        return super().race(logits, params)


@mutant
class MixesKeys(Sigma):
    """Adds the row's number to the key, so that a token depends on the company."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        return super().race(logits, {**params, "key": params["key"] + torch.arange(len(logits))})


@mutant
class UsesOneKey(Sigma):
    """Draws all rows with the first row's key."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        return super().race(logits, {**params, "key": params["key"][:1].expand(len(logits)).contiguous()})


@mutant
class IgnoresThePosition(Sigma):
    """Keeps the first key of a slot, so that every position has the same noise."""

    def __init__(self, context: SamplerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.keys = torch.zeros(context.num_slots, dtype=torch.int64)

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.keys[setup.slot] = 0

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        self.keys[slots] = torch.where(self.keys[slots] == 0, params["key"], self.keys[slots])
        return super().draw_tokens(logits, {**params, "key": self.keys[slots]}, slots)


@mutant
class ChangesTheLogits(Sigma):
    """Excludes tokens in the logits themselves, which a later draw under a mask reads."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) - 9.0, -torch.inf)
        return super().draw_tokens(logits, params, slots)


@mutant
class ScalesTheTemperature(Sigma):
    """Divides the temperatures by ln 2 in place."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        found = super().race(logits, params)
        params["temperature"].div_(math.log(2))
        return found


@mutant
class ReplacesMinusInfinity(Sigma):
    """Replaces -inf by a small number, so that hot requests get forbidden tokens."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        return self.race(logits.float().clamp(min=-20.0), params)


@mutant
class NormalisesOverTheStep(Sigma):
    """Takes the standard deviation over all rows of the step."""

    def find_limit(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        finite = logits[torch.isfinite(logits)]
        return logits.amax(-1, keepdim=True) - self.widths[slots].unsqueeze(1) * finite.std()


@mutant
class TakesTheMaximumOfTheStep(Sigma):
    """Measures from the greatest logit of all rows, so that a neighbour's row excludes tokens."""

    def find_limit(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        own = logits.amax(-1, keepdim=True)
        return super().find_limit(logits, slots) - own + torch.minimum(own.amax(), own + 0.5 * (own.amax() - own))


@mutant
class ComputesInSmallFloats(Sigma):
    """Computes in the dtype of the logits, so that bfloat16 rounds the noise."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        return self.race((logits / 3.0).float() * 3.0, params)


@mutant
class ReturnsShortIntegers(Sigma):
    """Returns int32 tokens."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        return super().race(logits, params).int()


@mutant
class ReturnsAColumn(Sigma):
    """Returns a column of tokens, as of torch.multinomial."""

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        return super().race(logits, params).unsqueeze(1)


@mutant
class SharesItsBuffer(Sigma):
    """Writes the tokens of every step to one buffer."""

    def __init__(self, context: SamplerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.buffer = torch.zeros(4096, dtype=torch.int64)

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        tokens = self.buffer[: len(logits)]
        return tokens.copy_(super().race(logits, params))


@mutant
class KeepsTheKeys(Sigma):
    """Keeps the keys of the step before and draws with them in the next one of as many rows."""

    kept: torch.Tensor | None = None

    def race(self, logits: torch.Tensor, params: Params) -> torch.Tensor:
        before, self.kept = self.kept, params["key"]
        if before is not None and len(before) == len(logits):
            params = {**params, "key": params["key"] ^ (before & 1)}
        return super().race(logits, params)


@mutant
class LoopsOverRows(Sigma):
    """Draws the rows one by one in Python."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        rows = [{name: each[row : row + 1] for name, each in params.items()} for row in range(len(slots))]
        return torch.cat([super(LoopsOverRows, self).draw_tokens(logits[r : r + 1], rows[r], slots[r : r + 1]) for r in range(len(slots))])


@mutant
class AsksTheDevice(Sigma):
    """Asks the device whether a row has a limit."""

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        if bool((self.widths[slots] < NO_LIMIT).any()):
            return super().draw_tokens(logits, params, slots)
        return self.race(logits.float(), params)


@mutant
class ForgetsToResetTheSlot(Sigma):
    """Sets a slot up only if the request has the parameter, and never clears it."""

    def add_slot(self, setup: SlotSetup) -> None:
        if setup.params.custom:
            super().add_slot(setup)

    def remove_slot(self, slot: int) -> None: ...


@mutant
class ClearsTheNeighbour(Sigma):
    """Clears the slot beside the one that is released."""

    def remove_slot(self, slot: int) -> None:
        self.widths[slot] = NO_LIMIT
        self.widths[slot - 1] = NO_LIMIT


@mutant
class KeepsWidthsInTheClass(Sigma):
    """Keeps the slots in the class, which two engines of a process share."""

    shared: ClassVar[dict[int, float]] = {}

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.shared[setup.slot] = float(self.widths[setup.slot])

    def draw_tokens(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> torch.Tensor:
        for slot, width in self.shared.items():
            if slot < len(self.widths):
                self.widths[slot] = width
        return super().draw_tokens(logits, params, slots)


@mutant
class HasNoPaddingSlot(Sigma):
    """Has room for the requests alone, not for padding rows."""

    def __init__(self, context: SamplerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.widths = self.widths[:-1].clone()


@mutant
class AcceptsAnything(Sigma):
    """Takes any value of its parameter, and fails where the request enters."""

    def validate_params(self, params: SamplingParams) -> None: ...


@mutant
class RefusesWithoutAName(Sigma):
    """Refuses wrong values with an error that names nothing."""

    def validate_params(self, params: SamplingParams) -> None:
        try:
            super().validate_params(params)
        except ValueError:
            raise ValueError("the value is wrong") from None


@mutant
class IgnoresItsParameter(Sigma):
    """Reads the parameter of a request and never uses it."""

    def find_limit(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return logits.amax(-1, keepdim=True) - NO_LIMIT


@mutant.using(capabilities=FILTERS)
class ClaimsFilters(Sigma):
    """Says that it honours top_k, top_p and min_p, and filters by none of them."""


@mutant
class SuppressesNaN(Sigma):
    """Replaces NaN before the greatest logit is taken, so that a broken request goes on."""

    def draw_with_maxima(self, logits: torch.Tensor, params: Params, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().draw_with_maxima(torch.nan_to_num(logits, neginf=-torch.inf, posinf=100.0), params, slots)


@mutant
class ScoresChangedLogits(Sigma):
    """Computes log-probabilities of logits that it has sharpened."""

    def make_operations(self) -> DeviceOperations:
        made = super().make_operations()
        base = made.compute_logprobs
        return DeviceOperations(
            draw_plain=made.draw_plain, mask_logits=made.mask_logits, draw_filtered=made.draw_filtered,
            compute_logprobs=lambda logits, ids, count: base(logits * 1.1, ids, count),
        )  # fmt: skip


@mutant
class ForgetsTheTable(Sigma):
    """Leaves the table of last tokens as it is, so that graphs decode an older token again."""

    def make_operations(self) -> DeviceOperations:
        made = super().make_operations()

        def draw_plain(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, last: Any = None) -> Any:
            return made.draw_plain(logits, temperature, keys, last and (last[0].clone(), last[1]))

        return DeviceOperations(
            draw_plain=draw_plain, mask_logits=made.mask_logits, draw_filtered=made.draw_filtered, compute_logprobs=made.compute_logprobs,
        )  # fmt: skip


@mutant
class KeepsEveryToken(Sigma):
    """Keeps the tokens of all steps."""

    def __init__(self, context: SamplerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.kept: list[torch.Tensor] = []

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.kept.append(token_ids.clone())


@mutant
class SetsVariables(Sigma):
    """Sets a variable of the environment."""

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        os.environ["DRAWN_ROWS"] = str(len(slots))


@mutant.using(capabilities=MOVES)
class MovesWithDraws(Surprise):
    """Moves its value in each draw, which a graph repeats with filters and under masks."""

    def note(self, slots: torch.Tensor, surprise: torch.Tensor) -> None:
        self.mu.index_copy_(0, slots, self.mu[slots] - 0.1 * (surprise - self.tau[slots]))

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None: ...


@mutant.using(capabilities=MOVES)
class SumsSurprise(Surprise):
    """Adds up the surprise of all draws of a position."""

    def note(self, slots: torch.Tensor, surprise: torch.Tensor) -> None:
        self.last.index_add_(0, slots, surprise)

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        super().observe_tokens(slots, token_ids)
        self.last[slots] = 0.0


@mutant.using(capabilities=MOVES)
class KeepsTheOldValue(Surprise):
    """Goes on from the value of the slot's earlier request."""

    def add_slot(self, setup: SlotSetup) -> None:
        self.tau[setup.slot] = read(setup.params, "tau", 5.0)


@mutant.using(capabilities=MOVES)
class MovesAllSlots(Surprise):
    """Moves the values of all slots with each step, those without a row too."""

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.mu -= 0.1 * (self.last - self.tau)


@mutant.using(capabilities=MOVES)
class KeepsRows(Surprise):
    """Notes the surprise by row, and reads it by slot."""

    def note(self, slots: torch.Tensor, surprise: torch.Tensor) -> None:
        self.last[: min(len(surprise), len(self.last))] = surprise[: len(self.last)]


@mutant.using(capabilities=MOVES)
class FailsWithoutRows(Surprise):
    """Takes the mean of a step's surprise, which a step without rows has not."""

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.last[slots].max()
        super().observe_tokens(slots, token_ids)


@mutant.using(capabilities=SamplerCapabilities(params=("seed",), custom=("tau",)))
class ClaimsDrafts(Surprise):
    """Says that its draws verify drafts and follow seeds, and moves with each token."""


@mutant
class SubtractsLargeSquares(Sigma):
    """Computes the variance as the mean of squares less the square of the mean, which cancel."""

    def find_limit(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        is_allowed = logits > -torch.inf
        count = is_allowed.sum(-1, keepdim=True).clamp(min=1)
        kept = logits.where(is_allowed, 0.0)
        variance = kept.square().sum(-1, keepdim=True) / count - (kept.sum(-1, keepdim=True) / count).square()
        return logits.amax(-1, keepdim=True) - self.widths[slots].unsqueeze(1) * variance.clamp(min=0).sqrt()


for target in sampler_values.WRONG:
    mutant(target, capabilities=SamplerCapabilities())
