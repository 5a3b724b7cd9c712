"""Drafters for tests: `ScriptedDrafter` drafts what a function says, right or wrong.

Used by the tests of the scheduler and of whole engines, which compare the output with that of a run
without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.drafter import Drafter, DrafterContext, Drafts

# (setup of the slot, its tokens so far, most tokens of the draft) -> draft
Script = Callable[[SlotSetup, Sequence[int], int], Sequence[int]]
# the same -> the tree: its tokens, and the node that each follows (`Drafts.parents`)
TreeScript = Callable[[SlotSetup, Sequence[int], int], tuple[Sequence[int], Sequence[int]]]


class ScriptedDrafter(Drafter):
    """Drafts what `script` returns. An oracle returns the tokens to come; an adversary returns
    wrong ones."""

    def __init__(self, script: Script, context: DrafterContext | None = None) -> None:
        self.num_proposals = 0  # calls with at least one slot
        self._script = script
        self._setups: dict[int, SlotSetup] = {}
        self._tokens: dict[int, list[int]] = {}

    @property
    def slots(self) -> set[int]:
        """The slots in use."""
        return set(self._setups)

    def add_slot(self, setup: SlotSetup) -> None:
        self._setups[setup.slot] = setup
        self._tokens[setup.slot] = setup.token_ids.tolist()

    def remove_slot(self, slot: int) -> None:
        del self._setups[slot], self._tokens[slot]

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        for slot, tokens, count in zip(slots.tolist(), token_ids.tolist(), counts.tolist(), strict=True):
            self._tokens[slot] += tokens[:count]

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        self.num_proposals += 1
        drafts = [
            list(self._script(self._setups[slot], self._tokens[slot], maximum))[:maximum]
            for slot, maximum in zip(slots.tolist(), max_tokens.tolist(), strict=True)
        ]
        tokens = [token for draft in drafts for token in draft]
        return Drafts(np.array(tokens, np.int32), np.array([len(draft) for draft in drafts], np.int32))


class ScriptedTreeDrafter(ScriptedDrafter):
    """Drafts the trees that `script` returns."""

    def __init__(self, script: TreeScript, context: DrafterContext | None = None) -> None:
        super().__init__(self._note_tree, context)
        self._tree_script = script
        self._parents: list[int] = []  # of the proposal being made

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        self._parents = []
        chains = super().propose_tokens(slots, max_tokens)
        return Drafts(chains.token_ids, chains.counts, np.array(self._parents, np.int32))

    def _note_tree(self, setup: SlotSetup, tokens: Sequence[int], maximum: int) -> Sequence[int]:
        token_ids, parents = self._tree_script(setup, tokens, maximum)
        self._parents += parents[:maximum]
        return token_ids
