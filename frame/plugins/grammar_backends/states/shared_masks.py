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
from functools import cached_property
from typing import Any

import numpy as np

from frame.interfaces.known_masks import find_only_token
from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.regular_syntax import literals, read
from frame.plugins.grammar_backends.states.schema_language import read_schema
from frame.plugins.grammar_backends.states.tag_language import read_tags, write_special

MASK_BYTES = 16 << 20  # of the masks of one grammar; the oldest are dropped
FEW_WORDS = 32  # of a mask
MAX_NODES = 4000  # of a grammar whose states are followed
MAX_DERIVED = 2000  # derivatives of one token
MAX_STATES = 20_000  # that are kept
MAX_FOLLOWERS = 30_000  # pairs of a state and what may follow it, that are kept
MAX_BYTE_SETS = 32  # of a vocabulary, for which the lengths of all tokens are kept; a byte a token each
MIN_FOLLOWED = 2000  # tokens, of which half must lead to known states
MAX_SIZE = 20_000  # of a language's caches
ENTRY_BYTES = 300  # of an entry of them
_NO_WORDS = np.empty(0, np.int32)
Key = tuple[Node, int]  # a state, and the token before it where it matters


class TokenBytes:
    """The bytes of a tokenizer's tokens. size: of the vocabulary of the model, which may be larger.
    `max_length`: of the longest token, in bytes."""

    def __init__(self, tokenizer: Any, vocabulary: dict[str, int], special_ids: Mapping[str, int], size: int) -> None:
        self.special_ids = special_ids
        self.max_length = max((len(text.encode()) for text in vocabulary), default=1)  # a byte-level token has a character a byte
        self._tokenizer = tokenizer
        self._special = frozenset(special_ids.values())
        self._texts: dict[int, bytes] = {}
        self._known, self._size = frozenset(vocabulary.values()), size
        self._lengths: dict[bytes, bytes] = {}  # by set

    @cached_property
    def _join(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of all tokens one after another, and where each begins, with the end."""
        texts = [self._read(token) if token in self._known else b"" for token in range(self._size)]
        sizes = np.array([len(text) for text in texts], np.int64)
        return np.frombuffer(b"".join(texts), np.uint8), np.concatenate(([0], np.cumsum(sizes)))

    def find_lengths(self, members: bytes) -> bytes | None:
        """By token: its length if all of its bytes are in a set, else 0, as for one of more than
        255 bytes. None: the set is empty, or there are too many sets."""
        lengths = self._lengths.get(members)
        if lengths is not None or len(self._lengths) >= MAX_BYTE_SETS or not members:
            return lengths
        joined, starts = self._join
        is_member = np.zeros(256, np.int64)
        is_member[list(members)] = 1
        counts = np.diff(np.concatenate(([0], np.cumsum(is_member[joined])))[starts])
        sizes = np.diff(starts)
        lengths = self._lengths[members] = np.where((counts == sizes) & (sizes < 256), sizes, 0).astype(np.uint8).tobytes()
        return lengths

    def __getitem__(self, token: int) -> bytes:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._read(token)
        return text

    def _read(self, token: int) -> bytes:
        is_special = self._tokenizer.is_special_token(token) or token in self._special
        return write_special(token) if is_special else bytes(self._tokenizer.decode_bytes([token]))


class SharedMask:
    """The mask of a state, int32 [words], whether an end token may come there, and whether nothing
    else may. Of a mask with few words the others are not kept. `only_token`: the token, where it
    allows just one. `states`: those that refer to it."""

    __slots__ = ("_few", "_words", "is_accepting", "is_finished", "num_bytes", "only_token", "states")

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
        self.only_token = find_only_token(mask)
        self.states: list[State] = []

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


class State:
    """A state of an output: its language, and the token before it where its mask depends on that;
    -1: none. mask: None: not known. followers: the state after a token, by the token; by the
    negative length of the token, where `lengths` has one, which counts from 1 to `max_length`: a
    text within a string whose length is bounded."""

    __slots__ = ("followers", "key", "last", "lengths", "mask", "max_length", "node")

    def __init__(self, node: Node, key: Key, lengths: bytes | None, max_length: int) -> None:
        self.node, self.key, self.last = node, key, key[1]
        self.lengths, self.max_length = lengths, max_length
        self.mask: SharedMask | None = None
        self.followers: dict[int, State] = {}

    def find_class(self, token: int) -> int:
        """What tokens that lead to the same state have in common: see `followers`."""
        length = self.lengths[token] if self.lengths is not None else 0
        return -length if 0 < length <= self.max_length else token

    def find_follower(self, token: int) -> State | None:
        """The state after a token, if it is kept."""
        return self.followers.get(self.find_class(token)) or self.followers.get(token)


class SharedMasks:
    """The states of one grammar and their masks. `add_bytes` is called with the bytes that are
    added, or less than 0. `is_usable`: False once the states take too much work. `num_followed`:
    tokens since the last time that this was told."""

    def __init__(self, language: Language, root: Node, tokens: TokenBytes, add_bytes: Callable[[int], None]) -> None:
        self.root = root
        self.is_usable = True
        self.num_followed = 0
        self._language, self._tokens, self._add_bytes = language, tokens, add_bytes
        self._masks: dict[Key, SharedMask] = {}  # oldest first
        self._forced: set[Node] = set()  # states where a single text may follow
        self._keys: dict[Node, Node] = {}  # by state: one for all states that allow the same tokens
        self._states: dict[tuple[Node, int], State] = {}
        self._num_added = self._num_bytes = self._num_entries = self._num_followers = 0
        self._lock = threading.Lock()  # guards `_masks` and the sizes: masks are added by several threads

    def follow(self, state: State, token: int) -> State | None:
        """The state after a token; None: it is not known."""
        after = state.find_follower(token)
        if after is not None and (after.last != -1 or after.key[0] not in self._forced):
            self.num_followed += 1
            self.find_mask(after)
            return after
        node = self._follow_node(state.node, token)
        if node is None:
            return None
        after = self.find_state(node, token)
        if after.last == -1:
            state.followers[state.find_class(token)] = after
        else:
            state.followers.pop(state.find_class(token), None)
            state.followers[token] = after
        self._num_followers += 1
        if self._num_followers > MAX_FOLLOWERS:
            self._drop_followers()
        return after

    def _follow_node(self, node: Node, token: int) -> Node | None:
        text, language = self._tokens[token], self._language
        before = language.num_derived
        if language.forget():
            self._clear()
        try:
            after = language.follow(node, text)
        except RecursionError:
            self.is_usable = False
            return None
        self.num_followed += 1
        if self.num_followed >= MIN_FOLLOWED:
            self.is_usable = 2 * self._num_added < self.num_followed
            self.num_followed = self._num_added = 0
        self.is_usable &= language.num_derived - before <= MAX_DERIVED
        return after if self.is_usable and text and after is not language.none else None

    def find_state(self, node: Node, last: int) -> State:
        """The state of an output. last: the token before it; -1: none."""
        clamped = self._keys.get(node)
        if clamped is None:
            if len(self._keys) > MAX_STATES:
                self._keys.clear()
            clamped = self._keys[node] = self._language.clamp(node, self._tokens.max_length)
        key = clamped, last if clamped in self._forced else -1
        state = self._states.get((node, key[1]))
        if state is None:
            if len(self._states) > MAX_STATES:
                self._drop_states()
            members, max_length = self._language.find_passed(node)
            state = self._states[node, key[1]] = State(node, key, self._tokens.find_lengths(members), max_length)
        if state.mask is None:
            self.find_mask(state)
        return state

    def find_mask(self, state: State) -> SharedMask | None:
        """The mask of a state, which another request may have added. None: it is not known."""
        if state.mask is None:
            with self._lock:
                state.mask = mask = self._masks.get(state.key)
                if mask is not None:
                    mask.states.append(state)
        return state.mask

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
            with self._lock:
                if (earlier := self._masks.pop((state, -1), None)) is not None:
                    self._count(-self._forget_mask(earlier))
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
                self._count(-self._forget_mask(self._masks.pop(next(iter(self._masks)))))

    @staticmethod
    def _forget_mask(mask: SharedMask) -> int:
        """Take a mask from its states. -> its bytes."""
        for state in mask.states:
            state.mask = None
        mask.states.clear()
        return mask.num_bytes

    def _drop_followers(self) -> None:
        for state in list(self._states.values()):  # other threads add states
            state.followers.clear()
        self._num_followers = 0

    def _drop_states(self) -> None:
        """Outputs keep the states that they are in, without what is known of them."""
        self._drop_followers()
        with self._lock:
            for mask in self._masks.values():
                self._forget_mask(mask)
        self._states = {}

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        size = self._language.size + len(self._states) + self._num_followers
        self._add_bytes(num_bytes + ENTRY_BYTES * (size - self._num_entries))
        self._num_entries = size

    def _clear(self) -> None:
        self._drop_states()
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
