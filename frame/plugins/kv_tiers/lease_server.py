"""`LeaseServer`: the end of a prefill server that decode servers connect to. It tells where the
blocks of a lease are, once, and takes note of leases that are not needed any more.

Used by the tier `nixl`. Must not know keys or how blocks are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from queue import SimpleQueue

import msgspec

from frame.core.errors import ConfigurationError
from frame.core.interfaces.kv_tier import TransferSettings
from frame.host.authenticated_link import Link, LinkError, Places, authenticate
from frame.plugins.kv_tiers.host import HostBlock
from frame.plugins.kv_tiers.link_thread import (
    ACQUIRE,
    HELLO,
    REFUSAL,
    RELEASE,
    REPLY,
    Acquire,
    Blocks,
    LinkThread,
    beating,
    find_difference,
)
from frame.plugins.kv_tiers.nixl_agent import NixlAgent

MAX_PEERS = 256
MAX_UNKNOWN = 64  # connections that have not proved the secret
_START_SECONDS = 10.0
NO_LEASE = "the lease is unknown, was used already, or has expired"
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Lease:
    """Blocks that a peer may read once. The engine's thread writes it, but for `is_taken`."""

    keys: list[bytes]
    began: float  # seconds, monotonic
    tenant: str = ""  # the owner of the prompt
    pinned: list[HostBlock] = field(default_factory=list)  # of leading keys, which are not evicted; stored or being stored
    is_taken: bool = False
    is_closed: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether the blocks hold what their keys name, up to the first one that failed."""
        return all(block.digest or block.is_failed for block in self.pinned)

    def list_blocks(self) -> list[HostBlock]:
        """The leading blocks that were stored."""
        return list(takewhile(lambda block: not block.is_failed, self.pinned))


class LeaseServer:
    """`leases`: by name; the engine's thread changes it. `released`: names of leases that are not
    needed any more, which the engine's thread takes."""

    def __init__(self, settings: TransferSettings, properties: Mapping[str, str], agent: NixlAgent, leases: Mapping[str, Lease]) -> None:
        """properties: what decode servers must have too. Raises ConfigurationError if the address
        cannot be used."""
        self.released: SimpleQueue[str] = SimpleQueue()
        self._settings, self._properties, self._agent, self._leases = settings, properties, agent, leases
        self._places, self._num_peers = Places(MAX_UNKNOWN), 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # replaced each time it is set
        self._thread = LinkThread("kv-tier-leases")
        try:
            self._thread.submit(self._listen()).result(_START_SECONDS)
        except (OSError, TimeoutError) as error:
            self._thread.close(1.0)
            place = f"{settings.host}:{settings.port}"
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ConfigurationError(
                f"the prefill server cannot listen on {place} ({reason}); change disaggregation.host or disaggregation.port"
            ) from error

    def note_change(self) -> None:
        """In any thread: blocks of leases have been stored, or leases have ended."""
        self._thread.call(self._wake)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self, timeout: float) -> None:
        self._thread.close(timeout)

    async def _listen(self) -> None:
        await asyncio.start_server(self._serve, self._settings.host, self._settings.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._places.add(writer)
        taken: set[str] = set()
        try:
            link = await authenticate(
                reader, writer, self._settings.secret, is_listener=True, when_known=partial(self._places.discard, writer)
            )
            if self._num_peers >= MAX_PEERS:
                raise LinkError(f"there are {MAX_PEERS} decode servers already")
            self._num_peers += 1
            try:
                async with beating(link):
                    await self._converse(link, taken)
            finally:
                self._num_peers -= 1
        except (LinkError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.info("the link to a decode server has ended: %s", error)
        except asyncio.CancelledError:  # the server closes; asyncio of Python 3.11 logs a cancelled connection as a fault
            return
        finally:
            self._places.discard(writer)
            writer.close()
            for lease in taken:  # it is gone; what it still reads fails its digest
                self.released.put(lease)

    async def _converse(self, link: Link, taken: set[str]) -> None:
        is_known = False
        while True:
            kind, channel, content = await link.receive()
            if kind == HELLO:
                is_known = self._greet(link, channel, msgspec.msgpack.decode(content, type=dict[str, str]))
            elif not is_known:
                raise LinkError("it asks for blocks before it has said what it is")
            elif kind == ACQUIRE:
                task = asyncio.ensure_future(self._hand_out(link, channel, msgspec.msgpack.decode(content, type=Acquire), taken))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif kind == RELEASE:
                for lease in msgspec.msgpack.decode(content, type=list[str]):
                    taken.discard(lease)
                    self.released.put(lease)
            else:
                raise LinkError(f"it sends a frame of kind {kind}")

    def _greet(self, link: Link, channel: int, properties: dict[str, str]) -> bool:
        """Whether the peer's blocks are like ours."""
        difference = find_difference(self._properties, properties)
        if difference:
            _log.warning("a decode server is refused: %s", difference)
        link.post(REFUSAL if difference else REPLY, channel, difference.encode())
        return not difference

    async def _hand_out(self, link: Link, channel: int, asked: Acquire, taken: set[str]) -> None:
        """Reply with the blocks of a lease once they are stored."""
        with contextlib.suppress(OSError):  # the link has ended
            await self._reply(link, channel, asked, taken)

    async def _reply(self, link: Link, channel: int, asked: Acquire, taken: set[str]) -> None:
        lease = self._leases.get(asked.lease)
        if lease is None or lease.is_taken or lease.is_closed:
            link.post(REFUSAL, channel, NO_LEASE.encode())
            return
        lease.is_taken = True
        taken.add(asked.lease)
        while not lease.is_stored and not lease.is_closed:
            await self._changed.wait()
        blocks = lease.list_blocks()
        if lease.is_closed or not blocks:
            link.post(REFUSAL, channel, (NO_LEASE if lease.is_closed else "the prefill server had no room for the blocks").encode())
            return
        count = self._agent.num_registered
        description = self._agent.describe() if count != asked.num_registered else b""
        addresses, digests = [block.buffer.data_ptr() for block in blocks], [block.digest for block in blocks]
        link.post(REPLY, channel, msgspec.msgpack.encode(Blocks(addresses, digests, count, description, self._agent.device)))
