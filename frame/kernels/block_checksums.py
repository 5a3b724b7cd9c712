# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Checksums of blocks in device memory, by which KV tiers check what was moved between devices.
Must not know a tier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SIZE, _PARTS = 2048, 16  # words of an iteration of a program; programs of a block


@triton.jit
def _checksum_kernel(addresses, sums, num_words, FIRST: tl.constexpr, SECOND: tl.constexpr, SIZE: tl.constexpr):
    """Grid: (blocks, parts of a block)."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    block = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int64))
    total = tl.zeros((SIZE,), tl.int64)
    for start in range(part * SIZE, num_words, parts * SIZE):
        places = start + tl.arange(0, SIZE)
        value = tl.load(block + places, mask=places < num_words, other=0) ^ ((places.to(tl.int64) + 1) * FIRST)
        value = (value ^ (value >> 31)) * SECOND
        total += tl.where(places < num_words, value ^ (value >> 29), 0)
    tl.store(sums + tl.program_id(0) * parts + part, tl.sum(total))


def sum_blocks(addresses: torch.Tensor, num_words: int, first: int, second: int) -> torch.Tensor:
    """The checksum of each block of `num_words` int64 at the addresses, int64 [n] -> int64 [n]: the
    sum of all words, each mixed with its place by the odd factors `first` and `second`."""
    sums = torch.empty((len(addresses), _PARTS), dtype=torch.int64, device=addresses.device)
    _checksum_kernel[len(addresses), _PARTS](addresses, sums, num_words, FIRST=first, SECOND=second, SIZE=_SIZE)
    return sums.sum(1)
