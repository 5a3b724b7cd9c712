"""`TierFollower`: the tiers and the mover of a rank that is not rank 0, which carries out rank 0's
orders.

Used by `frame.parallel.tp_follower`. Must not know the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from frame.core.interfaces.kv_tier import BlockMover, KVTier
from frame.core.interfaces.runner import NO_ROOM, TierOrder, TierReply

if TYPE_CHECKING:
    import torch

_REFUSED = "a rank has no room for blocks of a KV cache tier"


@dataclass(slots=True)
class _Blocks:
    """A job's blocks in one tier."""

    buffers: Sequence[torch.Tensor | None]
    is_refused: bool  # there was no room


class TierFollower:
    """Implements `frame.parallel.tp_follower.OrderedTiers`. Blocks for which a tier has no room are
    not loaded or stored, and the reply says so."""

    def __init__(self, tiers: Sequence[KVTier], mover: BlockMover) -> None:
        self._tiers, self._mover = tiers, mover
        self._jobs: dict[int, dict[int, _Blocks]] = {}  # by job and tier, in the order of rank 0's calls
        self._waiting: dict[tuple[int, int], int] = {}  # by tier and job: the order that waits for the tier's result
        self._copies: dict[int, int] = {}  # by job: the order that waits for the mover
        self._replies: list[TierReply] = []

    @property
    def is_busy(self) -> bool:
        """Whether an order has no reply yet."""
        return bool(self._waiting or self._copies or self._replies)

    def start_order(self, order: TierOrder, number: int) -> None:
        """Begin to carry out rank 0's order `number`."""
        if order.action in ("load", "store"):
            self._start_job(order, number)
        elif order.action in ("commit", "drop"):
            self._finish(order, number)
        elif order.action == "clear":
            self._tiers[order.tier].clear()
        else:
            assert order.pages is not None, "orders of copies have pages"
            self._copies[order.job] = number
            if order.action == "copy_to_pages":
                self._copy_to_pages(order.job, order.pages)
            else:
                self._copy_from_pages(order, order.pages)

    def poll(self) -> list[TierReply]:
        """What has ended since the last call."""
        for index, tier in enumerate(self._tiers):
            for result in tier.poll():
                if (number := self._waiting.pop((index, result.job), None)) is not None:
                    self._replies.append(TierReply(number, result.num_blocks, result.error))
        for job in self._mover.poll():
            if (number := self._copies.pop(job, None)) is not None:
                self._replies.append(TierReply(number))
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """Stop copies and tiers."""
        with ExitStack() as stack:  # each is closed although another one fails
            for tier in self._tiers:
                stack.callback(tier.close)
            stack.callback(self._mover.close)

    def _start_job(self, order: TierOrder, number: int) -> None:
        tier, is_load = self._tiers[order.tier], order.action == "load"
        buffers = tier.load(order.job, order.keys) if is_load else tier.store(order.job, order.keys)
        is_refused = buffers is None
        blocks = _Blocks([None] * len(order.keys) if buffers is None else buffers, is_refused)
        self._jobs.setdefault(order.job, {})[order.tier] = blocks
        if is_load and is_refused:
            self._replies.append(TierReply(number, NO_ROOM, _REFUSED))
        elif is_load:
            self._waiting[order.tier, order.job] = number

    def _finish(self, order: TierOrder, number: int) -> None:
        tiers, commits = self._jobs[order.job], order.action == "commit"
        blocks = tiers.pop(order.tier)
        if not tiers:
            del self._jobs[order.job]
        self._waiting.pop((order.tier, order.job), None)
        if not blocks.is_refused:
            self._tiers[order.tier].finish(order.job, commit=commits)
        if commits and blocks.is_refused:
            self._replies.append(TierReply(number, NO_ROOM, _REFUSED))
        elif commits:
            self._waiting[order.tier, order.job] = number

    def _copy_to_pages(self, job: int, pages: np.ndarray) -> None:
        """Pages without a block are not written: the load's result is shorter."""
        buffers = chain.from_iterable(blocks.buffers for blocks in self._jobs[job].values())
        pairs = [(page, buffer) for page, buffer in zip(pages, buffers, strict=False) if buffer is not None]
        self._mover.load(job, np.array([page for page, _ in pairs], pages.dtype), [buffer for _, buffer in pairs])

    def _copy_from_pages(self, order: TierOrder, pages: np.ndarray) -> None:
        rows: list[list[torch.Tensor | None]] = []
        for blocks, (start, stop) in zip(self._jobs[order.job].values(), order.spans, strict=True):
            rows.append([*[None] * start, *blocks.buffers, *[None] * (len(pages) - stop)])
        self._mover.store(order.job, pages, rows)
