"""Which blocks of the prefix cache a prompt became, as a header that a server sends to the router
of its fleet: the router then finds in KV events who holds them, and needs no tokenizer.

The header has the prompt's tokens, the tokens between two of the hashes, and the hashes. Used by
the HTTP server and the router. Must not know a request.
"""

from __future__ import annotations

from array import array
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from frame.kv_events.cache_events import hash_bytes, hash_root

MAX_HASHED = 2048  # blocks of a prompt, which take about 3 ms
TURN = 128  # blocks of a turn
MAX_TOLD = 256  # hashes; of a longer prompt, those of each second block, or fourth, and so on
UNKNOWN = b"0"  # the server cannot tell


class PromptBlocks(NamedTuple):
    """num_tokens: of the prompt; stride: tokens between two hashes, which follow each other."""

    num_tokens: int
    stride: int
    hashes: list[int]


def tell_blocks(prompt: Sequence[int], namespace: str, page_size: int) -> bytes:
    """The header of a prompt without media or an adapter."""
    *_, told = tell_in_turns(prompt, namespace, page_size)
    return told


def tell_in_turns(prompt: Sequence[int], namespace: str, page_size: int) -> Iterator[bytes]:
    """The same in turns of about 0.2 ms, so that an event loop serves others between them. Yields
    b"" after a turn, at last the header."""
    count, step = min(len(prompt) // page_size, MAX_HASHED), 1
    while count // step > MAX_TOLD:
        step *= 2
    parent, told, size = hash_root(namespace), bytearray(), 4 * page_size
    for first in range(0, count, TURN):
        end = min(first + TURN, count)
        data = array("i", prompt[first * page_size : end * page_size]).tobytes()
        for number in range(first, end):
            start = (number - first) * size
            parent = hash_bytes(parent, data[start : start + size])
            if (number + 1) % step == 0:
                told += parent.to_bytes(8)
        if end < count:
            yield b""
    yield b"%d.%d.%s" % (len(prompt), step * page_size, urlsafe_b64encode(told))


def read_blocks(value: bytes) -> PromptBlocks | None:
    """The content of a header; None: the server cannot tell. Raises ValueError."""
    if value == UNKNOWN:
        return None
    num_tokens, stride, text = value.split(b".")
    told = urlsafe_b64decode(text)
    if len(told) % 8 or len(told) > 8 * MAX_TOLD or not 0 < int(num_tokens) < 1 << 31 or not 0 < int(stride) < 1 << 31:
        raise ValueError("the numbers are out of range")
    return PromptBlocks(int(num_tokens), int(stride), [int.from_bytes(told[at : at + 8]) for at in range(0, len(told), 8)])
