"""`AdapterPlacement`: which adapters the engines of a server have in host memory.

At most `adapters.max_loaded`: the least recently used version without requests is evicted for
another one. A restarted engine gets those of its requests before the requests. Used by the registry
and by `EngineClient`. Must not know the names of adapters.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from frame.core.messages import ControlReply, Finish
from frame.entrypoints.engine_client.adapter_spool import AdapterVersion
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.interfaces.adapter import AdapterError

log = logging.getLogger(__name__)

MAX_CRASHES = 2  # of engines that were loading a version, after which it is loaded no more
LOAD_TRIES, UNLOAD_TRIES = 5, 50  # while the engine refuses because of its state, such as steps in flight
PAUSE = 0.1  # seconds between them
CRASHED = "the engine crashed {} times while it loaded this adapter, which is loaded no more; check its files"
LOST = "the adapter of this request could not be loaded again after a crash of the engine: {}"


class AdapterPlacement:
    """Not thread-safe: every method runs in the event loop's thread. `clients`: those of all
    replicas. `versions`: all of the server, by digest."""

    def __init__(self, clients: Sequence[EngineClient], max_loaded: int, versions: Mapping[str, AdapterVersion]) -> None:
        self.max_loaded = max_loaded
        self.num_loads = 0  # orders that engines have carried out
        self.lock = asyncio.Lock()  # held while versions enter or leave host memory, so that a crash has one cause
        self._clients = clients
        self._versions = versions
        self._placed: dict[str, AdapterVersion] = {}  # those that have room in host memory, least recently used first
        self._orders: dict[EngineClient, tuple[AdapterVersion, asyncio.Future[ControlReply]]] = {}  # what an engine is loading
        self._crashes: Counter[str] = Counter()  # by digest
        self._blamed: set[EngineClient] = set()  # whose engine ended while it loaded an adapter
        self._releases: list[asyncio.Future[None]] = []
        self._restoring: dict[EngineClient, asyncio.Task[None]] = {}
        for client in clients:
            client.adapters = self

    @property
    def num_loaded(self) -> int:
        return len(self._placed)

    def is_ready(self, version: AdapterVersion) -> bool:
        """Whether requests may use the version now."""
        is_placed = version.digest in self._placed and not version.is_leaving
        return is_placed and all(client in version.holders for client in self._ready_clients())

    def touch(self, version: AdapterVersion) -> None:
        """The version is used now."""
        self._placed[version.digest] = self._placed.pop(version.digest)

    def _ready_clients(self) -> list[EngineClient]:
        return [client for client in self._clients if client.dead_reason is None and client.unavailable_reason is None]

    def find_missing(self, version: AdapterVersion) -> str | None:
        """Why an engine that runs or is being restarted does not have the version; None: all do."""
        missing = (client for client in self._clients if client.dead_reason is None and client not in version.holders)
        return next((client.unavailable_reason or "the engine was restarted; try again" for client in missing), None)

    async def place(self, version: AdapterVersion) -> None:
        """Load a version, which the caller has acquired, into all engines that run; one that is
        being restarted gets it before its requests. `lock` is held. Raises AdapterError,
        TimeoutError."""
        if version.digest not in self._placed:
            while len(self._placed) >= self.max_loaded:
                await self._evict_other(version)
            self._placed[version.digest] = version
        try:
            for client in self._ready_clients():
                with suppress(EngineDeadError):  # the next engine gets it before its requests
                    while client not in version.holders and not await self._order(client, version):
                        await self._evict_other(version)
                self._check_crashes(version)
        except (AdapterError, TimeoutError):
            await self.unload(version)
            raise
        self.touch(version)

    def _check_crashes(self, version: AdapterVersion) -> None:
        if self._crashes[version.digest] >= MAX_CRASHES:
            raise AdapterError(CRASHED.format(MAX_CRASHES))

    async def _order(self, client: EngineClient, version: AdapterVersion) -> bool:
        """Whether an engine has loaded the version; False: its host memory is full. Raises
        AdapterError, EngineDeadError, TimeoutError."""
        reply = None
        for _ in range(LOAD_TRIES):
            self._check_crashes(version)
            sending = asyncio.ensure_future(client.send_order("load_adapter", digest=version.digest, folder=str(version.files.folder)))
            order = self._orders[client] = version, sending
            try:
                reply = await asyncio.shield(sending)
            except asyncio.CancelledError:
                await asyncio.wait({sending})  # the engine goes on, and no other order may come in between
                if not sending.exception() and sending.result().ok:
                    version.holders.add(client)
                raise
            finally:
                if self._orders.get(client) is order:
                    del self._orders[client]
            if reply.ok:
                version.holders.add(client)
                version.info = reply.data
                self.num_loads += 1
                return True
            if reply.code != "conflict":
                break
            await asyncio.sleep(PAUSE)  # the engine may still be freeing the same adapter
        if reply is None or reply.code != "conflict" or len(self._placed) <= 1:
            raise AdapterError((reply and reply.error) or "the engine refused the adapter")
        return False

    async def _evict_other(self, version: AdapterVersion) -> None:
        """Take the least recently used version without requests out of host memory; wait until
        there is one. New requests for the oldest one wait meanwhile, so that busy adapters cannot
        hold all places."""
        while True:
            others = [each for each in self._placed.values() if each is not version]
            if (free := next((each for each in others if not each.num_users), None)) is not None:
                await self.unload(free)
                return
            others[0].is_leaving = True
            try:
                await self.wait_release()
            finally:
                others[0].is_leaving = False

    async def unload(self, version: AdapterVersion) -> None:
        """Take a version out of host memory. `lock` is held."""
        self._placed.pop(version.digest, None)
        version.holders.clear()
        for client in self._ready_clients():
            for _ in range(UNLOAD_TRIES):
                try:
                    reply = await client.send_order("unload_adapter", digest=version.digest)
                except (EngineDeadError, TimeoutError):  # a new engine has none
                    break
                if reply.ok or reply.code != "conflict":
                    break
                await asyncio.sleep(PAUSE)
            else:
                log.warning("the engine still uses adapter %s, and did not unload it: %s", version.digest, reply.error)

    # releases -------------------------------------------------------------------------------------

    async def wait_release(self) -> None:
        """Return when a version has lost its last user."""
        future = asyncio.get_running_loop().create_future()
        self._releases.append(future)
        await future

    def wake(self) -> None:
        """A version has lost its last user."""
        releases, self._releases = self._releases, []
        for future in releases:
            if not future.done():
                future.set_result(None)

    # crashes --------------------------------------------------------------------------------------

    def record_loss(self, client: EngineClient) -> None:
        """The engine has ended, and its host memory with it."""
        for version in self._versions.values():
            version.holders.discard(client)
        if (loading := self._orders.pop(client, None)) is not None:
            self._crashes[loading[0].digest] += 1
            self._blamed.add(client)

    def begin_recovery(self, client: EngineClient) -> bool:
        """Whether the engine was loading an adapter when it ended, which no request is to blame
        for."""
        if (task := self._restoring.pop(client, None)) is not None:
            task.cancel()
        is_blamed = client in self._blamed
        self._blamed.discard(client)
        return is_blamed

    def restore(self, client: EngineClient) -> None:
        """Load what requests use into a new engine, then let it have those that are held."""
        if self._find_used(client, ()) is None:
            client.resume_held()
        else:
            self._restoring[client] = asyncio.get_running_loop().create_task(self._restore(client))

    def _find_used(self, client: EngineClient, failed: Collection[AdapterVersion]) -> AdapterVersion | None:
        """A version with users that the engine does not have."""
        used = (version for version in self._versions.values() if version.num_users and client not in version.holders)
        return next((version for version in used if version not in failed), None)

    async def _restore(self, client: EngineClient) -> None:
        failed: set[AdapterVersion] = set()
        while (version := self._find_used(client, failed)) is not None:
            try:
                error = None if await self._order(client, version) else "its host memory is full"
            except EngineDeadError:
                return  # the next engine gets them
            except (AdapterError, TimeoutError) as failure:
                error = str(failure)
            if error is not None:
                failed.add(version)
                client.abort_adapter(version, Finish("error", None, LOST.format(error)))
        self._restoring.pop(client, None)
        client.resume_held()
