"""Wrong drafters, derived from a plain one that repeats what followed the last token, and from
`mtp`."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch, SlotSetup
from frame.core.interfaces.device_drafter import DraftModelContext
from frame.core.interfaces.drafter import Drafter, DrafterCapabilities, DrafterContext, Drafts
from frame.plugins.drafters.mtp import MtpDrafter, PredictionLayer
from tests.testing.mutants import MutantList


class PlainDrafter(Drafter):
    """Keeps what followed each token last, by slot."""

    def __init__(self, context: DrafterContext, options: Any = None) -> None:
        self.context = context
        self.last: dict[int, int] = {}
        self.following: dict[int, dict[int, int]] = {}

    def add_slot(self, setup: SlotSetup) -> None:
        tokens = setup.token_ids.tolist()
        self.following[setup.slot] = dict(pairwise(tokens))
        self.last[setup.slot] = tokens[-1]

    def remove_slot(self, slot: int) -> None:
        del self.last[slot], self.following[slot]

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        for slot, tokens, count in zip(slots.tolist(), token_ids.tolist(), counts.tolist(), strict=True):
            for token in tokens[:count]:
                self.following[slot][self.last[slot]] = token
                self.last[slot] = token

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        drafts = [self.draft(slot, maximum) for slot, maximum in zip(slots.tolist(), max_tokens.tolist(), strict=True)]
        return Drafts(np.array(list(chain.from_iterable(drafts)), np.int32), np.array([len(draft) for draft in drafts], np.int32))

    def draft(self, slot: int, maximum: int) -> list[int]:
        token, draft = self.last[slot], []
        while len(draft) < maximum and token in self.following[slot]:
            token = self.following[slot][token]
            draft.append(token)
        return draft


mutant = MUTANTS = MutantList("drafter", reference=PlainDrafter, capabilities=DrafterCapabilities())


@mutant
class IgnoresTheLimit(PlainDrafter):
    """Drafts the most tokens of any draft, though a slot may have fewer."""

    def draft(self, slot: int, maximum: int) -> list[int]:
        return super().draft(slot, self.context.num_steps)


@mutant
class PadsBeyondTheVocabulary(PlainDrafter):
    """Pads drafts with the vocabulary size."""

    def draft(self, slot: int, maximum: int) -> list[int]:
        draft = super().draft(slot, maximum)
        return draft + [self.context.vocab_size] * (maximum - len(draft))


@mutant
class PadsWithMinusOne(PlainDrafter):
    """Pads drafts with -1, as a rectangle."""

    def draft(self, slot: int, maximum: int) -> list[int]:
        draft = super().draft(slot, maximum)
        return draft + [-1] * (maximum - len(draft))


@mutant
class ReturnsLongIntegers(PlainDrafter):
    """Returns int64 arrays."""

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        found = super().propose_tokens(slots, max_tokens)
        return Drafts(found.token_ids.astype(np.int64), found.counts.astype(np.int64))


@mutant
class LeavesSlotsOut(PlainDrafter):
    """Returns counts of those slots only that have a draft."""

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        found = super().propose_tokens(slots, max_tokens)
        return Drafts(found.token_ids, found.counts[found.counts > 0])


@mutant
class SortsSlots(PlainDrafter):
    """Returns drafts in the order of the slots' numbers."""

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        order = np.argsort(slots)
        return super().propose_tokens(slots[order], max_tokens[order])


@mutant
class ForgetsToClear(PlainDrafter):
    """Keeps the tokens of the request that had the slot before."""

    def add_slot(self, setup: SlotSetup) -> None:
        kept = self.following.get(setup.slot, {})
        super().add_slot(setup)
        self.following[setup.slot] = kept | self.following[setup.slot]

    def remove_slot(self, slot: int) -> None:
        del self.last[slot]


@mutant
class RefusesASecondSetup(PlainDrafter):
    """Raises where a slot in use is set up with more tokens."""

    def add_slot(self, setup: SlotSetup) -> None:
        if setup.slot in self.last:
            raise RuntimeError("the slot is in use")
        super().add_slot(setup)


@mutant
class ObservesTheFirstToken(PlainDrafter):
    """Takes only the first token of a run."""

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        super().observe_tokens(slots, token_ids, np.minimum(counts, 1))


@mutant
class ObservesThePadding(PlainDrafter):
    """Takes all columns of the array, those that are not valid too."""

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        super().observe_tokens(slots, token_ids, np.full_like(counts, token_ids.shape[1]))


@mutant
class ForgetsTheSetup(PlainDrafter):
    """Looks only at the output, not at the tokens of a setup."""

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.following[setup.slot].clear()


@mutant
class TakesItsOwnDraft(PlainDrafter):
    """Counts drafted tokens as output."""

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        found = super().propose_tokens(slots, max_tokens)
        ends = np.cumsum(found.counts)
        for slot, end, count in zip(slots.tolist(), ends.tolist(), found.counts.tolist(), strict=True):
            if count:
                self.last[slot] = int(found.token_ids[end - 1])
        return found


