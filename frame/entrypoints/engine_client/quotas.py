"""`TenantQuotas`: limits on the concurrent requests and sequences of each API key, over all
protocols. `FairSemaphore`: a semaphore that serves its waiters round-robin by tenant.

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

from frame.core.fair_queue import FairQueue


class QuotaExceededError(Exception):
    """A tenant's quota is used up; one sentence for the client. `is_permanent`: the request alone
    exceeds the quota, so a retry fails."""

    def __init__(self, sentence: str, is_permanent: bool = False) -> None:
        super().__init__(sentence)
        self.is_permanent = is_permanent


class TenantQuotas:
    """The quotas of a server. A request without a key (tenant "") has none.

    `max_requests`: concurrent requests of a tenant, each generated sequence counted as one; None:
    no limit. `max_sequences`: concurrent sequences of a tenant, of whatever kind; None: no limit
    but the server's.
    """

    def __init__(self, max_requests: int | None, max_sequences: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_sequences = max_sequences
        self._num_requests: Counter[str] = Counter()  # by tenant; as many entries as keys
        self._num_sequences: Counter[str] = Counter()  # by tenant

    def open_lease(self, tenant: str) -> QuotaLease:
        """The lease of a new request, which counts as one. Raises QuotaExceededError."""
        self.acquire_requests(tenant, 1)
        return QuotaLease(self, tenant)

    def acquire_requests(self, tenant: str, count: int, requested: int = 1) -> None:
        """Count `count` more requests, of `requested` in all for one client request. Raises
        QuotaExceededError."""
        held, most = self._num_requests[tenant], self._max_requests
        if tenant and most is not None and held + count > most:
            if requested > most:
                raise QuotaExceededError(
                    f"the request asks for {requested} sequences, and a key may have {most} at once; ask for fewer", True
                )
            others = held + count - requested
            raise QuotaExceededError(
                f"{others} requests of this key are running or waiting, and it may have {most}, each sequence counted; try again later"
            )
        self._num_requests[tenant] += count

    def acquire_sequences(self, tenant: str, count: int) -> None:
        """Count `count` more sequences. Raises QuotaExceededError."""
        held, most = self._num_sequences[tenant], self._max_sequences
        if tenant and most is not None and held + count > most:
            if count > most:
                raise QuotaExceededError(
                    f"the request asks for {count} sequences, and one key may hold {most} of this server's places; ask for fewer", True
                )
            raise QuotaExceededError(
                f"{held} sequences of this key are running or waiting, and one key may hold {most} of this server's places; try again later"
            )
        self._num_sequences[tenant] += count

    def release(self, tenant: str, requests: int, sequences: int = 0) -> None:
        """Give back what was acquired."""
        self._num_requests[tenant] -= requests
        self._num_sequences[tenant] -= sequences


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
