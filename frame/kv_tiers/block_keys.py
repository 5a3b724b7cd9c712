"""Keys of KV blocks (vLLM: block hashes): a hash chain over the cache keys of a sequence, one key
for each page.

Used by `TierController`. `RequestKeys` keeps the chains of requests, so that each block is hashed
once although a request is looked up when it waits and stored when its prompt and its output are
complete. Must not know pages or tiers.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from frame.core.scheduling.request import Request, RequestStatus

KEY_BYTES = 32
MAX_BLOCKS = 1 << 18  # keys that are kept for all requests together: about 20 MB
_DTYPE = np.dtype("<i4")
_PROCESS = os.urandom(16)  # the name of this process


class BlockKeys:
    """The keys of one sequence. Key i is the hash of key i - 1 and the cache keys of block i, so
    that equal keys are equal prefixes. `num_public`: leading blocks whose cache keys have the same
    meaning in every process, which negative ones have not: the keys of later blocks are this
    process's own. `BlockStores` sets the other counters:
    leading blocks that were offered to it, that it may store, and that no tier lacks any more; the
    last blocks before `num_refused` found no room and have been counted."""

    __slots__ = ("_page_size", "_root", "keys", "num_allowed", "num_offered", "num_public", "num_refused", "num_stored")

    def __init__(self, root: bytes, page_size: int) -> None:
        self.keys: list[bytes] = []
        self.num_public = self.num_offered = self.num_allowed = self.num_stored = self.num_refused = 0
        self._root, self._page_size = root, page_size

    def extend(self, cache_keys: np.ndarray, max_blocks: int | None = None) -> int:
        """Hash the whole blocks of a sequence, int32 [tokens], which begins as in earlier calls; at
        most `max_blocks` new ones. -> how many were new."""
        size, start = self._page_size, len(self.keys)
        end = len(cache_keys) // size
        if max_blocks is not None:
            end = min(end, start + max_blocks)
        if end <= start:
            return 0
        new = np.ascontiguousarray(cache_keys[start * size : end * size], _DTYPE)
        if self.num_public == start:
            negative = new < 0
            first = int(negative.argmax())
            self.num_public = start + first // size if negative[first] else end
        data, width = new.tobytes(), size * _DTYPE.itemsize
        key = self.keys[-1] if start else self._root
        for number, at in enumerate(range(0, len(data), width), start):
            if number == self.num_public:
                key += _PROCESS
            key = blake2b(key + data[at : at + width], digest_size=KEY_BYTES).digest()
            self.keys.append(key)
        return end - start


class RequestKeys:
    """The chains of requests by id. The least recently used are dropped beyond `max_blocks` keys,
    and hashed again when they are needed.

    A root is keyed with `secret`, so that keys cannot be computed without it. It contains
    `identity` (what the blocks hold beside their key: model, weights, geometry) and the namespace.
    """

    def __init__(self, secret: bytes, identity: str, page_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._secret, self._identity, self._page_size, self._max_blocks = secret, identity, page_size, max_blocks
        self._generation = b""
        self._chains: OrderedDict[str, BlockKeys] = OrderedDict()
        self._num_blocks = 0

    @property
    def page_size(self) -> int:
        """Tokens of a block."""
        return self._page_size

    def extend(self, request: Request, cache_keys: np.ndarray, max_blocks: int | None = None) -> BlockKeys:
        """The request's chain, after `BlockKeys.extend`."""
        chain = self._chains.get(request.rid)
        if chain is None:
            chain = self._chains[request.rid] = BlockKeys(self.make_root(request.namespace), self._page_size)
        self._chains.move_to_end(request.rid)
        self._num_blocks += chain.extend(cache_keys, max_blocks)
        while self._num_blocks > self._max_blocks and len(self._chains) > 1:
            self._num_blocks -= len(self._chains.popitem(last=False)[1].keys)
        return chain

    def forget(self, request: Request) -> None:
        """Drop the chain of a request that has ended; one that runs is stored later."""
        if request.state == RequestStatus.FINISHED and (chain := self._chains.pop(request.rid, None)) is not None:
            self._num_blocks -= len(chain.keys)

    def make_root(self, namespace: str) -> bytes:
        """What the chains of a namespace begin with."""
        fields = (self._identity.encode(), self._generation, namespace.encode())
        sizes = np.array([len(each) for each in fields], "<u8").tobytes()  # no two lists of fields are the same bytes
        return blake2b(sizes + b"".join(fields), digest_size=KEY_BYTES, key=self._secret).digest()

    def renew_roots(self) -> None:
        """Make all earlier keys unreachable. The new roots are random: those of another run must
        not be reached either, as its weights may have been others."""
        self._generation = os.urandom(16)
        self._chains.clear()
        self._num_blocks = 0
