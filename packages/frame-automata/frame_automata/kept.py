"""What was found out is kept: the latest that were used, up to a number of bytes. Masks and the like as they are kept, where most of their
tokens are not allowed in a fraction of the memory. Knows no grammar."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from frame_automata.vocabulary_tree import NOT_AT_ALL

FEW = 6  # a list of places is kept instead of all where it has no more than one in so many
_OVERHEAD = 256  # bytes of an entry
_LEAST = 16  # entries, however large


class Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


Key = TypeVar("Key")
Value = TypeVar("Value", bound=Sized)


class Kept(Generic[Key, Value]):
    """Several threads may use it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            if key in self._entries:  # another thread was quicker
                return
            self._entries[key] = value
            self._size += value.num_bytes + _OVERHEAD
            while self._size > self._limit and len(self._entries) > _LEAST:
                self._size -= self._entries.popitem(last=False)[1].num_bytes + _OVERHEAD


@dataclass(frozen=True, slots=True)
class Mask:
    """The allowed tokens' bits: all words, or those that are not 0."""

    words: np.ndarray  # int32
    places: np.ndarray | None  # intp; of the words

    @classmethod
    def of(cls, mask: np.ndarray) -> Mask:
        places = np.flatnonzero(mask)
        return cls(mask[places], places) if FEW * len(places) < len(mask) else cls(mask, None)

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + (0 if self.places is None else self.places.nbytes)

    def write(self, mask: np.ndarray) -> None:
        if self.places is None:
            mask[:] = self.words
        else:
            mask.fill(0)
            mask[self.places] = self.words


@dataclass(frozen=True, slots=True)
class Costs:
    """What each token takes of something that is limited."""

    costs: np.ndarray  # uint8, of all tokens, or those that may come
    tokens: np.ndarray | None  # intp

    @classmethod
    def of(cls, costs: np.ndarray) -> Costs:
        """costs uint8 [32 * words]"""
        tokens = (costs != NOT_AT_ALL).nonzero()[0]
        return cls(costs[tokens], tokens) if FEW * len(tokens) < len(costs) else cls(costs, None)

    @property
    def num_bytes(self) -> int:
        return self.costs.nbytes + (0 if self.tokens is None else self.tokens.nbytes)

    def mask(self, most: int) -> Mask:
        """The tokens that take no more than this."""
        allowed = self.costs <= min(most, NOT_AT_ALL - 1)
        if self.tokens is None:
            return Mask.of(np.packbits(allowed, bitorder="little").view(np.int32))
        tokens = self.tokens[allowed]
        is_new = np.ones(len(tokens), np.bool_)  # they are in order, so those of one word are neighbours
        is_new[1:] = tokens[1:] // 32 != tokens[:-1] // 32
        starts = is_new.nonzero()[0]
        bits = np.left_shift(1, tokens % 32).astype(np.uint32)
        return Mask(np.bitwise_or.reduceat(bits, starts).view(np.int32) if len(starts) else bits.view(np.int32), tokens[starts] // 32)
