"""Drafters: what followed the last two tokens before, and drafters with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.drafter import Drafter, DrafterCapabilities, DrafterContext, Drafts
from tests.testing.held_out import Wrong


class Text:
    """The tokens of a slot, and for each pair of them the place after its last occurrence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.places: dict[tuple[int, int], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if len(self.tokens) >= 2:
                self.places[self.tokens[-2], self.tokens[-1]] = len(self.tokens)
            self.tokens.append(token)

    def follow(self, size: int) -> list[int]:
        place = self.places.get((self.tokens[-2], self.tokens[-1])) if len(self.tokens) >= 2 else None
        if place is None:
            return []
        found = self.tokens[place : place + size]
        return found[: next((number for number, token in enumerate(found) if token < 0), len(found))]


class AfterPair(Drafter):
    """One text for each slot in use."""

    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities()

    def __init__(self, context: DrafterContext, options: BaseModel | None = None) -> None:
        self.context = context
        self.texts: dict[int, Text] = {}

    def add_slot(self, setup: SlotSetup) -> None:
        text = self.texts[setup.slot] = Text()
        text.extend(setup.token_ids.tolist())

    def remove_slot(self, slot: int) -> None:
        self.texts.pop(slot, None)

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        for slot, row, count in zip(slots.tolist(), token_ids.tolist(), counts.tolist(), strict=True):
            self.texts[slot].extend(row[:count])

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        drafts = [self.draft(slot, size) for slot, size in zip(slots.tolist(), max_tokens.tolist(), strict=True)]
        tokens = [token for draft in drafts for token in draft]
        return Drafts(np.array(tokens, np.int32), np.array([len(draft) for draft in drafts], np.int32))

    def draft(self, slot: int, size: int) -> list[int]:
        return self.texts[slot].follow(size)


TWIN = AfterPair
WRONG = Wrong()


@WRONG.add("A request drafts from the text of the one that had its slot before: texts are added to what is there.")
class KeepsSlots(AfterPair):
    def add_slot(self, setup: SlotSetup) -> None:
        self.texts.setdefault(setup.slot, Text()).extend(setup.token_ids.tolist())

    def remove_slot(self, slot: int) -> None:
        return


@WRONG.add("After a preemption a request's drafts are wrong: its text is added to the one before.")
class DoublesResumed(AfterPair):
    def add_slot(self, setup: SlotSetup) -> None:
        self.texts.setdefault(setup.slot, Text()).extend(setup.token_ids.tolist())


@WRONG.add("The engine ends or embeds a wrong row at prompts with images: drafts hold the ids of placeholders.")
class DraftsPlaceholders(AfterPair):
    def draft(self, slot: int, size: int) -> list[int]:
        text = self.texts[slot]
        place = text.places.get((text.tokens[-2], text.tokens[-1])) if len(text.tokens) >= 2 else None
        return [] if place is None else [abs(token) % self.context.vocab_size for token in text.tokens[place : place + size]]


@WRONG.add("Rows with few pages left write behind their pages: drafts always have the full length.")
class IgnoresLimit(AfterPair):
    def draft(self, slot: int, size: int) -> list[int]:
        return super().draft(slot, self.context.num_steps)


@WRONG.add("Drafts are nearly never accepted when rows accept different numbers of tokens: rows are read beyond their count.")
class ReadsWholeRows(AfterPair):
    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        super().observe_tokens(slots, token_ids, np.full_like(counts, counts.max()))


@WRONG.add("Long chats are slower with drafts than without: each call searches the text backwards.")
class SearchesText(AfterPair):
    def draft(self, slot: int, size: int) -> list[int]:
        tokens = self.texts[slot].tokens
        for start in range(len(tokens) - 3, -1, -1):
            if tokens[start : start + 2] == tokens[-2:]:
                found = tokens[start + 2 : start + 2 + size]
                return found[: next((number for number, token in enumerate(found) if token < 0), len(found))]
        return []


@WRONG.add("One tenant's text shows in the timing of another's: all slots draft from one table.")
class OneTable(AfterPair):
    def __init__(self, context: DrafterContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.after: dict[tuple[int, int], int] = {}

    def learn(self, tokens: Sequence[int]) -> None:
        for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
            if third >= 0 and len(self.after) < 1_000_000:
                self.after[first, second] = third

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.learn(setup.token_ids.tolist())

    def draft(self, slot: int, size: int) -> list[int]:
        found, last = super().draft(slot, size), self.texts[slot].tokens[-2:]
        return found or ([self.after[last[0], last[1]]] if len(last) == 2 and (last[0], last[1]) in self.after else [])


@WRONG.add("Memory grows with each request: the texts of ended ones are kept for their tenant without a limit.")
class KeepsTexts(AfterPair):
    capabilities: ClassVar[DrafterCapabilities] = DrafterCapabilities(keeps_texts=True)

    def __init__(self, context: DrafterContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.tenants: dict[int, str] = {}
        self.kept: dict[str, list[Text]] = {}

    def add_slot(self, setup: SlotSetup) -> None:
        super().add_slot(setup)
        self.tenants[setup.slot] = setup.tenant

    def remove_slot(self, slot: int) -> None:
        if slot in self.texts:
            self.kept.setdefault(self.tenants.pop(slot), []).append(self.texts.pop(slot))

    def draft(self, slot: int, size: int) -> list[int]:
        text = self.texts[slot]
        found, last = super().draft(slot, size), tuple(text.tokens[-2:])
        for other in reversed(self.kept.get(self.tenants[slot], [])[-4:]):
            place = other.places.get(last) if len(last) == 2 and not found else None
            found = found or ([] if place is None else [token for token in other.tokens[place : place + 1] if token >= 0])
        return found


@WRONG.add("A step that is planned twice drafts nothing the second time: a draft is used up when it is proposed.")
class UsesUpDrafts(AfterPair):
    def draft(self, slot: int, size: int) -> list[int]:
        text = self.texts[slot]
        found = super().draft(slot, size)
        text.places.pop(tuple(text.tokens[-2:]), None)  # type: ignore[arg-type]
        return found


@WRONG.add("Drafts go to other requests where slots are not in order: they are made in the order of the slots.")
class SortsSlots(AfterPair):
    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        order = np.argsort(slots)
        return super().propose_tokens(slots[order], max_tokens[order])


@WRONG.add("Drafts of vocabularies above 65,536 tokens are never accepted: tokens are kept in 16 bits.")
class SixteenBitTokens(AfterPair):
    def add_slot(self, setup: SlotSetup) -> None:
        text = self.texts[setup.slot] = Text()
        text.extend([token if token < 0 else token & 0xFFFF for token in setup.token_ids.tolist()])

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        super().observe_tokens(slots, token_ids & 0xFFFF, counts)
