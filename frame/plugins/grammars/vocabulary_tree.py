"""A vocabulary as a tree of bytes in arrays, so that an automaton is run over all its tokens at once, level by level. Knows no grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LONGEST = 256  # bytes; longer tokens are in no mask


@dataclass(frozen=True, slots=True)
class Level:
    """The tree's nodes at one depth, and the tokens that end there."""

    parent: np.ndarray  # intp [nodes]; in the level above
    byte: np.ndarray  # intp [nodes]
    tokens: np.ndarray  # intp [tokens]
    token_nodes: np.ndarray  # intp [tokens]


class VocabularyTree:
    """`texts[i]` is token i's bytes; tokens without any are in no mask."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self.words = -(-len(texts) // 32)
        self.levels: list[Level] = []
        tokens = np.array(sorted((i for i, text in enumerate(texts) if 0 < len(text) <= LONGEST), key=texts.__getitem__), np.intp)
        lengths = np.array([len(texts[i]) for i in tokens.tolist()], np.intp)
        self.longest = int(lengths.max(initial=0))
        flat = np.frombuffer(b"".join(texts[i] for i in tokens.tolist()), np.uint8)
        starts = np.cumsum(lengths) - lengths
        above = np.zeros(len(tokens), np.intp)  # each token's node in the level above
        for depth in range(self.longest):
            goes_on = lengths > depth
            tokens, lengths, starts, above = tokens[goes_on], lengths[goes_on], starts[goes_on], above[goes_on]
            byte = flat[starts + depth].astype(np.intp)
            is_new = np.ones(len(tokens), np.bool_)  # tokens are sorted, so those of one node are neighbours
            is_new[1:] = (above[1:] != above[:-1]) | (byte[1:] != byte[:-1])
            nodes, ends = np.cumsum(is_new) - 1, lengths == depth + 1
            self.levels.append(Level(above[is_new], byte[is_new], tokens[ends], nodes[ends]))
            above = nodes

    def mask(self, start: int, step: Callable[[np.ndarray], np.ndarray], also: Sequence[int] = ()) -> np.ndarray:
        """The bits of the tokens that an automaton can take, int32 [words]. State 0 is the end of all, `start` is where it stands; `step`
        gives the states after pairs of state and byte, 256 * state + byte, both intp [n]. `also` are further tokens."""
        allowed = np.zeros(32 * self.words, np.uint8)
        states = np.array([start], np.intp)
        for level in self.levels:
            states = step(states.take(level.parent) * 256 + level.byte)
            if not states.any():
                break
            allowed[level.tokens] = states.take(level.token_nodes) > 0
        allowed[list(also)] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)
