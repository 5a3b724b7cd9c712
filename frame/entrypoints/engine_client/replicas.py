"""`ReplicaClient` and `ReplicaUpdates`: the clients of data-parallel replicas as one client, for
the HTTP and gRPC servers.

Each sequence runs on one replica, which a routing policy chooses. The clients share their
counters and names (`Outstanding`); recovery is that of the replica. A replica that ends for good
ends its own sequences only. Must not know a process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import ControlReply, Finish, Heartbeat
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.commands import EngineCommands
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.parallel.replica_choice import ReplicaChooser, sum_loads

log = logging.getLogger(__name__)

LOST_REPLICA = "replica {}: {}; the update of the weights ended, and all replicas serve the old ones"
READS = ("server_info", "outline_cache", "ping")  # commands that change nothing: a replica may be missing
STATES = ("pause", "resume", "sleep", "wake")  # a replica that crashes meanwhile gets them when it is back
POLL = 0.05  # seconds between looks at a replica that is being restarted


async def _send(client: EngineClient, action: Any, arguments: dict[str, Any]) -> ControlReply:
    return await client.send_command(action, **arguments)


async def _send_until_done(client: EngineClient, action: Any, arguments: dict[str, Any]) -> ControlReply:
    """Send a command, again to the next engine where one crashes."""
    while True:
        try:
            return await client.send_command(action, **arguments)
        except EngineDeadError:
            while client.dead_reason is None and client.unavailable_reason is not None:  # noqa: ASYNC110 - as in `Supervisor`
                await asyncio.sleep(POLL)
            if client.dead_reason is not None:
                raise


class Served(NamedTuple):
    """What all replicas serve since the last update."""

    folder: str
    version: str


class ReplicaUpdates:
    """Replaces the weights of all replicas, so that no two serve different ones.

    All replicas check the new weights and stop; then all load them; then all continue. A replica
    that crashes meanwhile gets its requests back when it has the weights that the others serve. Not
    thread-safe: every method runs in the event loop's thread."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self._clients = clients
        self._lock = asyncio.Lock()  # held during an update
        self._decided = asyncio.Event()  # not set while it is open which weights will be served
        self._decided.set()
        self._served: Served | None = None  # None: no update yet
        self._outdated: set[EngineClient] = set()  # whose next engine may have other weights than those that are served
        self._restoring: dict[EngineClient, asyncio.Task[None]] = {}
        for client in clients:
            client.recover_weights = self.restore

    async def update(self, arguments: dict[str, Any]) -> ControlReply:
        """Update all replicas. The reply of the first one, or a refusal. Raises EngineDeadError,
        TimeoutError: the old weights stay."""
        async with self._lock:
            alive = [client for client in self._clients if client.dead_reason is None]
            for client in alive:
                if client.unavailable_reason is not None:
                    raise EngineDeadError(f"{self._name(client)}: {client.unavailable_reason}")
            self._decided.clear()
            try:
                return await self._update_all(alive, arguments)
            finally:
                self._decided.set()

    async def _update_all(self, alive: Sequence[EngineClient], arguments: dict[str, Any]) -> ControlReply:
        try:
            checks = await self._ask_all(alive, {**arguments, "phase": "check"})
            if (refusal := self._find_refusal(alive, checks)) is not None:
                await self._ask_all(alive, {"phase": "cancel"})
                return refusal
            loads = await self._ask_all(alive, {**arguments, "phase": "load"})
            loaded = [client for client, reply in zip(alive, loads, strict=True) if isinstance(reply, ControlReply) and reply.ok]
            if not loaded and (refusal := self._find_refusal(alive, loads)) is not None:
                await self._ask_all(alive, {"phase": "cancel"})
                return refusal
        except BaseException:
            await self._ask_all(alive, {"phase": "cancel"})
            raise
        self._served = Served(str(arguments["path"]), str(arguments["version"]))
        for client, reply in zip(alive, loads, strict=True):
            if client not in loaded:
                log.warning("%s has not loaded the weights %r: %s", self._name(client), self._served.version, reply)
                self._outdated.add(client)
                client.commands.set_weights(*self._served)
        late = [client for client, reply in zip(alive, loads, strict=True) if isinstance(reply, TimeoutError)]
        await self._ask_all([*loaded, *late], {"phase": "commit"})
        replies = [reply for reply in loads if isinstance(reply, ControlReply) and reply.ok]
        data = {**replies[0].data, "num_preempted": sum(reply.data["num_preempted"] for reply in replies)}
        return ControlReply(id=replies[0].id, ok=True, data=data)

    async def _ask_all(self, clients: Sequence[EngineClient], arguments: dict[str, Any]) -> list[ControlReply | BaseException]:
        calls = [client.send_command("update_weights", **arguments) for client in clients]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    def _find_refusal(self, clients: Sequence[EngineClient], replies: Sequence[ControlReply | BaseException]) -> ControlReply | None:
        """The first refusal of a phase. Raises EngineDeadError, TimeoutError for a replica without
        a reply."""
        for client, reply in zip(clients, replies, strict=True):
            if isinstance(reply, EngineDeadError | TimeoutError):
                raise type(reply)(LOST_REPLICA.format(self._clients.index(client), reply))
            if isinstance(reply, BaseException):
                raise reply
            if not reply.ok:
                return msgspec.structs.replace(reply, error=f"{self._name(client)}: {reply.error}")
        return None

    def _name(self, client: EngineClient) -> str:
        return f"replica {self._clients.index(client)}"

    # restarts -------------------------------------------------------------------------------------

    def restore(self, client: EngineClient) -> None:
        """A replica's engine is back: give it the weights that are served, then its requests."""
        if (running := self._restoring.pop(client, None)) is not None:
            running.cancel()
        if self._decided.is_set() and client not in self._outdated:
            client.restore_adapters()
        else:
            self._restoring[client] = asyncio.create_task(self._restore(client))

    async def _restore(self, client: EngineClient) -> None:
        await self._decided.wait()
        if client in self._outdated and self._served is not None:
            try:
                reply = await client.send_order("update_weights", path=self._served.folder, version=self._served.version)
            except (EngineDeadError, TimeoutError) as error:
                log.error("%s could not be given the weights %r: %s", self._name(client), self._served.version, error)
                return  # the next engine is restored again
            if not reply.ok:
                client.fail_requests(f"{self._name(client)} cannot load the weights that the others serve: {reply.error}")
                return
            self._outdated.discard(client)
        self._restoring.pop(client, None)
        client.restore_adapters()


