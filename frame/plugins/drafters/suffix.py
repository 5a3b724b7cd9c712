"""`suffix`: drafts what followed the longest known suffix of a sequence, in its prompt, its output
and recent requests of the same tenant (suffix decoding, Oliaro et al. 2024).

The nodes of a suffix tree, to a fixed depth, are entries of one hash table: the hash of a tenant
and a suffix leads to the token that followed it last. New entries overwrite old ones, which bounds
the memory. A draft is no longer than its match, since a long match predicts more tokens.
Used by the scheduler. Must not know a model or a tokenizer.
"""

from __future__ import annotations

import hashlib

import numpy as np

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.drafter import Drafter, DrafterContext, Drafts
from frame.plugins.drafters import SuffixOptions

ORDERS = np.array([24, 16, 12, 8, 6, 4, 3, 2])  # tokens of the suffixes that are nodes, longest first
_DEPTH = int(ORDERS[0])
_ENTRY_BYTES = 8
_CACHE_MIB = 32  # without options
_FACTORS = np.random.default_rng(0x5F3759DF).integers(1, 2**63, _DEPTH, dtype=np.uint64) | np.uint64(1)
_SALTS = np.random.default_rng(0x9E3779B9).integers(1, 2**63, len(ORDERS), dtype=np.uint64)


class SuffixDrafter(Drafter):
    """The table: tags, uint32 [entries], and tokens, int32 [entries]. By slot: the last tokens,
    int32 [slots, depth], how many there are, and the hash of the tenant, uint64."""

    def __init__(self, context: DrafterContext, options: SuffixOptions | None = None) -> None:
        mib = _CACHE_MIB if options is None else options.cache_mib
        bits = ((mib << 20) // _ENTRY_BYTES).bit_length() - 1
        self._mask = np.uint64((1 << bits) - 1)
        self._tags = np.zeros(1 << bits, np.uint32)
        self._tokens = np.zeros(1 << bits, np.int32)
        self._last = np.zeros((context.max_slots, _DEPTH), np.int32)
        self._lens = np.zeros(context.max_slots, np.int64)
        self._tenants = np.zeros(context.max_slots, np.uint64)

    def add_slot(self, setup: SlotSetup) -> None:
        slot, tokens, count = setup.slot, setup.token_ids, len(setup.token_ids)
        self._tenants[slot] = _hash_tenant(setup.tenant)
        self._lens[slot] = min(count, _DEPTH)
        if count:
            self._last[slot, -min(count, _DEPTH) :] = tokens[-_DEPTH:]
        sums = np.zeros(count, np.uint64)  # place i: of the suffix that ends before token i
        values = tokens.astype(np.uint64) + np.uint64(1)
        for distance in range(1, min(_DEPTH, count - 1) + 1):
            sums[distance:] += values[: count - distance] * _FACTORS[distance - 1]
            for number in np.flatnonzero(distance == ORDERS).tolist():
                words = _mix(sums[distance:] ^ _SALTS[number] ^ self._tenants[slot])
                self._store(words, tokens[distance:])

    def remove_slot(self, slot: int) -> None:
        self._lens[slot] = 0

    def observe_tokens(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        for column in range(token_ids.shape[1]):
            chosen = slots[counts > column]
            tokens = token_ids[counts > column, column]
            known = self._lens[chosen][:, None] >= ORDERS
            words = _hash_suffixes(self._last[chosen], self._tenants[chosen])
            self._store(words[known], np.broadcast_to(tokens[:, None], known.shape)[known])
            self._last[chosen] = _append(self._last[chosen], tokens)
            self._lens[chosen] = np.minimum(self._lens[chosen] + 1, _DEPTH)

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        last, lens, tenants = self._last[slots], self._lens[slots], self._tenants[slots]
        every, limits = np.arange(len(slots)), max_tokens.astype(np.int64)
        drafts = np.zeros((len(slots), int(max_tokens.max(initial=0))), np.int32)
        counts = np.zeros(len(slots), np.int32)
        for column in range(drafts.shape[1]):
            words = _hash_suffixes(last, tenants)
            entries = words & self._mask
            is_match = (self._tags[entries] == _tags_of(words)) & (lens[:, None] >= ORDERS)
            max_length = is_match.argmax(axis=1)
            if column == 0:
                limits = np.minimum(limits, ORDERS[max_length])
            is_drafted = is_match[every, max_length] & (counts == column) & (column < limits)
            if not is_drafted.any():
                break
            tokens = self._tokens[entries[every, max_length]]
            drafts[:, column] = tokens
            counts += is_drafted
            last, lens = _append(last, tokens), np.minimum(lens + 1, _DEPTH)
        return Drafts(drafts[np.arange(drafts.shape[1]) < counts[:, None]], counts)

    def _store(self, words: np.ndarray, tokens: np.ndarray) -> None:
        entries = words & self._mask
        self._tags[entries], self._tokens[entries] = _tags_of(words), tokens


def _append(last: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The last tokens, int32 [n, depth], after one more token each."""
    return np.concatenate((last[:, 1:], tokens[:, None]), axis=1)


def _hash_suffixes(last: np.ndarray, tenants: np.ndarray) -> np.ndarray:
    """The hashes of the suffixes of each row, uint64 [n, orders]."""
    sums = ((last[:, ::-1].astype(np.uint64) + np.uint64(1)) * _FACTORS).cumsum(axis=1)
    return _mix(sums[:, ORDERS - 1] ^ _SALTS ^ tenants[:, None])


def _mix(words: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _tags_of(words: np.ndarray) -> np.ndarray:
    """The upper half of each hash, never 0, which is the tag of an empty entry."""
    return (words >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _hash_tenant(tenant: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little"))
