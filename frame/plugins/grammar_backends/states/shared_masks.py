"""Masks of a regular grammar by its state: what llguidance computes for one request serves all
requests of the grammar that get to the same state.

The state of an output is the language of what may follow it, `Node`. Where the language says that
two outputs may go on alike, llguidance's masks are equal. Where a single text may follow, the mask
holds a token of this text, which also depends on the token before it. Used by the backend
llguidance. Must not compute a mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.regular_syntax import literals, read
from frame.plugins.grammar_backends.states.schema_language import read_schema
from frame.plugins.grammar_backends.states.tag_language import read_tags, write_special

MASK_BYTES = 16 << 20  # of the masks of one grammar; the oldest are dropped
FEW_WORDS = 32  # of a mask
MAX_NODES = 4000  # of a grammar whose states are followed
MAX_DERIVED = 2000  # derivatives of one token
MAX_STATES = 20_000  # whose keys are kept
MIN_FOLLOWED = 2000  # tokens, of which half must lead to known states
MAX_SIZE = 20_000  # of a language's caches
ENTRY_BYTES = 300  # of an entry of them
_NO_WORDS = np.empty(0, np.int32)
Key = tuple[Node, int]  # a state, and the token before it where it matters


class TokenBytes:
    """The bytes of a tokenizer's tokens. `max_length`: of the longest one, in bytes."""

    def __init__(self, tokenizer: Any, vocabulary: dict[str, int], special_ids: Mapping[str, int]) -> None:
        self.special_ids = special_ids
        self.max_length = max((len(text.encode()) for text in vocabulary), default=1)  # a byte-level token has a character a byte
        self._tokenizer = tokenizer
        self._special = frozenset(special_ids.values())
        self._texts: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        text = self._texts.get(token)
        if text is None:
            is_special = self._tokenizer.is_special_token(token) or token in self._special
            text = self._texts[token] = write_special(token) if is_special else self._tokenizer.decode_bytes([token])
        return text


class SharedMask:
    """The mask of a state, int32 [words], whether an end token may come there, and whether nothing
    else may. Of a mask with few words the others are not kept."""

    __slots__ = ("_few", "_words", "is_accepting", "is_finished", "num_bytes")

    def __init__(self, mask: np.ndarray, is_accepting: bool, is_finished: bool) -> None:
        self.is_accepting, self.is_finished = is_accepting, is_finished
        count = int(np.count_nonzero(mask))
        is_short = count <= FEW_WORDS
        self._few: dict[int, int] | None = None
        if is_short:
            places = np.flatnonzero(mask)
            self._few = dict(zip(places.tolist(), mask[places].tolist(), strict=True))
        self._words = _NO_WORDS if is_short else mask.copy()
        self.num_bytes = 512 + (100 * count if is_short else mask.nbytes)

    def allows(self, token: int) -> bool:
        place = token >> 5
        word: int = self._words.item(place) if self._few is None else self._few.get(place, 0)
        return bool(word >> (token & 31) & 1)

    def write(self, mask: np.ndarray) -> None:
        if self._few is None:
            mask[:] = self._words
        else:
            mask.fill(0)
            for place, word in self._few.items():
                mask[place] = word


class SharedMasks:
    """The states of one grammar and their masks. `add_bytes` is called with the bytes that are
    added, or less than 0. `is_usable`: False once the states take too much work."""

    def __init__(self, language: Language, root: Node, tokens: TokenBytes, add_bytes: Callable[[int], None]) -> None:
        self.root = root
        self.is_usable = True
        self._language, self._tokens, self._add_bytes = language, tokens, add_bytes
        self._masks: dict[Key, SharedMask] = {}  # oldest first
        self._forced: set[Node] = set()  # states where a single text may follow
        self._keys: dict[Node, Node] = {}  # by state: one for all states that allow the same tokens
        self._num_followed = self._num_added = self._num_bytes = self._num_entries = 0
        self._lock = threading.Lock()  # guards `_masks` and the sizes: masks are added by several threads

    def follow(self, state: Node, token: int) -> Node | None:
        """The state after a token; None: it is not known."""
        text, language = self._tokens[token], self._language
        before = language.num_derived
        if language.forget():
            self._clear()
        try:
            after = language.follow(state, text)
        except RecursionError:
            self.is_usable = False
            return None
        self._num_followed += 1
        if self._num_followed == MIN_FOLLOWED:
            self.is_usable = 2 * self._num_added < self._num_followed
            self._num_followed = self._num_added = 0
        self.is_usable &= language.num_derived - before <= MAX_DERIVED
        return after if self.is_usable and text and after is not language.none else None

    def find_key(self, state: Node, last: int) -> Key:
        """What the masks of a state have in common. last: the token before it; -1: none."""
        key = self._keys.get(state)
        if key is None:
            if len(self._keys) > MAX_STATES:
                self._keys.clear()
            key = self._keys[state] = self._language.clamp(state, self._tokens.max_length)
        return key, last if key in self._forced else -1

    def get(self, key: Key) -> SharedMask | None:
        return self._masks.get(key)

    def is_forced(self, mask: np.ndarray) -> bool:
        """Whether all tokens of a mask, int32 [words], begin with one byte."""
        if np.count_nonzero(mask) > self._tokens.max_length:  # the prefixes of one text
            return False
        words = np.flatnonzero(mask)
        bits = np.unpackbits(mask[words].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
        rows, places = np.nonzero(bits)
        return len({self._tokens[token][:1] for token in (32 * words[rows] + places).tolist()}) == 1

    def put(self, key: Key, last: int, mask: np.ndarray, is_accepting: bool, is_finished: bool) -> None:
        """Keep a copy of a mask, int32 [words]. last: as for `find_key`."""
        state = key[0]
        if state not in self._forced and self.is_forced(mask):
            self._forced.add(state)
        if state in self._forced:
            key = state, last
        if key in self._masks:
            return
        added = SharedMask(mask, is_accepting, is_finished)
        with self._lock:
            self._masks[key] = added
            self._num_added += 1
            self._count(added.num_bytes)
            while self._num_bytes > MASK_BYTES:
                self._count(-self._masks.pop(next(iter(self._masks))).num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        size = self._language.size
        self._add_bytes(num_bytes + ENTRY_BYTES * (size - self._num_entries))
        self._num_entries = size

    def _clear(self) -> None:
        with self._lock:
            self._masks, self._forced, self._keys = {}, set(), {}
            self._count(-self._num_bytes)


def read_states(kind: str, source: Any, tokens: TokenBytes, add_bytes: Callable[[int], None]) -> SharedMasks | None:
    """The states of a grammar; None where they cannot be told. source: the text, of "json_schema"
    the closed schema, of "choice" the texts, of "structural_tag" the format. JSON has no free
    whitespace."""
    language = Language(max_size=MAX_SIZE)
    try:
        if kind == "json_schema":
            root = read_schema(language, source, 0)
        elif kind == "regex":
            root = read(language, source)
        elif kind == "choice":
            root = literals(language, source)
        elif kind == "structural_tag":
            root = read_tags(language, source, tokens.special_ids)
        else:
            return None
    except (UnsupportedSyntaxError, RecursionError):
        return None
    return SharedMasks(language, root, tokens, add_bytes) if language.num_nodes <= MAX_NODES else None