class ReplicaClient:
    """Has the methods of `EngineClient` that servers use."""

    def __init__(self, clients: Sequence[EngineClient], chooser: ReplicaChooser) -> None:
        self.clients = clients
        self.limits, self.stats = clients[0].limits, clients[0].stats
        self._chooser = chooser
        self._updates = ReplicaUpdates(clients)
        self._away: set[int] = set()  # replicas that were being restarted when a sequence started

    # submit ---------------------------------------------------------------------------------------

    def reserve_sequences(self, count: int) -> None:
        self._first.reserve_sequences(count)

    def release_sequences(self, count: int) -> None:
        self._first.release_sequences(count)

    def prepare_request(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        rid: str | None,
        owner: str = "",
        second_text_starts: Sequence[int] = (),
    ) -> RequestState:
        return self._first.prepare_request(prompts, params, rid, owner, second_text_starts)

    def start_sequence(self, sequence: SequenceState, priority: int = 0, namespace: str = "", deadline: float | None = None) -> None:
        alive = [client for client in self.clients if client.dead_reason is None] or self.clients
        ready = [client for client in alive if client.unavailable_reason is None] or alive
        loads = {self.clients.index(client): client.num_sequences for client in ready}
        away = {number for number, client in enumerate(self.clients) if client.unavailable_reason is not None}
        for number in self._away - away:  # its cache is empty
            self._chooser.forget_replica(number)
        self._away = away
        adapter = "" if (use := sequence.recovery.adapter) is None else use.version.digest
        chosen = self._chooser.choose_replica(sequence.prompt, namespace, loads, sequence.recovery.media, adapter)
        self.clients[chosen].start_sequence(sequence, priority, namespace, deadline)

    def abort_request(self, request: RequestState) -> None:
        for client in self.clients:
            client.abort_request(request)

    def abort_start(self, request: RequestState) -> None:
        for client in self.clients[1:]:
            client.abort_request(request)
        self.clients[0].abort_start(request)

    def abort_requests(self, names: list[str], owner: str | None = None) -> int:
        return sum(client.abort_requests(names, owner) for client in self.clients)

    def abort_unanswered(self, finish: Finish) -> None:
        for client in self.clients:
            client.abort_unanswered(finish)

    # state ----------------------------------------------------------------------------------------

    @property
    def _first(self) -> EngineClient:
        """The first client whose engine runs or is being restarted, else the first one."""
        return next((client for client in self.clients if client.dead_reason is None), self.clients[0])

    @property
    def dead_reason(self) -> str | None:
        return self._first.dead_reason

    @property
    def unavailable_reason(self) -> str | None:
        reasons = [client.unavailable_reason for client in self.clients if client.dead_reason is None]
        return None if not reasons or None in reasons else reasons[0]

    @property
    def commands(self) -> EngineCommands:
        """Those of the first client, for what all replicas have in common."""
        return self._first.commands

    @property
    def num_outstanding(self) -> int:
        return self._first.num_outstanding

    @property
    def load(self) -> Heartbeat | None:
        """The sum of the replicas' loads."""
        loads = [msgspec.structs.asdict(client.load) for client in self.clients if client.load is not None]
        return Heartbeat(**{**sum_loads(loads), "process": "engine"}) if loads else None

    async def send_command(self, action: Any, **arguments: Any) -> ControlReply:
        """The joined replies of all replicas. Raises EngineDeadError, TimeoutError."""
        if action == "update_weights":
            updated = await asyncio.shield(asyncio.ensure_future(self._updates.update(arguments)))  # never half of it
            for number in range(len(self.clients)):  # their caches are empty
                self._chooser.forget_replica(number)
            return updated
        alive = [client for client in self.clients if client.dead_reason is None]
        if action in READS:
            alive = [client for client in alive if client.unavailable_reason is None] or alive
        if not alive:
            raise EngineDeadError(self.clients[0].dead_reason)
        missing = next((client for client in alive if client.unavailable_reason is not None), None)
        if missing is not None and action not in STATES:
            raise EngineDeadError(f"replica {self.clients.index(missing)}: {missing.unavailable_reason}")
        send = _send_until_done if action in STATES else _send
        numbers = [self.clients.index(client) for client in alive]
        traces = action == "start_profile"  # each into a file of its own
        each = [{**arguments, "name": f"{arguments['name']}-replica{number}"} if traces else arguments for number in numbers]
        calls = [send(client, action, own) for client, own in zip(alive, each, strict=True)]
        replies = []
        for client, reply in zip(alive, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            where = f"replica {self.clients.index(client)}"
            if isinstance(reply, TimeoutError | EngineDeadError):
                raise type(reply)(f"{where}: {reply}")
            if isinstance(reply, BaseException):
                raise reply
            if not reply.ok:
                return msgspec.structs.replace(reply, error=f"{where}: {reply.error}")
            replies.append(reply)
        data = sum_loads([reply.data for reply in replies])
        if action == "server_info":
            data["replicas"] = [reply.data for reply in replies]
        return msgspec.structs.replace(replies[0], data=data)


def list_clients(client: EngineClient | ReplicaClient) -> Sequence[EngineClient]:
    """The client of each replica."""
    return client.clients if isinstance(client, ReplicaClient) else [client]
