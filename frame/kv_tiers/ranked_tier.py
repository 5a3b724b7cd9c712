"""Tiers and the mover of several ranks as those of one: `RankedTier` and `RankedMover` pass each
call on to the ranks of an attention group, and a job ends when all of them have ended it.

Rank 0 decides by its own tier. Ranks evict on their own, so another rank may lack a block that rank
0 has: then the load is short, and the block is not matched until it has been stored anew. Used by
`frame.kv_tiers.build`. Must not know the prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from frame.core.interfaces.kv_tier import BlockMover, KVTier, KVTierResult
from frame.core.interfaces.runner import TierOrder

MAX_LACKING = 1 << 16  # keys of blocks that a rank lacks, of which note is kept; about 8 MB
NO_BLOCK = torch.empty(0, dtype=torch.uint8)  # the buffer of a rank that is not this one


class Replies(Protocol):
    """The replies of all ranks to an order."""

    @property
    def problems(self) -> Sequence[str]: ...
    @property
    def num_blocks(self) -> int | None: ...


class OrderSender(Protocol):
    """Sends orders to the other ranks. `frame.parallel.rank_channels.BatchSender` documents the
    methods."""

    def send_order(self, order: TierOrder) -> None: ...
    def await_replies(self, ranks: Iterable[int]) -> int: ...
    def receive_replies(self) -> None: ...
    def take_replies(self, number: int) -> Replies | None: ...
    def forget_replies(self, number: int) -> None: ...


class GroupRanks:
    """The other ranks of attention group `group`, `ranks`."""

    def __init__(self, sender: OrderSender, group: int, ranks: Sequence[int]) -> None:
        self._sender, self.group, self._ranks = sender, group, ranks

    def send_order(self, order: TierOrder) -> None:
        self._sender.send_order(order)

    def start_order(self, order: TierOrder) -> int:
        """Send an order that has replies. -> its number."""
        self._sender.send_order(order)
        return self._sender.await_replies(self._ranks)

    def take_replies(self, number: int) -> Replies | None:
        """See `OrderSender`."""
        return self._sender.take_replies(number)

    def receive_replies(self) -> None:
        """See `OrderSender`."""
        self._sender.receive_replies()

    def forget_replies(self, number: int) -> None:
        """See `OrderSender`."""
        self._sender.forget_replies(number)


@dataclass(slots=True)
class _Job:
    """A load, or a store."""

    keys: Sequence[bytes]
    is_store: bool
    number: int | None = None  # of the order whose replies are awaited; None: there is none
    replies: Replies | None = None
    result: KVTierResult | None = None  # of this rank


class RankedTier(KVTier):
    """Tier number `number` of a group. `scratch`: the buffer of a block that this rank has and
    others may lack, whose contents nothing reads."""

    def __init__(self, tier: KVTier, number: int, ranks: GroupRanks, scratch: torch.Tensor = NO_BLOCK) -> None:
        self._tier, self._number, self._ranks, self._scratch = tier, number, ranks, scratch
        self._jobs: dict[int, _Job] = {}
        self._lacking: OrderedDict[bytes, None] = OrderedDict()  # keys that the tier may have and another rank lacks

    def match(self, keys: Sequence[bytes]) -> int:
        count = self._tier.match(keys)
        if not self._lacking:
            return count
        return next((place for place, key in enumerate(keys[:count]) if key in self._lacking), count)

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        buffers = self._tier.load(job, keys)
        if buffers is not None:
            order = TierOrder(self._ranks.group, job, "load", tier=self._number, keys=list(keys))
            self._jobs[job] = _Job(keys, is_store=False, number=self._ranks.start_order(order))
        return buffers

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        buffers = self._tier.store(job, keys)
        if buffers is None:
            return None
        self._ranks.send_order(TierOrder(self._ranks.group, job, "store", tier=self._number, keys=list(keys)))
        self._jobs[job] = _Job(keys, is_store=True)
        return [self._scratch if buffer is None else buffer for buffer in buffers]

    def finish(self, job: int, *, commit: bool = True) -> None:
        self._tier.finish(job, commit=commit)
        entry = self._jobs[job]
        if entry.is_store and commit:
            entry.number = self._ranks.start_order(TierOrder(self._ranks.group, job, "commit", tier=self._number))
            return
        self._ranks.send_order(TierOrder(self._ranks.group, job, "drop", tier=self._number))
        if entry.number is not None:
            self._ranks.forget_replies(entry.number)
        del self._jobs[job]

    def poll(self) -> list[KVTierResult]:
        for result in self._tier.poll():
            if (entry := self._jobs.get(result.job)) is not None:
                entry.result = result
        if not self._jobs:
            return []
        self._ranks.receive_replies()
        results = []
        for job, entry in list(self._jobs.items()):
            if entry.number is not None and (replies := self._ranks.take_replies(entry.number)) is not None:
                entry.number, entry.replies = None, replies
            if entry.replies is not None and entry.result is not None:
                results.append(self._join_results(entry, entry.result, entry.replies))
                entry.replies = None
                if entry.is_store:
                    del self._jobs[job]
        return results

    def clear(self) -> None:
        self._tier.clear()
        self._lacking.clear()
        self._ranks.send_order(TierOrder(self._ranks.group, 0, "clear", tier=self._number))

    def close(self) -> None:
        self._tier.close()

    def _join_results(self, job: _Job, result: KVTierResult, replies: Replies) -> KVTierResult:
        """The leading blocks that all ranks have loaded or stored."""
        others = replies.num_blocks or 0
        count = min(result.num_blocks, max(0, others))
        if job.is_store:
            for key in job.keys[:count] if self._lacking else ():
                self._lacking.pop(key, None)
            self._lacking.update(dict.fromkeys(job.keys[count:]))
        elif others >= 0:
            self._lacking.update(dict.fromkeys(job.keys[count : count + 1]))
        while len(self._lacking) > MAX_LACKING:
            self._lacking.popitem(last=False)
        return KVTierResult(result.job, count, result.error or next(iter(replies.problems), ""))


class RankedMover:
    """Copies the blocks of a job on all ranks of a group; implements `BlockMover`."""

    def __init__(self, mover: BlockMover, ranks: GroupRanks) -> None:
        self._mover, self._ranks = mover, ranks
        self._numbers: dict[int, int] = {}  # by job: of the order whose replies are awaited
        self._copied: set[int] = set()  # jobs that this rank has ended

    @property
    def block_bytes(self) -> int:
        """See `BlockMover.block_bytes`: of this rank."""
        return self._mover.block_bytes

    def load(self, job: int, pages: np.ndarray, blocks: Sequence[torch.Tensor]) -> None:
        """See `BlockMover.load`. The blocks are the first of those that the job's tiers load, in
        the order of the tiers."""
        self._mover.load(job, pages, blocks)
        self._numbers[job] = self._ranks.start_order(TierOrder(self._ranks.group, job, "copy_to_pages", pages=pages))

    def store(self, job: int, pages: np.ndarray, blocks: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """See `BlockMover.store`. Of each tier, the blocks that are not None are all of the job's,
        in succession."""
        self._mover.store(job, pages, blocks)
        spans = []
        for row in blocks:
            places = [place for place, block in enumerate(row) if block is not None]
            spans.append((places[0], places[-1] + 1))
        self._numbers[job] = self._ranks.start_order(TierOrder(self._ranks.group, job, "copy_from_pages", pages=pages, spans=spans))

    def poll(self) -> list[int]:
        """See `BlockMover.poll`."""
        self._copied.update(self._mover.poll())
        if not self._numbers:
            return []
        self._ranks.receive_replies()
        ended = [job for job, number in self._numbers.items() if job in self._copied and self._ranks.take_replies(number) is not None]
        for job in ended:
            del self._numbers[job]
            self._copied.discard(job)
        return ended

    def close(self) -> None:
        """See `BlockMover.close`."""
        self._mover.close()


# groups of other ranks ----------------------------------------------------------------------------


class KeyTier(KVTier):
    """Stands for the tier of this rank where this rank is not in the group: it has the keys of
    blocks, and no block. `max_blocks`: keys; the least recently used is dropped. `max_match`:
    blocks for which a load has buffers. `shared`: this rank's tier in the same place, where ranks
    of all groups read each other's blocks."""

    def __init__(self, max_blocks: int, max_match: int, shared: KVTier | None = None) -> None:
        self._max_blocks, self._max_match, self._shared = max_blocks, max_match, shared
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._jobs: dict[int, Sequence[bytes]] = {}  # stores
        self._ended: list[KVTierResult] = []

    def match(self, keys: Sequence[bytes]) -> int:
        keys = keys[: self._max_match]
        count = next((place for place, key in enumerate(keys) if key not in self._keys), len(keys))
        return count if self._shared is None or count == len(keys) else max(count, self._shared.match(keys))

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        self._touch(keys)
        self._ended.append(KVTierResult(job, len(keys)))
        return [NO_BLOCK] * len(keys)

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        self._jobs[job] = keys
        return [NO_BLOCK] * len(keys)

    def finish(self, job: int, *, commit: bool = True) -> None:
        keys = self._jobs.pop(job, ())
        if commit and keys:
            self._keys.update(dict.fromkeys(keys))
            self._touch(keys)
            while len(self._keys) > self._max_blocks:
                self._keys.popitem(last=False)
            self._ended.append(KVTierResult(job, len(keys)))

    def poll(self) -> list[KVTierResult]:
        ended, self._ended = self._ended, []
        return ended

    def clear(self) -> None:
        self._keys.clear()

    def close(self) -> None:
        pass

    def _touch(self, keys: Sequence[bytes]) -> None:
        """The first is the most recently used."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)


class NoMover:
    """The mover of this rank where this rank is not in the group; implements `BlockMover`."""

    block_bytes = 0

    def __init__(self) -> None:
        self._ended: list[int] = []

    def load(self, job: int, pages: np.ndarray, blocks: Sequence[torch.Tensor]) -> None:
        """See `BlockMover.load`."""
        self._ended.append(job)

    def store(self, job: int, pages: np.ndarray, blocks: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """See `BlockMover.store`."""
        self._ended.append(job)

    def poll(self) -> list[int]:
        """See `BlockMover.poll`."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """See `BlockMover.close`."""
