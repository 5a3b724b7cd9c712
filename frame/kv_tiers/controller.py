"""`TierController`: the cache tiers behind a scheduler's prefix cache; implements `RequestTiers`.

It gives requests the keys of their blocks, and passes finished jobs of tiers and of the mover on to
loads and stores. Used by the scheduler. Must not know how a tier or the device copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from frame.core.interfaces.kv_tier import BlockMover
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.request import Request, RequestStatus
from frame.kv_tiers.block_keys import RequestKeys
from frame.kv_tiers.loads import PrefixLoads
from frame.kv_tiers.stores import BlockStores
from frame.kv_tiers.tier_set import NO_PAGES, NamedTier, TierOptions, TierSet, WritePolicy
from frame.kv_tiers.transfers import RequestTransfers, describe_transfers

__all__ = ["NamedTier", "TierController", "TierOptions", "WritePolicy"]

COPY_TIMEOUT = 5.0  # seconds that a flush waits for copies
RATE_WEIGHT = 0.2  # of a new measurement of the prefill rate
MIN_MEASURED = 64  # tokens of a prompt from which the prefill rate is measured


class TierController:
    """Loads prefixes of waiting requests, and stores what the prefix cache holds.

    Tiers are asked nearest first. A store goes to each tier that lacks the block. `clock`: seconds,
    monotonic.
    """

    def __init__(
        self,
        tiers: Sequence[NamedTier],
        mover: BlockMover,
        kv_manager: KVCacheManager,
        options: TierOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._set = TierSet(tiers, mover, kv_manager, options, clock)
        self._keys = RequestKeys(options.secret, options.identity, kv_manager.page_size)
        self._loads = PrefixLoads(self._set, self._keys)
        self._stores = BlockStores(self._set)
        self._transfers = RequestTransfers([named.tier for named in tiers], self._keys, clock)
        self._started: dict[str, float] = {}  # by id of requests whose prompt is being computed: when they started
        self.is_busy = False

    def poll(self, now: float) -> None:
        if self.is_busy:
            self._take_results()
        self._stores.write_back()
        self._loads.begin_step()
        self._update_busy()

    def _take_results(self) -> None:
        for index, named in enumerate(self._set.tiers):
            for result in named.tier.poll():
                if not self._loads.take_result(index, result):
                    self._stores.take_result(index, result)
        for job in self._set.mover.poll():
            if not self._loads.end_copy(job):
                self._stores.end_copy(job)
        self._loads.expire()
        self._set.report_removed()
        self._update_busy()

    def may_start(self, request: Request) -> bool:
        self._transfers.expect_blocks(request)
        may = self._loads.may_start(request)
        self._update_busy()
        return may

    def is_loading(self, request: Request) -> bool:
        return self._loads.is_loading(request)

    def forget(self, request: Request) -> None:
        self._loads.forget(request)
        self._transfers.forget(request)
        self._keys.forget(request)
        if request.state == RequestStatus.RUNNING:
            self._started[request.rid] = self._set.clock()
        else:
            self._started.pop(request.rid, None)
        self._update_busy()

    def offer(self, request: Request, keys: np.ndarray) -> None:
        if len(keys) + self._set.page_size > request.prompt_len and (started := self._started.pop(request.rid, None)) is not None:
            self._measure_prefill(request, self._set.clock() - started)
        chain = self._keys.extend(request, keys)
        self._transfers.keep_blocks(request, chain)
        self._stores.offer(chain, keys, request.namespace, at_once=request.pin is not None)
        self._update_busy()

    def invalidate_blocks(self) -> None:
        """See `RequestTiers.invalidate_blocks`. Waits for copies, so that no page stays locked."""
        self._loads.abandon_reads()
        end = time.monotonic() + COPY_TIMEOUT
        while self._stores.is_copying or len(self._loads):
            self._take_results()
            if time.monotonic() > end:
                raise RuntimeError(f"copies to the KV cache tiers have not ended within {COPY_TIMEOUT:g} s; flush the cache again later")
            time.sleep(0.001)
        self._transfers.close_all()
        self._keys.renew_roots()
        self._set.noted.clear()
        for named in self._set.tiers:
            named.tier.clear()
        self._set.report_cleared()
        self._update_busy()

    def list_held_pages(self) -> tuple[np.ndarray, np.ndarray]:
        transit = np.concatenate([NO_PAGES, *(load.list_pages() for load in self._loads), *self._stores.list_evicted_pages()])
        locked = [load.match.pages for load in self._loads] + self._stores.list_locked_pages()
        return transit, np.unique(np.concatenate([NO_PAGES, *locked]))

    def list_handles(self) -> list[Any]:
        return self._loads.list_handles() + self._stores.list_handles()

    def describe_load(self) -> dict[str, Any]:
        tiers = [
            {"tier": named.name, "loaded_tokens": counts.loaded, "stored_tokens": counts.stored, **describe_transfers(named.tier)}
            for named, counts in zip(self._set.tiers, self._set.counts, strict=True)
        ]
        return {
            "tiers": tiers,
            "tier_waiting": self._loads.num_waiting,
            "tier_failed_loads": self._loads.num_failed,
            "tier_late_loads": self._loads.num_late,
            "tier_dropped_blocks": self._stores.num_dropped,
        }

    def close(self) -> None:
        with ExitStack() as stack:  # each is closed although another one fails
            for named in self._set.tiers:
                stack.callback(named.tier.close)
            stack.callback(self._set.mover.close)

    def _update_busy(self) -> None:
        self.is_busy = bool(len(self._loads) or self._stores or self._transfers.num_open)

    def _measure_prefill(self, request: Request, seconds: float) -> None:
        """A request's first prompt is computed: the rate is that of requests as they run, beside
        others."""
        computed = request.prompt_len - max(0, request.num_cached_tokens)
        if computed >= MIN_MEASURED and seconds > 0 and not request.num_preemptions:
            self._loads.prefill_rate += RATE_WEIGHT * (computed / seconds - self._loads.prefill_rate)
