"""`ReplicaClient`: the clients of data-parallel replicas as one client, for the HTTP and gRPC
servers.

Each sequence runs on one replica, chosen by load and by cached prefix. The clients share their
counters and names (`Outstanding`); recovery is that of the replica. A replica that ends for good
ends its own sequences only. Knows no process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import ControlReply, Heartbeat
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState

BLOCK = 128  # tokens of a prompt that are compared together
MOST_BLOCKS = 32  # of a prompt
MOST_PREFIXES = 65_536  # blocks remembered, the most recently used
LOAD_WEIGHT = 1.0  # score lost by a replica with a mean load more than the least; less would never move a whole prompt from one of two
SLACK = 4  # sequences; a smaller difference is no load
READS = ("server_info", "outline_cache", "ping")  # commands that change nothing: a replica may be missing


class ReplicaChooser:
    """Chooses the replica of a prompt: the one with the greatest share of the prompt in its cache
    less its relative load. What replicas have cached is estimated from earlier choices."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[int, int] = OrderedDict()  # hash of a prefix of whole blocks -> a bit for each replica chosen for it

    def choose_replica(self, prompt: Sequence[int], namespace: str, loads: Mapping[int, int]) -> int:
        """`loads`: outstanding sequences by replica, of those that take requests."""
        return self.choose_by_blocks(_hash_blocks(prompt, namespace), loads)

    def choose_by_blocks(self, blocks: Sequence[int], loads: Mapping[int, int]) -> int:
        """`blocks`: a hash of each prefix of the prompt, the shortest first."""
        matched, held = dict.fromkeys(loads, 0), -1
        for number, block in enumerate(blocks, 1):
            held &= self._replicas.get(block, 0)
            if not held:
                break
            matched |= {replica: number for replica in loads if held >> replica & 1}
        least, mean = min(loads.values()), sum(loads.values()) / len(loads)

        def score(replica: int) -> float:
            excess = max(0, loads[replica] - least - SLACK)
            return matched[replica] / max(1, len(blocks)) - LOAD_WEIGHT * excess / max(1.0, mean)

        chosen = max(loads, key=lambda replica: (score(replica), -loads[replica]))
        for block in blocks:
            self._replicas[block] = self._replicas.get(block, 0) | 1 << chosen
            self._replicas.move_to_end(block)
        while len(self._replicas) > MOST_PREFIXES:
            self._replicas.popitem(last=False)
        return chosen

    def forget_replica(self, replica: int) -> None:
        """Its cache is empty: it was started again."""
        self._replicas = OrderedDict((block, left) for block, held in self._replicas.items() if (left := held & ~(1 << replica)))


def _hash_blocks(prompt: Sequence[int], namespace: str) -> list[int]:
    """A hash of each prefix of whole blocks."""
    found, last = [], hash(namespace)
    for start in range(0, min(len(prompt), MOST_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
        last = hash((last, *prompt[start : start + BLOCK]))
        found.append(last)
    return found


class ReplicaClient:
    """Has the methods of `EngineClient` that servers use."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = clients
        self.limits, self.stats = clients[0].limits, clients[0].stats
        self._chooser = ReplicaChooser()

    # submit
    # ----------------------------------------------------------------------------------------------

    def reserve_sequences(self, count: int) -> None:
        self._first.reserve_sequences(count)

    def release_sequences(self, count: int) -> None:
        self._first.release_sequences(count)

    def check_params(self, params: SamplingParams) -> None:
        self._first.check_params(params)

    def check_prompt(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self._first.check_prompt(prompt, params)

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
        chosen = self._chooser.choose_replica(sequence.prompt, namespace, loads)
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

    # state
    # ----------------------------------------------------------------------------------------------

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
        found = [msgspec.structs.asdict(client.load) for client in self.clients if client.load is not None]
        return Heartbeat(**{**sum_loads(found), "process": "engine"}) if found else None

    async def send_command(self, action: Any, **arguments: Any) -> ControlReply:
        """Send one command to all replicas and return their replies as one. Raises EngineDeadError,
        TimeoutError."""
        alive = [client for client in self.clients if client.dead_reason is None]
        if action in READS:
            alive = [client for client in alive if client.unavailable_reason is None] or alive
        if not alive:
            raise EngineDeadError(self.clients[0].dead_reason)
        if (missing := next((client.unavailable_reason for client in alive if client.unavailable_reason is not None), None)) is not None:
            raise EngineDeadError(missing)
        names = [{"name": f"{arguments['name']}-replica{self.clients.index(client)}"} if "name" in arguments else {} for client in alive]
        calls = [client.send_command(action, **{**arguments, **own}) for client, own in zip(alive, names, strict=True)]
        replies = await asyncio.gather(*calls)
        failed = next((reply for reply in replies if not reply.ok), None)
        if failed is not None:
            return failed
        data = sum_loads([reply.data for reply in replies])
        if action == "server_info":
            data["replicas"] = [reply.data for reply in replies]
        return msgspec.structs.replace(replies[0], data=data)


_COUNTS = frozenset(field.name for field in msgspec.structs.fields(Heartbeat) if field.type in (int, float)) | {"pages", "max_total_tokens"}


def sum_loads(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The data of several engines as one's: counts are added, the rest is the first engine's."""
    total = dict(parts[0])
    for name in total:
        values = [part[name] for part in parts if name in part]
        if name in _COUNTS:
            total[name] = sum(values)
        elif name == "accepted_at":
            total[name] = [sum(column) for column in zip_longest(*values, fillvalue=0)]
        elif name == "groups":
            total[name] = [_sum_groups(same) for same in zip(*values, strict=False)]
    return total


def _sum_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(group[name] for group in groups) if name != "group" else value for name, value in groups[0].items()}
