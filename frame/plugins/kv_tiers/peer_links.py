"""`PeerLinks`: the links of a decode server to prefill servers. It asks them where the blocks of
leases are, and tells them which leases are not needed any more.

Used by the tier `nixl`. Must not know keys or buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import msgspec

from frame.core.interfaces.kv_tier import KVTransfer
from frame.host.authenticated_link import Link, LinkError, authenticate
from frame.plugins.kv_tiers.link_thread import ACQUIRE, HELLO, REFUSAL, RELEASE, REPLY, Acquire, Blocks, LinkThread, beating
from frame.plugins.kv_tiers.nixl_agent import NixlAgent
from frame.plugins.kv_tiers.threaded_tier import BlockError

MAX_PEERS = 256
CONNECT_SECONDS = 3.0
_LOOK_SECONDS = 0.01  # between two looks at reads that end
RETRY_SECONDS = 1.0  # after a failed connection, in which no other is tried
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """Blocks in a peer's memory. `agent`: the peer's name at NIXL. `device`: see `Blocks`."""

    agent: str
    device: int
    addresses: list[int]
    digests: list[bytes]


@dataclass(eq=False, slots=True)
class _Peer:
    """A prefill server that is connected. `waiting`: by the number of the request."""

    link: Link
    waiting: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)
    agent: str = ""
    num_registered: int = 0  # pieces of its memory that NIXL knows
    is_dropped: bool = False
    describing: asyncio.Lock = field(default_factory=asyncio.Lock)


class PeerLinks:
    """Connects to prefill servers when their blocks are asked for. `properties`: what they must
    have too."""

    def __init__(self, secret: bytes, properties: Mapping[str, str], agent: NixlAgent) -> None:
        self._secret, self._properties, self._agent = secret, dict(properties), agent
        self._peers: dict[Address, asyncio.Task[_Peer]] = {}
        self._failed: dict[Address, tuple[float, str]] = {}  # until when no connection is tried, and why
        self._numbers = itertools.count()
        self._links: set[asyncio.Task[None]] = set()
        self._thread = LinkThread("kv-tier-peers")

    def acquire(self, transfer: KVTransfer, seconds: float) -> LeasedBlocks:
        """Where the blocks of a transfer are. Called in a thread, which waits up to `seconds`.
        Raises BlockError."""
        task = self._thread.submit(self._acquire(transfer))
        try:
            return task.result(seconds)
        except (TimeoutError, CancelledError):
            task.cancel()
            raise BlockError(f"the prefill server {transfer.host}:{transfer.port} does not reply") from None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BlockError(f"the prefill server {transfer.host}:{transfer.port}: {error}") from error

    def release(self, transfer: KVTransfer) -> None:
        """Tell a peer that a lease is not needed any more. It expires where the peer cannot be
        reached."""
        self._thread.submit(self._release(transfer))

    def close(self, timeout: float) -> None:
        self._thread.close(timeout)

    async def _acquire(self, transfer: KVTransfer) -> LeasedBlocks:
        peer = await self._find_peer((transfer.host, transfer.port))
        asked = Acquire(transfer.lease, peer.num_registered)
        blocks = msgspec.msgpack.decode(await self._ask(peer, ACQUIRE, msgspec.msgpack.encode(asked)), type=Blocks)
        async with peer.describing:
            await self._describe(peer, blocks)
        return LeasedBlocks(peer.agent, blocks.device, blocks.addresses, blocks.digests)

    async def _describe(self, peer: _Peer, blocks: Blocks) -> None:
        """Let NIXL know the memory of a reply. Reads of memory that it knows end first."""
        if blocks.num_registered > peer.num_registered and blocks.description:
            if peer.agent:
                self._agent.remove_peer(peer.agent)
                while self._agent.is_removing(peer.agent):  # noqa: ASYNC110 - threads read
                    await asyncio.sleep(_LOOK_SECONDS)
            if peer.is_dropped:  # after the reply: nothing would forget its memory
                raise LinkError("the link has ended")
            peer.agent, peer.num_registered = self._agent.add_peer(blocks.description), blocks.num_registered

    async def _release(self, transfer: KVTransfer) -> None:
        with contextlib.suppress(OSError):
            peer = await self._find_peer((transfer.host, transfer.port))
            peer.link.post(RELEASE, 0, msgspec.msgpack.encode([transfer.lease]))

    async def _find_peer(self, address: Address) -> _Peer:
        """The peer at an address; requests that need it at the same time share one connection."""
        task = self._peers.get(address)
        if task is None:
            until, reason = self._failed.get(address, (0.0, ""))
            if time.monotonic() < until:
                raise LinkError(reason)
            if len(self._peers) >= MAX_PEERS:
                raise LinkError(f"there are {MAX_PEERS} prefill servers already")
            task = self._peers[address] = asyncio.ensure_future(self._connect(address))
        try:
            return await asyncio.shield(task)
        except OSError as error:
            if self._peers.get(address) is task:
                del self._peers[address]
                now = time.monotonic()
                self._failed = {each: entry for each, entry in self._failed.items() if entry[0] > now}
                self._failed[address] = now + RETRY_SECONDS, str(error)
            raise

    async def _connect(self, address: Address) -> _Peer:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(*address)
        except TimeoutError:
            raise LinkError("it does not accept connections") from None
        peer = _Peer(await authenticate(reader, writer, self._secret, is_listener=False))
        keeping = asyncio.ensure_future(self._keep(address, peer))
        self._links.add(keeping)
        keeping.add_done_callback(self._links.discard)
        try:
            await self._ask(peer, HELLO, msgspec.msgpack.encode(self._properties))
        except BaseException:
            keeping.cancel()
            raise
        return peer

    async def _ask(self, peer: _Peer, kind: int, content: bytes) -> bytes:
        """The content of the reply. Raises LinkError with the sentence of a refusal."""
        number = next(self._numbers) & 0xFFFFFFFF
        reply = peer.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            peer.link.post(kind, number, content)
            return await reply
        finally:
            peer.waiting.pop(number, None)

    async def _keep(self, address: Address, peer: _Peer) -> None:
        """Receive replies until the link ends."""
        reason = "the link has ended"
        try:
            async with beating(peer.link):
                while True:
                    kind, number, content = await peer.link.receive()
                    reply = peer.waiting.get(number)
                    if reply is None or reply.done():
                        continue
                    if kind == REFUSAL:
                        reply.set_exception(LinkError(content.decode()))
                    elif kind == REPLY:
                        reply.set_result(content)
        except LinkError as error:
            reason = str(error)
        finally:
            self._drop(address, peer, reason)

    def _drop(self, address: Address, peer: _Peer, reason: str) -> None:
        peer.is_dropped = True
        for reply in peer.waiting.values():
            if not reply.done():
                reply.set_exception(LinkError(reason))
        task = self._peers.get(address)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None and task.result() is peer:
            del self._peers[address]
        if peer.agent:
            self._agent.remove_peer(peer.agent)
