"""Routing policies with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, ClassVar

from frame.interfaces.routing import RoutingCapabilities, RoutingContext, RoutingPolicy, RoutingRequest
from tests.testing.mutants import MutantList

MAX_KNOWN = 20_000
MAX_EXCESS = 8


class Sticky(RoutingPolicy):
    """A session's replica by rendezvous hashing; else the replica with most of the prompt, unless
    it has many more sequences than another; else the least loaded."""

    def __init__(self, context: RoutingContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.known: OrderedDict[int, set[int]] = OrderedDict()
        self.random = random.Random(context.seed)

    def rank(self, session: str, replica: int) -> Any:
        return blake2b(f"{replica}:{session}".encode("utf-8", "replace"), digest_size=8).digest()

    def count(self, blocks: Any, replica: int) -> int:
        number = 0
        for block in blocks:
            if replica not in self.known.get(block, ()):
                break
            number += 1
        return number

    def remember(self, blocks: Any, replica: int) -> None:
        for block in blocks:
            self.known.setdefault(block, set()).add(replica)
            self.known.move_to_end(block)
        while len(self.known) > MAX_KNOWN:
            self.known.popitem(last=False)

    def is_free(self, replica: int, loads: Mapping[int, int]) -> bool:
        return loads[replica] <= min(loads.values()) + MAX_EXCESS

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if request.session:
            return max(loads, key=lambda replica: self.rank(request.session, replica))
        free = [replica for replica in loads if self.is_free(replica, loads)]
        chosen = max(free, key=lambda replica: (self.get_share(request, replica), -loads[replica]))
        request.notes[chosen] = self.count(request.blocks, chosen)
        self.remember(request.blocks, chosen)
        return chosen

    def get_share(self, request: RoutingRequest, replica: int) -> float:
        told = request.cached.get(replica)
        return self.count(request.blocks, replica) / max(1, len(request.blocks)) if told is None else told

    def forget_request(self, request: RoutingRequest, replica: int) -> None:
        for block in request.blocks[request.notes.get(replica, len(request.blocks)) :]:
            self.known.get(block, set()).discard(replica)

    def forget_replica(self, replica: int) -> None:
        for holders in self.known.values():
            holders.discard(replica)


mutant = MUTANTS = MutantList(
    "routing_policy", reference=Sticky, capabilities=RoutingCapabilities(avoids_load=True, keeps_prefixes=True, keeps_sessions=True)
)


@mutant
class CountsReplicas(Sticky):
    """Takes the number of replicas for their numbers, so that it chooses one that is away."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        chosen = super().choose_replica(request, loads)
        return chosen if len(loads) > 1 else 0


@mutant
class KnowsTheFirstReplicas(Sticky):
    """Chooses among the replicas of the first request only."""

    first: Any = None

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        self.first = self.first or set(loads)
        return super().choose_replica(request, {replica: load for replica, load in loads.items() if replica in self.first} or loads)


@mutant
class CountsInTheLoads(Sticky):
    """Adds the request to the caller's loads, which counts it itself."""

    def choose_replica(self, request: RoutingRequest, loads: Any) -> int:
        chosen = super().choose_replica(request, loads)
        loads[chosen] += 1
        return chosen


@mutant
class HasBitsForSixtyFour(Sticky):
    """Keeps holders in a word of 64 bits, and fails for replica 64."""

    def remember(self, blocks: Any, replica: int) -> None:
        super().remember(blocks, replica)
        (1 << replica).to_bytes(8, "big")


