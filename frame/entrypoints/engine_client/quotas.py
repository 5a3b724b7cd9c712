"""`TenantQuotas`: limits on the concurrent requests and sequences of each API key, over all
protocols. `PlaceShares`: places that tenants share. `FairSemaphore`: a semaphore that serves its
waiters round-robin by tenant. `LoopTurns`: the same for passes of the event loop.

Used by the HTTP and gRPC servers and by the batch runner. Must not know a key or a protocol:
tenants have names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from frame.fair_queue import FairQueue


class QuotaExceededError(Exception):
    """A tenant's quota is used up; one sentence for the client. `is_permanent`: the request alone
    exceeds the quota, so a retry fails."""

    def __init__(self, sentence: str, is_permanent: bool = False) -> None:
        super().__init__(sentence)
        self.is_permanent = is_permanent


class PlaceShares:
    """`total` places of `num_tenants` tenants. Several tenants have at most half of the places
    each, and half of all places is divided among them: no tenant can take another's part of it.
    """

    def __init__(self, total: int, num_tenants: int) -> None:
        self.max_held = total if num_tenants < 2 else max(1, total // 2)  # by one tenant
        self._num_kept = 0 if num_tenants < 2 else total // (2 * num_tenants)  # for each tenant
        self._num_open = total - num_tenants * self._num_kept  # for those that come first
        self._held: Counter[str] = Counter()  # by tenant that holds places

    def count_held(self, tenant: str) -> int:
        return self._held[tenant]

    def take_places(self, tenant: str, count: int = 1) -> bool:
        """Take `count` places more, or none; False where the tenant may not have them."""
        held = self._held[tenant]
        opened = self._count_open(held + count) - self._count_open(held)
        if held + count > self.max_held or opened > self._num_open:
            return False
        self._held[tenant] += count
        self._num_open -= opened
        return True

    def release_places(self, tenant: str, count: int = 1) -> None:
        held = self._held[tenant]
        self._held[tenant] -= count
        self._num_open += self._count_open(held) - self._count_open(held - count)
        if held == count:
            del self._held[tenant]

    def _count_open(self, held: int) -> int:
        """How many of a tenant's `held` places are not those kept for it."""
        return max(0, held - self._num_kept)


class TenantQuotas:
    """The quotas of a server. A request without a key (tenant "") has none.

    `max_requests`: concurrent requests of a tenant, each generated sequence counted as one; None:
    no limit. `sequences`: the places of all sequences, of whatever kind; None: no limit but the
    server's.
    """

    def __init__(self, max_requests: int | None, sequences: PlaceShares | None = None) -> None:
        self._max_requests = max_requests
        self._sequences = sequences
        self._num_requests: Counter[str] = Counter()  # by tenant that has requests

    def open_lease(self, tenant: str) -> QuotaLease:
        """The lease of a new request, which counts as one. Raises QuotaExceededError."""
        self.acquire_requests(tenant, 1)
        return QuotaLease(self, tenant)

    def acquire_requests(self, tenant: str, count: int, requested: int = 1) -> None:
        """Count `count` more requests, of `requested` in all for one client request. Raises
        QuotaExceededError."""
        held, maximum = self._num_requests[tenant], self._max_requests
        if tenant and maximum is not None and held + count > maximum:
            if requested > maximum:
                raise QuotaExceededError(
                    f"the request asks for {requested} sequences, and a key may have {maximum} at once; ask for fewer", True
                )
            others = held + count - requested
            raise QuotaExceededError(
                f"{others} requests of this key are running or waiting, and it may have {maximum}, each sequence counted; try again later"
            )
        self._num_requests[tenant] += count

    def acquire_sequences(self, tenant: str, count: int) -> None:
        """Count `count` more sequences. Raises QuotaExceededError."""
        places = self._sequences
        if not tenant or places is None or places.take_places(tenant, count):
            return
        allowed = f"one key may hold {places.max_held} of this server's places"
        if count > places.max_held:
            raise QuotaExceededError(f"the request asks for {count} sequences, and {allowed}; ask for fewer", True)
        held = f"{places.count_held(tenant)} sequences of this key are running or waiting"
        raise QuotaExceededError(f"{held}, and {allowed}, fewer while other keys hold many; try again later")

    def release(self, tenant: str, requests: int, sequences: int = 0) -> None:
        """Give back what was acquired."""
        self._num_requests[tenant] -= requests
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]
        if tenant and self._sequences is not None:
            self._sequences.release_places(tenant, sequences)


