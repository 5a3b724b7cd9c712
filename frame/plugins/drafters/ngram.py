"""`ngram`: drafts the continuation of the latest earlier occurrence of a sequence's last tokens, in
its prompt or output (prompt lookup decoding, Saxena 2023).

A hash table per slot and n-gram length holds the place after each n-gram's latest occurrence, so
that a lookup does not scan the text. A draft that reaches the end of the text goes on with its own
first tokens, which continues repetitions. Used by the scheduler. Must not know a model or a
tokenizer.
"""

from __future__ import annotations

import numpy as np

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.drafter import Drafter, DrafterContext, Drafts
from frame.plugins.drafters import NgramOptions

_MAX_LENGTH, _SHORTEST = 4, 2  # tokens of an n-gram, without options
_MIN_BITS, _MAX_BITS = 10, 15  # of the number of entries of a table
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class NgramDrafter(Drafter):
    """Tokens of each slot, int32 [slots, max_context], and the tables, int32 [lengths, slots,
    entries]: the place after an n-gram, 0 where there is none. A place is checked against the
    tokens before it is used, since n-grams may share an entry."""

    def __init__(self, context: DrafterContext, options: NgramOptions | None = None) -> None:
        max_length = _MAX_LENGTH if options is None else options.prompt_lookup_max
        shortest = _SHORTEST if options is None else options.prompt_lookup_min
        bits = min(max((2 * context.max_context).bit_length(), _MIN_BITS), _MAX_BITS)
        self._orders = tuple(range(max_length, shortest - 1, -1))
        self._shift = np.uint64(64 - bits)
        self._tokens = np.zeros((context.max_slots, context.max_context), np.int32)
        self._lens = np.zeros(context.max_slots, np.int64)
        self._tables = np.zeros((len(self._orders), context.max_slots, 1 << bits), np.int32)

    def add_slot(self, setup: SlotSetup) -> None:
        slot, count = setup.slot, len(setup.token_ids)
        self._tables[:, slot] = 0
        self._tokens[slot, :count] = setup.token_ids
        self._lens[slot] = count
        for table, order in zip(self._tables, self._orders, strict=True):
            if count > order:  # the last n-gram has nothing after it
                windows = np.lib.stride_tricks.sliding_window_view(setup.token_ids, order)[:-1]
                table[slot, self._hash(windows)] = np.arange(order, count)

    def remove_slot(self, slot: int) -> None:
        self._lens[slot] = 0

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        places = self._lens[slots][:, None] + np.arange(token_ids.shape[1])
        is_valid = np.arange(token_ids.shape[1]) < counts[:, None]
        rows, places = np.broadcast_to(slots[:, None], places.shape)[is_valid], places[is_valid]
        self._tokens[rows, places] = token_ids[is_valid]
        self._lens[slots] += counts
        for table, order in zip(self._tables, self._orders, strict=True):
            has_gram = places >= order
            at, ends = rows[has_gram], places[has_gram]
            table[at, self._hash(self._take(at, ends - order, order))] = ends

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        lens = self._lens[slots]
        matched = np.zeros(len(slots), np.int64)
        for table, order in zip(self._tables, self._orders, strict=True):
            open_rows = np.flatnonzero((matched == 0) & (lens > order))
            if not open_rows.size:
                continue
            at = slots[open_rows]
            grams = self._take(at, lens[open_rows] - order, order)
            places = table[at, self._hash(grams)].astype(np.int64)
            is_match = places >= order
            is_match &= (self._take(at, np.maximum(places - order, 0), order) == grams).all(axis=1)
            matched[open_rows[is_match]] = places[is_match]
        counts = np.where(matched > 0, max_tokens, 0).astype(np.int32)
        offsets = np.arange(int(counts.max(initial=0)))
        periods = np.maximum(lens - matched, 1)
        drafts = self._tokens[slots[:, None], matched[:, None] + offsets % periods[:, None]]
        return Drafts(drafts[offsets < counts[:, None]], counts)

    def _take(self, slots: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
        """`count` tokens from `starts` on, int32 [n, count]."""
        taken: np.ndarray = self._tokens[slots[:, None], starts[:, None] + np.arange(count)]
        return taken

    def _hash(self, grams: np.ndarray) -> np.ndarray:
        """The entry of each n-gram, intp [n]; grams: int32 [n, order]."""
        mixed = np.zeros(len(grams), np.uint64)
        for column in grams.T:
            mixed = (mixed ^ column.astype(np.uint64)) * _FACTOR
            mixed ^= mixed >> np.uint64(29)
        return ((mixed * _FACTOR) >> self._shift).astype(np.intp)
