# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The noise of the Gumbel race as Triton functions: that of `frame.core.sampling.gumbel_race`, bit
for bit in its hash, and to the rounding of float32 in the logarithms.

Noise is kept as the exponential E = exp(-G), in units of ln 2. Used by the kernels that draw.
"""

from __future__ import annotations

import triton
import triton.language as tl

RACE_GROUP = 64  # tokens per group, `gumbel_race.GROUP`
_GROUP = tl.constexpr(RACE_GROUP)
_LEADER_SHIFT = tl.constexpr(32 - RACE_GROUP.bit_length() + 1)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SERIES_BELOW = tl.constexpr(0.0625)  # above, the logarithm of 1 - x is precise enough


@triton.jit
def hash_words(key, index):
    """32 random bits, uint32, of keys int64 and indices int32."""
    x = (index.to(tl.uint32) * 0x9E3779B9) ^ key.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x ^ (key >> 32).to(tl.uint32)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def min_of_group(key, group):
    """The least E of a group's tokens, float32."""
    x = (hash_words(key, -1 - 2 * group).to(tl.float32) + 0.5) * (2.0**-32)
    x = tl.minimum(x, 1.0 - 2.0**-24)  # float32 rounds the last values to 1
    series = x * (1.0 + x * (0.5 + x * (1.0 / 3.0 + x * (0.25 + x * 0.2)))) * _LOG2_E
    return tl.where(x < _SERIES_BELOW, series, -tl.log2(1.0 - x)) * (1.0 / _GROUP)


@triton.jit
def leader_of_group(key, group):
    """The column of the token that has the least E of its group, int32."""
    return group * _GROUP + (hash_words(key, -2 - 2 * group) >> _LEADER_SHIFT).to(tl.int32)


@triton.jit
def noise_of_tokens(key, columns, minimum, leader):
    """log2(E) = -G / ln 2 of tokens, float32. columns: int32. least, leader: of their groups."""
    noise = -tl.log2(((hash_words(key, columns) >> 9).to(tl.float32) + 0.5) * (2.0**-23))
    return tl.log2(minimum + tl.where(columns == leader, 0.0, noise))
