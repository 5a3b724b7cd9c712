"""`RankedRig`: the rig of tiers with two ranks, each with a runner, pages, tiers and a mover of its
own. Batches and orders reach the second rank in their order, as bytes, at the latest before rank 0
waits for a step; its replies come when the test lets them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.runner import TierOrder
from frame.core.kv_cache.page_allocator import PageAllocator
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.kv_tiers.controller import TierController
from frame.kv_tiers.follower import TierFollower
from frame.kv_tiers.ranked_tier import GroupRanks, RankedMover, RankedTier
from frame.parallel.rank_channels import Replies, _encoder, _order_decoder
from frame.testing.fake_runner import DoneStep, FakeRunner, LaterStep
from tests.kv_tiers.tier_rig import RunnerMover, TierRig


class Link:
    """In place of a `BatchSender`, with one follower. `is_held`: its replies do not come."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner, self.is_held = runner, False
        self.follower: TierFollower
        self.waiting: dict[int, Replies] = {}
        self._messages: deque[tuple[ScheduledBatch, StepResult] | tuple[int, bytes]] = deque()
        self._number = 0

    def send_batch(self, batch: ScheduledBatch, expected: StepResult) -> None:
        """expected: the result of rank 0, which the follower's must equal."""
        self._messages.append((batch, expected))

    def send_order(self, order: TierOrder) -> None:
        self._number += 1
        self._messages.append((self._number, _encoder.encode(order)))

    def await_replies(self, ranks: Iterable[int]) -> int:
        self.waiting[self._number] = Replies(set(ranks))
        return self._number

    def take_replies(self, number: int) -> Replies | None:
        return None if self.waiting[number].silent else self.waiting.pop(number)

    def forget_replies(self, number: int) -> None:
        self.waiting.pop(number, None)

    def receive_replies(self) -> None:
        if self.is_held:
            return
        self.deliver()
        for reply in self.follower.poll():
            if (replies := self.waiting.get(reply.number)) is not None:
                replies.silent.discard(1)
                replies.problems += [f"rank 1: {reply.error}"] if reply.error else []
                replies.num_blocks = reply.num_blocks

    def deliver(self) -> None:
        while self._messages:
            first, second = self._messages.popleft()
            if isinstance(first, ScheduledBatch) and isinstance(second, StepResult):
                step = self.runner.launch(first)
                assert isinstance(step, DoneStep)
                assert np.array_equal(step.wait().token_ids, second.token_ids), "the ranks have other pages"
            elif isinstance(first, int) and isinstance(second, bytes):
                order = _order_decoder.decode(second)
                assert isinstance(order, TierOrder)
                self.follower.start_order(order, first)


class LeadingFakeRunner(FakeRunner):
    """Rank 0's runner."""

    link: Link

    def launch(self, batch: ScheduledBatch) -> DoneStep | LaterStep:
        step = super().launch(batch)
        assert isinstance(step, DoneStep)
        self.link.send_batch(batch, step.result)
        ends = step.ends

        def end(number: int) -> None:
            self.link.deliver()
            if ends is not None:
                ends(number)

        return DoneStep(step.result, end)


class RankedRig(TierRig):
    """`tiers`: those of rank 0, then those of the follower."""

    def make_memory(self, is_invalid: Any) -> tuple[Any, PageAllocator, FakeRunner]:
        pools, allocator, twin = super().make_memory(is_invalid)
        config = self.config
        runner = LeadingFakeRunner(config.num_pages, config.page_size, config.max_running, config.max_pages, config.vocab_size, is_invalid)
        self.twin, self.link = twin, Link(twin)
        runner.link = self.link
        return pools, allocator, runner

    def make_tiers(self, kv_manager: KVCacheManager) -> TierController:
        self.mover, self.twin_mover = RunnerMover(self.runner), RunnerMover(self.twin, may_be_empty=True)
        own, other = self.make_memory_tiers(), self.make_memory_tiers()
        self.tiers = own + other
        self.link.follower = TierFollower(other, self.twin_mover)
        sender: Any = self.link
        ranks = GroupRanks(sender, 0, [1])
        self.ranked = [
            RankedTier(tier, number, ranks, torch.zeros(self.mover.block_bytes, dtype=torch.uint8)) for number, tier in enumerate(own)
        ]
        return self.make_controller(self.ranked, RankedMover(self.mover, ranks), kv_manager)

    def list_runners(self) -> list[FakeRunner]:
        return [self.runner] if self.link._messages else [self.runner, self.twin]

    def release(self) -> None:
        super().release()
        self.link.is_held = self.twin_mover.is_held = False

    def check_empty(self) -> None:
        self.link.deliver()
        super().check_empty()
        assert not self.link.waiting
        assert not self.link.follower.is_busy
        assert not self.link.follower._jobs
        assert not any(tier._jobs for tier in self.ranked)
