"""`ReplicaClient`: the clients of data-parallel replicas as one client, for the HTTP and gRPC
servers.

Each sequence runs on one replica, chosen by load and by cached prefix. The clients share their
counters and names (`Outstanding`); recovery is that of the replica. A replica that ends for good
ends its own sequences only. Must not know a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import ControlReply, Heartbeat
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.parallel.replica_choice import ReplicaChooser, sum_loads

READS = ("server_info", "outline_cache", "ping")  # commands that change nothing: a replica may be missing


class ReplicaClient:
    """Has the methods of `EngineClient` that servers use."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = clients
        self.limits, self.stats = clients[0].limits, clients[0].stats
        self._chooser = ReplicaChooser()
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
        chosen = self._chooser.choose_replica(sequence.prompt, f"{namespace}{adapter}", loads)
        self.clients[chosen].start_sequence(sequence, priority, namespace, deadline)

    def abandon_request(self, request: RequestState) -> None:
        for client in self.clients:
            client.abandon_request(request)

    def cancel_request(self, request: RequestState) -> None:
        for client in self.clients[1:]:
            client.abandon_request(request)
        self.clients[0].cancel_request(request)

    def abort_requests(self, names: list[str], owner: str | None = None) -> int:
        return sum(client.abort_requests(names, owner) for client in self.clients)

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
    def num_outstanding(self) -> int:
        return self._first.num_outstanding

    @property
    def load(self) -> Heartbeat | None:
        """The sum of the replicas' loads."""
        loads = [msgspec.structs.asdict(client.load) for client in self.clients if client.load is not None]
        return Heartbeat(**{**sum_loads(loads), "process": "engine"}) if loads else None

    async def send_command(self, action: Any, **arguments: Any) -> ControlReply:
        """The joined replies of all replicas. Raises EngineDeadError, TimeoutError."""
        alive = [client for client in self.clients if client.dead_reason is None]
        if action in READS:
            alive = [client for client in alive if client.unavailable_reason is None] or alive
        if not alive:
            raise EngineDeadError(self.clients[0].dead_reason)
        if (missing := next((client for client in alive if client.unavailable_reason is not None), None)) is not None:
            raise EngineDeadError(f"replica {self.clients.index(missing)}: {missing.unavailable_reason}")
        names = [{"name": f"{arguments['name']}-replica{self.clients.index(client)}"} if "name" in arguments else {} for client in alive]
        calls = [client.send_command(action, **{**arguments, **name}) for client, name in zip(alive, names, strict=True)]
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
