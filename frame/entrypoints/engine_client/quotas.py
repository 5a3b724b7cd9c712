"""`TenantQuotas`: how much each key has at work, over all protocols, and the most that it may; `Places`, which keys are given in turn.

Knows no key, only whose it is; no protocol.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self


class QuotaExceededError(Exception):
    """A key has as much at work as it may; one sentence for the client. `is_hopeless`: this alone is more than a key may have."""

    def __init__(self, sentence: str, is_hopeless: bool = False) -> None:
        super().__init__(sentence)
        self.is_hopeless = is_hopeless


class TenantQuotas:
    """One a server. `most` places a tenant, None: no limit; `most_sequences` of all sequences that the server holds, whatever they are
    for, None: as many as there are. Who brings no key (tenant "") has no limit."""

    def __init__(self, most: int | None, most_sequences: int | None = None) -> None:
        self._most = most
        self._most_sequences = most_sequences
        self._held: Counter[str] = Counter()  # places by tenant; as many entries as keys
        self._sequences: Counter[str] = Counter()

    def open(self, tenant: str) -> QuotaLease:
        """A request's share, of one place, to be closed with the request. Raises ShareExceededError."""
        self.take(tenant, 1)
        return QuotaLease(self, tenant)

    def take(self, tenant: str, count: int, asked: int = 1) -> None:
        """`count` places more, of `asked` for a request. Raises ShareExceededError."""
        held, most = self._held[tenant], self._most
        if tenant and most is not None and held + count > most:
            if asked > most:
                raise QuotaExceededError(f"the request asks for {asked} sequences, and a key may have {most} at once; ask for fewer", True)
            others = held + count - asked
            raise QuotaExceededError(
                f"{others} requests of this key are running or waiting, and it may have {most}, each sequence counted; try again later"
            )
        self._held[tenant] += count

    def take_sequences(self, tenant: str, count: int) -> None:
        """`count` sequences more. Raises ShareExceededError."""
        held, most = self._sequences[tenant], self._most_sequences
        if tenant and most is not None and held + count > most:
            if count > most:
                raise QuotaExceededError(
                    f"the request asks for {count} sequences, and one key may hold {most} of this server's places; ask for fewer", True
                )
            raise QuotaExceededError(
                f"{held} sequences of this key are running or waiting, and one key may hold {most} of this server's places; try again later"
            )
        self._sequences[tenant] += count

    def give_back(self, tenant: str, count: int, sequences: int = 0) -> None:
        """Of what was taken."""
        self._held[tenant] -= count
        self._sequences[tenant] -= sequences


class QuotaLease:
    """What one request holds: one place from its beginning on, and one for each sequence once it is known how many there are."""

    def __init__(self, shares: TenantQuotas, tenant: str, held: int = 1, sequences: int = 0) -> None:
        self._shares = shares
        self._tenant = tenant
        self._held = held
        self._sequences = sequences

    def widen(self, sequences: int, counts: bool = True) -> None:
        """Hold a place for each; `counts`: each is a request of its own to the key's limit. Raises ShareExceededError, and holds what it
        held."""
        more = max(0, sequences - self._held) if counts else 0
        self._shares.take(self._tenant, more, sequences)
        self._held += more
        further = max(0, sequences - self._sequences)
        self._shares.take_sequences(self._tenant, further)
        self._sequences += further

    def handed_on(self) -> QuotaLease:
        """All that this one holds, for what goes on when its request has been answered."""
        other = QuotaLease(self._shares, self._tenant, self._held, self._sequences)
        self._held = self._sequences = 0
        return other

    def close(self) -> None:
        """The request is over."""
        self._shares.give_back(self._tenant, self._held, self._sequences)
        self._held = self._sequences = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Places:
    """At most `count` pieces of work at once. Who waits is served in turn by tenant: one tenant's many delay another's one no longer than
    its next one would."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in the order of their turns

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place and hold it."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the place came with the cancellation
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """A place that is free, to the next tenant's next."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
