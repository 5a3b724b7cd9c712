"""`RequestTransfers`: the blocks of prompts that a prefill server keeps for decode servers, and
those that a decode server expects.

Used by `TierController`. Must not know how a tier reaches another server.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import msgspec

from frame.core.interfaces.kv_tier import KVTier, SupportsTransfers
from frame.core.scheduling.request import Request
from frame.kv_tiers.block_keys import BlockKeys, RequestKeys

log = logging.getLogger(__name__)

HASHED_BLOCKS = 8192  # most blocks that one call hashes, since a step waits meanwhile


class RequestTransfers:
    """Passes the transfers of requests on to the tier that has them."""

    def __init__(self, tiers: Sequence[KVTier], keys: RequestKeys, clock: Callable[[], float]) -> None:
        self._tier = next((tier for tier in tiers if isinstance(tier, SupportsTransfers)), None)
        self._keys, self._clock = keys, clock
        self._closed_at = -math.inf  # seconds; earlier requests expect no blocks: their weights may have been others
        self._expected: dict[str, str] = {}  # request id -> lease
        self._has_warned = False  # of a peer with smaller pages

    @property
    def num_open(self) -> int:
        return 0 if self._tier is None else self._tier.num_transfers

    def expect_blocks(self, request: Request) -> None:
        """A waiting request is about to be looked up: its blocks may be at a peer."""
        transfer = request.transfer
        if transfer is None or self._tier is None or not transfer.host or request.rid in self._expected:
            return
        if request.arrival <= self._closed_at:
            request.transfer = None
            return
        tokens = request.cache_keys(request.all_tokens())
        chain = self._keys.extend(request, tokens, HASHED_BLOCKS)
        if len(chain.keys) >= transfer.num_blocks:
            self._expected[request.rid] = transfer.lease
            self._tier.open_transfer(transfer, chain.keys[: transfer.num_blocks])
        elif len(chain.keys) == len(tokens) // self._keys.page_size:
            request.transfer = None
            if not self._has_warned:
                log.warning(
                    "a prefill server has %d blocks of a prompt of %d blocks of %d tokens, which is computed here; "
                    "start both with the same cache.page_size",
                    transfer.num_blocks, len(chain.keys), self._keys.page_size,
                )  # fmt: skip
                self._has_warned = True

    def keep_blocks(self, request: Request, chain: BlockKeys) -> None:
        """Blocks of a request are about to be offered to the tiers: once they are those of the
        whole prompt, a peer may read them. Those that a tier has are kept before the store of the
        others, which would evict them."""
        transfer = request.transfer
        if transfer is None or self._tier is None or transfer.host or len(chain.keys) < transfer.num_blocks:
            return
        request.transfer = None
        self._tier.open_transfer(msgspec.structs.replace(transfer, tenant=request.tenant), chain.keys[: transfer.num_blocks])

    def forget(self, request: Request) -> None:
        """The request starts or ends, and expects no blocks any more."""
        lease = self._expected.pop(request.rid, None)
        if lease is not None and self._tier is not None:
            self._tier.close_transfer(lease)
            request.transfer = None

    def close_all(self) -> None:
        """No block that is stored now may be handed out or read any more."""
        self._expected.clear()
        self._closed_at = self._clock()
        if self._tier is not None:
            self._tier.close_transfers()


def describe_transfers(tier: KVTier) -> dict[str, float]:
    """A tier's gauges and counters of transfers."""
    return tier.describe_transfers() if isinstance(tier, SupportsTransfers) else {}