@mutant
class TakesTheMostLoaded(Sticky):
    """Breaks ties by the greater load."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if request.session:
            return super().choose_replica(request, loads)
        chosen = max(loads, key=lambda replica: (self.count(request.blocks, replica), loads[replica]))
        self.remember(request.blocks, chosen)
        return chosen


@mutant
class IgnoresLoad(Sticky):
    """Sends a prompt to its holder whatever the load there."""

    def is_free(self, replica: int, loads: Mapping[int, int]) -> bool:
        return True


@mutant
class ComparesLoadsAsShares(Sticky):
    """Calls a replica free that has less than ten times the least load, which is no bound for a
    least load of a few."""

    def is_free(self, replica: int, loads: Mapping[int, int]) -> bool:
        return loads[replica] <= 200 * (min(loads.values()) + 1)


@mutant
class RemembersAll(Sticky):
    """Remembers every block, and drops none."""

    def remember(self, blocks: Any, replica: int) -> None:
        for block in blocks:
            self.known.setdefault(block, set()).add(replica)


@mutant
class RemembersSessions(Sticky):
    """Keeps every session for ever."""

    def __init__(self, context: RoutingContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.homes: dict[str, int] = {}

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if request.session and self.homes.get(request.session) not in loads:
            self.homes[request.session] = super().choose_replica(request, loads)
        return self.homes[request.session] if request.session else super().choose_replica(request, loads)


@mutant
class SharesItsMemory(Sticky):
    """Keeps what replicas hold in the class."""

    shared: ClassVar[OrderedDict[int, set[int]]] = OrderedDict()

    def __init__(self, context: RoutingContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.known = self.shared


@mutant
class ForgetsNothing(Sticky):
    """Sends prompts to a replica that was started again as if its cache were full."""

    def forget_replica(self, replica: int) -> None: ...


@mutant
class ForgetsAll(Sticky):
    """Drops what all replicas hold when one is started again."""

    def forget_replica(self, replica: int) -> None:
        self.known.clear()


@mutant
class FailsToForgetTheUnknown(Sticky):
    """Fails when a replica is started again that has got no request."""

    def __init__(self, context: RoutingContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.seen: set[int] = set()

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        chosen = super().choose_replica(request, loads)
        self.seen.add(chosen)
        return chosen

    def forget_replica(self, replica: int) -> None:
        super().forget_replica(replica)
        self.seen.remove(replica)


@mutant
class BansWhatItForgot(Sticky):
    """Never chooses a replica again that was started again."""

    def __init__(self, context: RoutingContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.banned: set[int] = set()

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        return super().choose_replica(request, {each: load for each, load in loads.items() if each not in self.banned} or loads)

    def forget_replica(self, replica: int) -> None:
        super().forget_replica(replica)
        self.banned.add(replica)


@mutant.survives("a hash covers the prompt from its start: a replica that had a later block had those before it")
class CountsAnyBlock(Sticky):
    """Counts all blocks that a replica knows, in place of those from the start on."""

    def count(self, blocks: Any, replica: int) -> int:
        return sum(replica in self.known.get(block, ()) for block in blocks)


@mutant
class ComparesTheFirstBlock(Sticky):
    """Compares the first block of a prompt only."""

    def count(self, blocks: Any, replica: int) -> int:
        return super().count(blocks[:1], replica)


@mutant
class ComparesTheLastBlock(Sticky):
    """Looks for the whole prompt, so that the next turn of a conversation is unknown."""

    def count(self, blocks: Any, replica: int) -> int:
        return len(blocks) if blocks and replica in self.known.get(blocks[-1], ()) else 0


@mutant
class RemembersTheBeginning(Sticky):
    """Remembers four blocks of a prompt."""

    def remember(self, blocks: Any, replica: int) -> None:
        super().remember(blocks[:2], replica)


@mutant
class HasOneHolder(Sticky):
    """Remembers one holder of a block, the last one."""

    def remember(self, blocks: Any, replica: int) -> None:
        super().remember(blocks, replica)
        for block in blocks:
            self.known[block] = {replica}


@mutant
class TruncatesSessions(Sticky):
    """Compares the first 64 characters of a session's name."""

    def rank(self, session: str, replica: int) -> Any:
        return super().rank(session[:64], replica)


@mutant
class HashesByTheCount(Sticky):
    """Takes a session's hash modulo the number of replicas, so that most sessions move when one
    comes or goes."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if request.session:
            return sorted(loads)[int.from_bytes(self.rank(request.session, 0), "big") % len(loads)]
        return super().choose_replica(request, loads)


@mutant
class MovesBusySessions(Sticky):
    """Moves a session when its replica has more sequences than another."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        free = {each: load for each, load in loads.items() if load <= min(loads.values()) + 2}
        return super().choose_replica(request, free if request.session else loads)


@mutant
class TakesTheNextReplica(Sticky):
    """Sends all sessions of a replica that left to the one after it."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if not request.session:
            return super().choose_replica(request, loads)
        home = int.from_bytes(self.rank(request.session, 0), "big") % 4
        return min(loads, key=lambda replica: (replica - home) % (1 << 20))


@mutant
class NeedsText(Sticky):
    """Fails for a session's name that is not valid text."""

    def rank(self, session: str, replica: int) -> Any:
        return super().rank(session, replica) + session.encode()[:0]


