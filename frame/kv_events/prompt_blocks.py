"""Which blocks of the prefix cache a prompt became, as a header that a server sends to the router
of its fleet: the router then finds in KV events who holds them, and needs no tokenizer.

The header has the prompt's tokens, the tokens between two of the hashes, and the hashes. Used by
the HTTP server and the router. Must not know a request.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from frame.kv_events.cache_events import hash_block, hash_root

MAX_HASHED = 2048  # blocks of a prompt, which take about 4 ms
MAX_TOLD = 256  # hashes; of a longer prompt, those of each second block, or fourth, and so on
UNKNOWN = b"0"  # the server cannot tell


class PromptBlocks(NamedTuple):
    """num_tokens: of the prompt; stride: tokens between two hashes, which follow each other."""

    num_tokens: int
    stride: int
    hashes: list[int]


def tell_blocks(prompt: Sequence[int], namespace: str, page_size: int) -> bytes:
    """The header of a prompt without media or an adapter."""
    count, step = min(len(prompt) // page_size, MAX_HASHED), 1
    while count // step > MAX_TOLD:
        step *= 2
    parent, told = hash_root(namespace), bytearray()
    for number, block in enumerate(np.array(prompt[: count * page_size], np.int32).reshape(count, page_size), 1):
        parent = hash_block(parent, block)
        if number % step == 0:
            told += parent.to_bytes(8)
    return b"%d.%d.%s" % (len(prompt), step * page_size, urlsafe_b64encode(told))


def read_blocks(value: bytes) -> PromptBlocks | None:
    """The content of a header; None: the server cannot tell. Raises ValueError."""
    if value == UNKNOWN:
        return None
    num_tokens, stride, text = value.split(b".")
    told = urlsafe_b64decode(text)
    if len(told) % 8 or len(told) > 8 * MAX_TOLD or not 0 < int(num_tokens) < 1 << 31 or not 0 < int(stride) < 1 << 31:
        raise ValueError("the numbers are out of range")
    return PromptBlocks(int(num_tokens), int(stride), [int.from_bytes(told[at : at + 8]) for at in range(0, len(told), 8)])
