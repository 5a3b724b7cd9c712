"""Masks along a drafted path: what a grammar allows at each position of a draft.

A row with k drafted tokens samples k + 1 tokens, each under the mask after the tokens before it.
The grammar accepts the draft to fill these masks, and is rolled back. Used by `grammar_masks`. Must
not know a request or a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import Grammar


def fill_draft_masks(grammar: Grammar, draft: Sequence[int], first: np.ndarray | None, masks: np.ndarray) -> tuple[int, bool]:
    """Fill the masks of a drafted path and roll the grammar back.

    draft: token ids. first: the mask before the draft, int32 [words], if it is known. masks: int32
    [len(draft) + 1, words]; row i allows what may follow i drafted tokens. -> the number of leading
    drafted tokens that the grammar allows before its end; the rows up to this number are filled. A
    token that finishes the grammar is not counted, so that no token is sampled after it. And
    whether no other token can be accepted: False where the grammar failed in the middle of the
    draft. Raises what the first `fill_mask` and `rollback_tokens` raise.
    """
    if first is not None:
        masks[0] = first
    else:
        _fill(grammar, masks[0])
    accepted = allowed = 0
    is_known = False
    with suppress(Exception):  # it is raised again where the output gets there
        for place, token in enumerate(draft):
            is_known = not is_allowed(masks[place], token)
            if is_known or not grammar.accept_token(token):
                break
            accepted += 1
            is_known = grammar.is_finished()
            if is_known:
                break
            _fill(grammar, masks[accepted])
            allowed = accepted
        is_known |= allowed == len(draft)
    if accepted:
        grammar.rollback_tokens(accepted)
    return allowed, is_known


def is_allowed(mask: np.ndarray, token: int) -> bool:
    """Whether a mask, int32 [words], allows a token."""
    return bool(int(mask[token // 32]) >> token % 32 & 1)


def _fill(grammar: Grammar, mask: np.ndarray) -> None:
    if not grammar.fill_mask(mask):
        mask[:] = -1
