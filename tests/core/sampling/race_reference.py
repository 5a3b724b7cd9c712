"""The Gumbel race by its definition in float64, one token after the other."""

from __future__ import annotations

import math

import numpy as np
import torch

GROUP = 64
MASK = 0xFFFF_FFFF


def hash_word(key: int, index: int) -> int:
    x = (index * 0x9E3779B9 ^ key) & MASK
    x ^= x >> 16
    x = x * 0x21F0AAAD & MASK
    x ^= x >> 15
    x ^= key >> 32 & MASK
    x = x * 0x735A2D97 & MASK
    return x ^ x >> 15


def noise_of(key: int, column: int) -> float:
    """log2(E) of a token."""
    group = column // GROUP
    minimum = -math.log1p(-(hash_word(key, -1 - 2 * group) + 0.5) / 2**32) / math.log(2.0) / GROUP
    is_leader = hash_word(key, -2 - 2 * group) >> 26 == column % GROUP
    own = 0.0 if is_leader else -math.log2(((hash_word(key, column) >> 9) + 0.5) / 2**23)
    return math.log2(minimum + own)


def winners(weights: torch.Tensor | np.ndarray, key: int, within: float = 3e-5) -> list[int]:
    """The tokens whose score is the best or `within` of it; the first is the best. weights:
    [vocab], 0 where a token may not be drawn."""
    values = np.asarray(weights, dtype=np.float64)
    allowed = np.flatnonzero(values).tolist()
    scores = {column: math.log2(values[column]) - noise_of(key, column) for column in allowed}
    ranked = sorted(allowed, key=lambda column: -scores[column])
    return [column for column in ranked if scores[column] >= scores[ranked[0]] - within]