@mutant
class ReusesItsArray(PlainDrafter):
    """Returns parts of one array, which the next call overwrites."""

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        found = super().propose_tokens(slots, max_tokens)
        self.buffer = getattr(self, "buffer", np.zeros(256, np.int32))
        self.buffer[:] = 0
        self.buffer[: len(found.token_ids)] = found.token_ids
        return Drafts(self.buffer[: len(found.token_ids)], found.counts)


@mutant
class WritesToTheLimits(PlainDrafter):
    """Counts the limits down in the array that it was given."""

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        found = super().propose_tokens(slots, max_tokens)
        max_tokens -= found.counts
        return found


@mutant
class ScansTheText(PlainDrafter):
    """Makes its table anew from the whole text for each draft."""

    def __init__(self, context: DrafterContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.texts: dict[int, list[int]] = {}

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.texts[setup.slot] = setup.token_ids.tolist()

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        super().observe_tokens(slots, token_ids, counts)
        for slot, tokens, count in zip(slots.tolist(), token_ids.tolist(), counts.tolist(), strict=True):
            self.texts[slot] += tokens[:count]

    def draft(self, slot: int, maximum: int) -> list[int]:
        text = self.texts[slot]
        self.following[slot] = dict(pairwise(text))
        return super().draft(slot, maximum)


@mutant
class SharesAcrossTenants(PlainDrafter):
    """Uses what followed a token in the texts of every tenant."""

    def add_slot(self, setup: SlotSetup) -> None:
        known = [each for following in self.following.values() for each in following.items()]
        super().add_slot(setup)
        self.following[setup.slot] = dict(known) | self.following[setup.slot]

    def remove_slot(self, slot: int) -> None:
        del self.last[slot]


@mutant.using(capabilities=DrafterCapabilities(keeps_texts=True))
class CutsTenantNames(PlainDrafter):
    """Knows a tenant by the first 16 characters of its name."""

    def __init__(self, context: DrafterContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.tenants: dict[int, str] = {}
        self.ended: dict[str, dict[int, int]] = {}

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.tenants[setup.slot] = tenant = setup.tenant[:16]
        self.following[setup.slot] = self.ended.get(tenant, {}) | self.following[setup.slot]

    def remove_slot(self, slot: int) -> None:
        self.ended = {self.tenants.pop(slot): self.following[slot]}
        super().remove_slot(slot)


@mutant
class LacksTheLastPlace(PlainDrafter):
    """Has room for one token less than a context."""

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.counts = {**getattr(self, "counts", {}), setup.slot: len(setup.token_ids)}

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        super().observe_tokens(slots, token_ids, counts)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self.counts[slot] += count
            if self.counts[slot] >= self.context.max_context:
                raise IndexError("the tokens of a sequence end before this one")


# on the device ------------------------------------------------------------------------------------

on_device = mutant.using(capabilities=DrafterCapabilities(runs_on="device", needs_draft_layers=True))


@on_device
class KeepsDraftsAfterOtherTokens(MtpDrafter):
    """Proposes the draft of an earlier step after tokens that the device has not seen."""

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        pass


@on_device
class UsesTheFirstLayersPages(MtpDrafter):
    """Numbers its layer 0, so that it writes to the keys of the target's first layer."""

    def build_model(self, context: DraftModelContext) -> PredictionLayer:
        return PredictionLayer(replace(context, first_layer=0))


@on_device
class CountsPositionsFromTheChunk(MtpDrafter):
    """Counts the positions of a pass from its own first token on."""

    class Layer(PredictionLayer):
        def forward(self, batch: ForwardBatch, states: torch.Tensor) -> torch.Tensor:
            return super().forward(replace(batch, positions=torch.arange(batch.num_tokens)), states)

    def build_model(self, context: DraftModelContext) -> PredictionLayer:
        return self.Layer(context)


@on_device
class MixesRows(MtpDrafter):
    """Subtracts the mean of the states of all rows."""

    class Layer(PredictionLayer):
        def compute_logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
            return super().compute_logits(states - states.mean(0) * (len(states) > 1), place)

    def build_model(self, context: DraftModelContext) -> PredictionLayer:
        return self.Layer(context)


@on_device
class ReturnsTheStatesOfAllTokens(MtpDrafter):
    """Returns the states of all tokens of a step, not those of its selected tokens."""

    class Layer(PredictionLayer):
        def forward(self, batch: ForwardBatch, states: torch.Tensor) -> torch.Tensor:
            return super().forward(replace(batch, extensions={}), states)

    def build_model(self, context: DraftModelContext) -> PredictionLayer:
        return self.Layer(context)


@mutant
class ContinuesASlot(PlainDrafter):
    """Keeps the tokens of a slot that is set up again, and observes those that are more."""

    def __init__(self, context: DrafterContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.counts: dict[int, int] = {}

    def add_slot(self, setup: SlotSetup) -> None:
        known, count = self.counts.get(setup.slot, 0), len(setup.token_ids)
        if 0 < known < count:
            self.observe_tokens(np.array([setup.slot]), setup.token_ids[None, known:], np.array([count - known]))
        else:
            super().add_slot(setup)
            self.counts[setup.slot] = count

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        super().observe_tokens(slots, token_ids, counts)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self.counts[slot] += count

    def remove_slot(self, slot: int) -> None:
        super().remove_slot(slot)
        del self.counts[slot]