@mutant
class NeedsABlock(Sticky):
    """Fails for a prompt that is shorter than a block."""

    def remember(self, blocks: Any, replica: int) -> None:
        super().remember([*blocks[:-1], blocks[-1]], replica)


@mutant
class SortsAll(Sticky):
    """Sorts all that it knows in each choice among many replicas."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if len(loads) > 32:
            sorted(self.known)
        return super().choose_replica(request, loads)


@mutant
class AsksAReplica(Sticky):
    """Waits for a moment in each choice among many replicas, as for the answer of one."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if len(loads) > 32:
            time.sleep(0.003)
        return super().choose_replica(request, loads)


@mutant
class ReturnsAPosition(Sticky):
    """Returns the position of the replica among those offered."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        return [*loads].index(super().choose_replica(request, loads))


@mutant
class DrawsFromAll(Sticky):
    """Draws from the random state of the process, so that two servers' choices depend on each
    other."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if request.session or random.random() < 0.9:
            return super().choose_replica(request, loads)
        return random.choice([*loads])


@mutant
class TakesZeroForUnknown(Sticky):
    """Estimates the share of a replica whose cache tells that it has nothing."""

    def get_share(self, request: RoutingRequest, replica: int) -> float:
        return request.cached.get(replica) or super().get_share(RoutingRequest(request.blocks), replica)


@mutant
class TakesUnknownForZero(Sticky):
    """Takes the share of replicas that tell none for zero where others tell theirs."""

    def get_share(self, request: RoutingRequest, replica: int) -> float:
        return request.cached.get(replica, 0.0) if request.cached else super().get_share(request, replica)


@mutant
class TakesTheBestToldReplica(Sticky):
    """Takes the replica with the greatest told share, also one that is not offered."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        best = max(request.cached, key=request.cached.__getitem__, default=None)
        if best is not None and loads.get(best, 0) <= min(loads.values()) + MAX_EXCESS:
            return best
        return super().choose_replica(request, loads)


@mutant
class SendsTheToldAnyway(Sticky):
    """Sends a prompt to the replica whose cache has nearly all of it, whatever the load there."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        told = {replica for replica in loads if request.cached.get(replica, 0.0) >= 0.9}
        return super().choose_replica(request, {each: load for each, load in loads.items() if each in told} or loads)


@mutant
class FoldsNumbers(Sticky):
    """Has 64 places for replicas, and takes replica 64 for replica 0."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        folded: dict[int, int] = {}
        for replica in loads:
            folded.setdefault(replica % 64, replica)
        told = {replica % 64: share for replica, share in request.cached.items() if replica in loads}
        inner = RoutingRequest(request.blocks, request.session, told, request.notes)
        return folded[super().choose_replica(inner, {place: loads[replica] for place, replica in folded.items()})]

    def forget_request(self, request: RoutingRequest, replica: int) -> None:
        super().forget_request(request, replica % 64)

    def forget_replica(self, replica: int) -> None:
        super().forget_replica(replica % 64)


@mutant
class ForgetsWholePrompts(Sticky):
    """Forgets the beginning of a refused prompt too, which the replica had before."""

    def forget_request(self, request: RoutingRequest, replica: int) -> None:
        super().forget_request(RoutingRequest(request.blocks, notes={replica: 0}), replica)


@mutant
class KeepsRefusedRequests(Sticky):
    """Counts a refused request as sent."""

    def forget_request(self, request: RoutingRequest, replica: int) -> None: ...


@mutant
class NotesTheLastChoice(Sticky):
    """Keeps the notes of the last choice, which another request may have made since."""

    last: Any = None

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        chosen = super().choose_replica(request, loads)
        self.last = request.notes
        return chosen

    def forget_request(self, request: RoutingRequest, replica: int) -> None:
        count = next(iter(self.last.values()), 0)
        super().forget_request(RoutingRequest(request.blocks, notes={replica: count}), replica)


@mutant
class KeepsTheSubstitute(Sticky):
    """Leaves a session on the replica that it got while its own was away."""

    def __init__(self, context: RoutingContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.homes: OrderedDict[str, int] = OrderedDict()

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if request.session and self.homes.get(request.session) in loads:
            return self.homes[request.session]
        chosen = super().choose_replica(request, loads)
        if request.session:
            self.homes[request.session] = chosen
            while len(self.homes) > 1000:
                self.homes.popitem(last=False)
        return chosen
