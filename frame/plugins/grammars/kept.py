"""What was found out is kept: the latest that were used, up to a number of bytes. Masks and the like as they are kept, where most of their
tokens are not allowed in a fraction of the memory. Knows no grammar."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

FEW = 6  # a list of places is kept instead of all where it has no more than one in so many
TOO_DEAR = 255  # of `Costs`
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
    """What each token takes of something that is limited; one that is in no mask is too dear."""

    num_tokens: int
    costs: np.ndarray  # uint8, of all tokens or those that are not too dear
    tokens: np.ndarray | None  # intp

    @classmethod
    def of(cls, costs: np.ndarray) -> Costs:
        small = np.minimum(costs, TOO_DEAR).astype(np.uint8)
        tokens = np.flatnonzero(small < TOO_DEAR)
        return cls(len(small), small[tokens], tokens) if FEW * len(tokens) < len(small) else cls(len(small), small, None)

    @property
    def num_bytes(self) -> int:
        return self.costs.nbytes + (0 if self.tokens is None else self.tokens.nbytes)

    def mask(self, most: int) -> np.ndarray:
        """The bits of the tokens that take no more than this, int32 [words]."""
        allowed = self.costs <= min(most, TOO_DEAR - 1)
        if self.tokens is not None:
            some, allowed = allowed, np.zeros(self.num_tokens, np.bool_)
            allowed[self.tokens[some]] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)
