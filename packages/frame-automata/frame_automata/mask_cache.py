"""An LRU cache limited in bytes, and masks and costs in sparse form. Used by `automaton`; knows no
grammar."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from frame_automata.vocabulary_tree import NOT_AT_ALL

FEW = 6  # sparse if less than one word or token in so many is used
_OVERHEAD = 256  # bytes of an entry
_MIN_ENTRIES = 16  # kept however large they are


class Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


Key = TypeVar("Key")
Value = TypeVar("Value", bound=Sized)


class LruCache(Generic[Key, Value]):
    """The most recently used entries, up to `limit` bytes. Thread-safe."""

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
            if key in self._entries:  # another thread added it first
                return
            self._entries[key] = value
            self._size += value.num_bytes + _OVERHEAD
            while self._size > self._limit and len(self._entries) > _MIN_ENTRIES:
                self._size -= self._entries.popitem(last=False)[1].num_bytes + _OVERHEAD


@dataclass(frozen=True, slots=True)
class Mask:
    """The bits of the allowed tokens: all words, or the words that are not 0."""

    words: np.ndarray  # int32 [words], or [places]
    places: np.ndarray | None  # intp [places]; indices of the words. None: all

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
    """How many repetitions of a limited run each token takes."""

    costs: np.ndarray  # uint8 [32 * words], or [tokens]
    tokens: np.ndarray | None  # intp [tokens]; None: all

    @classmethod
    def of(cls, costs: np.ndarray) -> Costs:
        """From costs uint8 [32 * words]."""
        tokens = (costs != NOT_AT_ALL).nonzero()[0]
        return cls(costs[tokens], tokens) if FEW * len(tokens) < len(costs) else cls(costs, None)

    @property
    def num_bytes(self) -> int:
        return self.costs.nbytes + (0 if self.tokens is None else self.tokens.nbytes)

    def mask(self, maximum: int) -> Mask:
        """The mask of the tokens that take at most `maximum` repetitions."""
        allowed = self.costs <= min(maximum, NOT_AT_ALL - 1)
        if self.tokens is None:
            return Mask.of(np.packbits(allowed, bitorder="little").view(np.int32))
        tokens = self.tokens[allowed]
        is_new = np.ones(len(tokens), np.bool_)  # sorted, so tokens of one word are adjacent
        is_new[1:] = tokens[1:] // 32 != tokens[:-1] // 32
        starts = is_new.nonzero()[0]
        bits = np.left_shift(1, tokens % 32).astype(np.uint32)
        return Mask(np.bitwise_or.reduceat(bits, starts).view(np.int32) if len(starts) else bits.view(np.int32), tokens[starts] // 32)
