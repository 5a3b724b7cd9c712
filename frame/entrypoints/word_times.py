"""The times of words in speech: tokens to positions of the audio by dynamic time warping, tokens to
words as in transformers' Whisper pipeline.

Used by `frame.entrypoints.speech`. Must not know a model, a request or an audio file; imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

NO_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages that do not put spaces between words
_OPENING = "\"'“¡¿([{-"  # belongs to the word after it
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # belongs to the word before it
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_PARTIAL = "\ufffd"  # the text of tokens that end within a character


class Word(NamedTuple):
    """A word with its punctuation and the space before it. `start` and `end`: seconds from the
    beginning of the audio."""

    text: str
    start: float
    end: float


class Piece(NamedTuple):
    """A part of a word: its text, and its tokens from index `first` to `last`."""

    text: str
    first: int
    last: int


def find_token_ends(matrix: np.ndarray) -> np.ndarray:
    """The position at which each token ends, int64 [tokens], by the cheapest monotonic path through
    the negative of `matrix`, float32 [tokens, positions].

    Costs are float32 and ties are broken as in transformers, so the path is the same. The cells of
    one antidiagonal depend on the two before it alone, and are computed at once.
    """
    rows, columns = matrix.shape
    width = columns + 1
    values = np.zeros((rows + 1, width))
    values[1:, 1:] = -matrix.astype(np.float64)
    costs = np.full((rows + 1, width), np.inf, np.float32)
    costs[0, 0] = 0
    moves = np.zeros((rows + 1, width), np.uint8)  # to the cell: 0 diagonal, 1 next token, 2 next position
    moves[0, :], moves[:, 0] = 2, 1
    flat_values, flat_costs, flat_moves = values.ravel(), costs.ravel(), moves.ravel()
    with np.errstate(invalid="ignore"):
        for diagonal in range(2, rows + columns + 1):
            first, last = max(1, diagonal - columns), min(rows, diagonal - 1)
            start = first * width + diagonal - first
            stop = start + (last - first) * columns + 1
            both, token, position = (flat_costs[start - back : stop - back : columns] for back in (width + 1, width, 1))
            is_both, is_token = (both < token) & (both < position), (token < both) & (token < position)
            flat_moves[start:stop:columns] = np.where(is_both, 0, np.where(is_token, 1, 2))
            before = np.where(is_both, both, np.where(is_token, token, position))
            flat_costs[start:stop:columns] = flat_values[start:stop:columns] + before
    return _follow(moves)


def _follow(moves: np.ndarray) -> np.ndarray:
    """The first position of each token on the path that ends in the last cell."""
    row, column = moves.shape[0] - 1, moves.shape[1] - 1
    ends = np.zeros(row, np.int64)
    while row > 0 or column > 0:
        if row > 0:
            ends[row - 1] = column - 1
        move = moves[row, column]
        row, column = row - (move != 2), column - (move != 1)
    return ends


def split_words(tokens: Sequence[int], decode: Callable[[list[int]], str], language: str | None) -> list[Piece]:
    """The words of text tokens. language: its code; None: one with spaces. decode: tokens to text,
    with special tokens."""
    pieces = _split_characters(tokens, decode)
    words = pieces if language in NO_SPACES else _join_pieces(pieces)
    return _attach_closing(_attach_opening(words))


def _split_characters(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[Piece]:
    """The shortest runs of tokens that are whole characters."""
    whole, pieces, first, offset = decode(list(tokens)), list[Piece](), 0, 0
    for index in range(len(tokens)):
        text = decode(list(tokens[first : index + 1]))
        place = offset + text.find(_PARTIAL)
        if _PARTIAL not in text or place >= len(whole) or whole[place] == _PARTIAL:
            pieces.append(Piece(text, first, index))
            first, offset = index + 1, offset + len(text)
    return pieces


def _join_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Words by spaces and punctuation."""
    words: list[Piece] = []
    for piece in pieces:
        if not words or piece.text.startswith(" ") or piece.text.strip() in _PUNCTUATION:
            words.append(piece)
        else:
            words[-1] = _join(words[-1], piece)
    return words


def _attach_opening(words: list[Piece]) -> list[Piece]:
    attached: list[Piece] = []  # from the last word to the first
    for word in reversed(words):
        if attached and word.text.startswith(" ") and word.text.strip() in _OPENING:
            attached[-1] = _join(word, attached[-1])
        else:
            attached.append(word)
    return attached[::-1]


def _attach_closing(words: list[Piece]) -> list[Piece]:
    attached: list[Piece] = []
    for word in words:
        if attached and not attached[-1].text.endswith(" ") and word.text in _CLOSING:
            attached[-1] = _join(attached[-1], word)
        else:
            attached.append(word)
    return [word for word in attached if word.text]


def _join(first: Piece, second: Piece) -> Piece:
    return Piece(first.text + second.text, first.first, second.last)