class QuotaLease:
    """What one request holds of its tenant's quotas: one request at first, then one for each of its
    sequences. A context manager."""

    def __init__(self, quotas: TenantQuotas, tenant: str, num_requests: int = 1, num_sequences: int = 0) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._num_requests = num_requests
        self._num_sequences = num_sequences

    def reserve_sequences(self, count: int, counts: bool = True) -> None:
        """Grow the lease to `count` sequences; `counts`: each counts against the limit of requests
        too. Raises QuotaExceededError, which leaves what the lease already holds."""
        more = max(0, count - self._num_requests) if counts else 0
        self._quotas.acquire_requests(self._tenant, more, count)
        self._num_requests += more
        further = max(0, count - self._num_sequences)
        self._quotas.acquire_sequences(self._tenant, further)
        self._num_sequences += further

    def transfer(self) -> QuotaLease:
        """Move all that this lease holds to a new one, for work that outlives the request."""
        other = QuotaLease(self._quotas, self._tenant, self._num_requests, self._num_sequences)
        self._num_requests = self._num_sequences = 0
        return other

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        self._quotas.release(self._tenant, self._num_requests, self._num_sequences)
        self._num_requests = self._num_sequences = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class FairSemaphore:
    """At most `count` holders at once, in the turns of `FairQueue`: a tenant with many waiters
    delays another tenant's single one by at most one turn, and leaves it a slot."""

    def __init__(self, count: int, max_per_tenant: int | None = None) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(count, max_per_tenant)

    @asynccontextmanager
    async def hold_slot(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(tenant, turn)
        self._grant_slots()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue.discard(tenant, turn)
            else:  # the slot was granted before the cancellation
                self._release_slot(tenant)
            raise
        try:
            yield
        finally:
            self._release_slot(tenant)

    def _release_slot(self, tenant: str) -> None:
        self._queue.release(tenant)
        self._grant_slots()

    def _grant_slots(self) -> None:
        while (next_turn := self._queue.take()) is not None:
            tenant, turn = next_turn
            if turn.done():  # cancelled, and its waiter has not run yet
                self._queue.release(tenant)
            else:
                turn.set_result(None)


class LoopTurns:
    """Divides work that a task does at once, up to its next suspension, among passes of the event
    loop: at most `limit` of it in one pass, round-robin by tenant, and what is larger by itself."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._done = 0  # in this pass
        self._num_waiting = 0
        self._is_scheduled = False  # whether `_begin_pass` will be called
        self._queue: FairQueue[tuple[asyncio.Future[None], int]] = FairQueue(1)

    async def take_turn(self, tenant: str, size: int) -> None:
        """Wait for a pass with room for work of this size, which the caller does now."""
        self._schedule()
        if not self._num_waiting and (not self._done or self._done + size <= self._limit):
            self._done += max(1, size)
            return
        waiting = asyncio.get_running_loop().create_future(), max(1, size)
        self._queue.put(tenant, waiting)
        self._num_waiting += 1
        try:
            await waiting[0]
        except asyncio.CancelledError:
            if waiting[0].cancelled():
                self._queue.discard(tenant, waiting)
                self._num_waiting -= 1
            raise

    def _begin_pass(self) -> None:
        """Let those work whose turn it is; they run before the next call of this method."""
        self._done, self._is_scheduled = 0, False
        while self._done < self._limit and (next_turn := self._queue.take()) is not None:
            tenant, (turn, size) = next_turn
            self._queue.release(tenant)
            if not turn.done():  # else its waiter is cancelled, and takes it out
                turn.set_result(None)
                self._num_waiting -= 1
                self._done += size
        if self._done:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_pass)
