"""Routing policies: by the longest known beginning of a prompt, by sessions, and policies
with a bug each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from hashlib import blake2b
from typing import ClassVar, cast
from zlib import crc32

from pydantic import BaseModel

from frame.interfaces.routing import RoutingCapabilities, RoutingContext, RoutingPolicy, RoutingRequest
from tests.testing.held_out import Wrong

MAX_BLOCKS = 50_000
MAX_EXCESS = 8


class LongestBeginning(RoutingPolicy):
    """The replica that had the longest beginning of the prompt, unless its load is high."""

    capabilities: ClassVar[RoutingCapabilities] = RoutingCapabilities(keeps_prefixes=True)

    def __init__(self, context: RoutingContext, options: BaseModel | None = None) -> None:
        self.homes: OrderedDict[int, int] = OrderedDict()
        self.generation: dict[int, int] = {}

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        least = min(loads, key=lambda replica: (loads[replica], replica))
        home = next((self.homes[block] for block in reversed(request.blocks) if self.is_home(block, loads)), least)
        chosen = home if self.may_keep(home, least, loads) else least
        for block in request.blocks:
            self.homes[block] = chosen
            self.homes.move_to_end(block)
        self.trim()
        return chosen

    def is_home(self, block: int, loads: Mapping[int, int]) -> bool:
        return self.homes.get(block) in loads

    def may_keep(self, home: int, least: int, loads: Mapping[int, int]) -> bool:
        return loads[home] <= loads[least] + MAX_EXCESS

    def trim(self) -> None:
        while len(self.homes) > MAX_BLOCKS:
            self.homes.popitem(last=False)

    def forget_replica(self, replica: int) -> None:
        self.homes = OrderedDict((block, home) for block, home in self.homes.items() if home != replica)


class SessionHash(RoutingPolicy):
    """Rendezvous hashing: when a replica leaves, its sessions alone move."""

    capabilities: ClassVar[RoutingCapabilities] = RoutingCapabilities(avoids_load=False, keeps_sessions=True)

    def __init__(self, context: RoutingContext, options: BaseModel | None = None) -> None: ...

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if not request.session:
            return min(loads, key=lambda replica: (loads[replica], replica))
        return max(loads, key=lambda replica: (self.weigh(request.session, replica), replica))

    def weigh(self, session: str, replica: int) -> int:
        data = f"{replica}:{session}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(data, digest_size=8).digest())


TWIN = LongestBeginning
TWINS = (LongestBeginning, SessionHash)
WRONG = Wrong()


@WRONG.add("The router's memory grows with each prompt until it is killed: nothing is dropped.")
class NeverTrims(LongestBeginning):
    def trim(self) -> None:
        return


@WRONG.add("Conversations lose their cached prefix to others: homes are in a table of 1,024 places, which hashes share.")
class SmallTable(LongestBeginning):
    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        return super().choose_replica(RoutingRequest([block % 1024 for block in request.blocks], request.session), loads)


@WRONG.add("Requests fail with an unknown replica after a server is taken out: the remembered home is not checked.")
class StaleHome(LongestBeginning):
    def is_home(self, block: int, loads: Mapping[int, int]) -> bool:
        return block in self.homes

    def may_keep(self, home: int, least: int, loads: Mapping[int, int]) -> bool:
        return loads.get(home, 0) <= loads[least] + MAX_EXCESS


@WRONG.add("Conversations stay on a restarted server whose cache is empty, though another one is idle: it is not forgotten.")
class NeverForgets(LongestBeginning):
    def forget_replica(self, replica: int) -> None:
        return


@WRONG.add("One restarted server makes the caches of all others unknown: everything is forgotten.")
class ForgetsAll(LongestBeginning):
    def forget_replica(self, replica: int) -> None:
        self.homes.clear()


@WRONG.add("With few requests prompts jump between servers and are computed again: a home may have twice the least load, which is 0.")
class TwiceTheLeast(LongestBeginning):
    def may_keep(self, home: int, least: int, loads: Mapping[int, int]) -> bool:
        return loads[home] <= 2 * loads[least]


@WRONG.add("All requests wait for a choice once many prompts are known: the oldest home is found by a walk over all of them.")
class WalksHomes(LongestBeginning):
    def trim(self) -> None:
        counts: dict[int, int] = {}
        for home in self.homes.values():
            counts[home] = counts.get(home, 0) + 1
        super().trim()


@WRONG.add("One server gets all requests of a common system prompt and stands in line while others idle: load is not looked at.")
class IgnoresLoad(LongestBeginning):
    def may_keep(self, home: int, least: int, loads: Mapping[int, int]) -> bool:
        return True


@WRONG.add("Loads drift away from the truth until a server gets no requests: the policy counts its choice in the caller's loads.")
class CountsInLoads(LongestBeginning):
    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        chosen = super().choose_replica(request, loads)
        cast("MutableMapping[int, int]", loads)[chosen] += 1
        return chosen


@WRONG.add("Two routers, or one after a restart, send a session to different servers: Python's hash is another one in each process.")
class ProcessHash(SessionHash):
    def weigh(self, session: str, replica: int) -> int:
        return hash((session, replica))


@WRONG.add("When one server leaves, nearly all sessions move and lose their cache: sessions are numbered modulo the servers.")
class ModuloServers(SessionHash):
    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if not request.session:
            return super().choose_replica(request, loads)
        return sorted(loads)[crc32(request.session.encode()) % len(loads)]


@WRONG.add("Sessions whose names begin alike, such as those of one application, all go to one server: names are cut to 16 characters.")
class CutsSessions(SessionHash):
    def weigh(self, session: str, replica: int) -> int:
        return super().weigh(session[:16], replica)
