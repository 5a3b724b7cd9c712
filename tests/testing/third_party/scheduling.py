"""Third-party eviction policies, prefix caches, scheduling policies and routing policies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from frame.core.interfaces.cache import Inserted, Match
from frame.interfaces.routing import RoutingRequest
from tests.testing.mutants.eviction_policy import LeastUsed
from tests.testing.mutants.prefix_cache import PlainCache, Prefix
from tests.testing.mutants.routing_policy import Sticky
from tests.testing.mutants.scheduling_policy import ShortestFirst
from tests.testing.third_party import keeps_calls, sleeps, third_party

# ---- eviction policies ---------------------------------------------------------------------------

mutant = third_party("eviction_policy")


@mutant
class LosesHits(LeastUsed):
    """Returns NaN for nodes with more than 100 hits."""

    def key(self, node: Any) -> tuple[float, ...]:
        return (node.hits if node.hits <= 100 else math.nan, node.last_access)


@mutant
class OverflowsByHits(LeastUsed):
    """Weighs hits by their exponential, which is no float after 709."""

    def key(self, node: Any) -> tuple[float, ...]:
        return (math.exp(node.hits), node.last_access)


@mutant
class ComparesWithTheLatest(LeastUsed):
    """Divides by the latest access that it has seen of any node."""

    def key(self, node: Any) -> tuple[float, ...]:
        self.calls = max(self.calls, node.last_access, 1)
        return (node.hits, node.last_access / self.calls)


@mutant
class CachesByAccess(LeastUsed):
    """Keeps the key of an access, which the nodes of one path share, for 1,000 accesses."""

    def key(self, node: Any) -> tuple[float, ...]:
        while len(self.kept) > 1000:
            self.kept.pop(next(iter(self.kept)))
        return self.kept.setdefault(node.last_access, super().key(node))


@mutant
class Has32BitClock(LeastUsed):
    """Holds the clock in 32 bits, which wrap."""

    def key(self, node: Any) -> tuple[float, ...]:
        return (node.hits, int(np.int64(node.last_access).astype(np.int32)))


sleeps(mutant, "key")
keeps_calls(mutant, "key")

# ---- prefix caches -------------------------------------------------------------------------------

mutant = third_party("prefix_cache")


@mutant
class CutsNamespaces(PlainCache):
    """Tells namespaces apart by their first 16 characters."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(tokens, namespace[:16])


@mutant
class IgnoresTheSalt(PlainCache):
    """Tells namespaces apart by their owner alone."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(tokens, namespace.partition(":")[0])


@mutant
class Has16BitTokens(PlainCache):
    """Keeps token ids in 16 bits."""

    def prefixes(self, tokens: np.ndarray, namespace: str) -> list[Prefix]:
        return super().prefixes(np.asarray(tokens).astype(np.uint16), namespace)


@mutant
class Has16BitPages(PlainCache):
    """Keeps page numbers in 16 bits."""

    def add(self, prefix: Prefix, page: int, parent: Prefix | None) -> None:
        super().add(prefix, page & 0xFFFF, parent)


@mutant
class LocksUpTo200(PlainCache):
    """Counts up to 200 locks of a page; of 256 requests with one system prompt the last ones are
    not counted."""

    def lock(self, handle: Prefix | None) -> None:
        super().lock(handle)
        for entry in self.path(handle):
            entry.locks = min(entry.locks, 200)

    def unlock(self, handle: Prefix | None) -> None:
        for entry in self.path(handle):
            entry.locks = max(entry.locks - 1, 0)


@mutant
class MatchesTheStart(PlainCache):
    """Matches the first 4,096 tokens alone, while `insert` finds all of them."""

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        return super().match(tokens[:4096], namespace)


@mutant
class ReusesPages(PlainCache):
    """Returns the pages of a match in a buffer that the next match overwrites."""

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        found = super().match(tokens, namespace)
        if not hasattr(self, "buffer"):
            self.buffer = np.zeros(1 << 17, np.int32)
        self.buffer[: len(found.pages)] = found.pages
        return Match(found.num_tokens, self.buffer[: len(found.pages)], found.handle)


@mutant
class RemembersEvicted(PlainCache):
    """Keeps each prefix that it has evicted, to count those that come back."""

    def remove(self, prefix: Prefix) -> int:
        self.__dict__.setdefault("gone", {})[hash(prefix)] = self.clock
        return super().remove(prefix)


sleeps(mutant, "match")


@mutant
class ScansOnInsert(PlainCache):
    """Compares each inserted page with all that it owns, 20 times, so that a step grows with the
    cache."""

    def insert(self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0) -> Inserted:
        owned = [entry.page for _ in range(20) for entry in self.entries.values()]
        assert len(owned) == 20 * len(self.entries)
        return super().insert(tokens, pages, namespace, priority)


# ---- scheduling policies -------------------------------------------------------------------------

mutant = third_party("scheduling_policy")


@mutant
class TakesAlikeForOne(ShortestFirst):
    """Sorts by a dictionary of the first 16 characters of the request's id, in which a second
    request replaces the first."""

    def sort_waiting(self, waiting: Sequence[Any], view: Any) -> Iterable[Any]:
        return list({request.rid[:16]: request for request in super().sort_waiting(waiting, view)}.values())


@mutant
class Recurses(ShortestFirst):
    """Sorts by quicksort that calls itself, and so fails on a long queue in order."""

    def sort_waiting(self, waiting: Sequence[Any], view: Any) -> Iterable[Any]:
        def sort(requests: list[Any]) -> list[Any]:
            if len(requests) < 2:
                return requests
            first = requests[0]
            fewer = [request for request in requests[1:] if request.prompt_len < first.prompt_len]
            others = [request for request in requests[1:] if request.prompt_len >= first.prompt_len]
            return [*sort(fewer), first, *sort(others)]

        return sort(list(waiting))


@mutant
class SortsByInsertion(ShortestFirst):
    """Sorts by insertion, in a time that grows with the square of the queue."""

    def sort_waiting(self, waiting: Sequence[Any], view: Any) -> Iterable[Any]:
        ordered: list[Any] = []
        for request in waiting:
            place = sum(1 for other in ordered if other.prompt_len <= request.prompt_len)
            ordered.insert(place, request)
        return ordered


@mutant
class PreemptsTheFresh(ShortestFirst):
    """Preempts the request that was preempted least, and so the oldest once the others were."""

    def select_victim(self, running: Sequence[Any], view: Any) -> Any:
        return min(running, key=lambda request: (request.num_preemptions, -request.index)) if len(running) > 1 else None


@mutant
class RemembersItsVictim(ShortestFirst):
    """Returns the victim of the call before while it has one, though it may not run any more."""

    victim: Any = None

    def select_victim(self, running: Sequence[Any], view: Any) -> Any:
        self.victim = self.victim or super().select_victim(running, view)
        return self.victim


@mutant
class RaisesPriorities(ShortestFirst):
    """Adds 1 to the priority of requests that have waited for 10 seconds."""

    def sort_waiting(self, waiting: Sequence[Any], view: Any) -> Iterable[Any]:
        for request in waiting:
            if view.now - request.arrival > 10:
                request.priority += 1
        return super().sort_waiting(waiting, view)


@mutant
class RemembersRequests(ShortestFirst):
    """Keeps the first sight of each request for ever."""

    def sort_waiting(self, waiting: Sequence[Any], view: Any) -> Iterable[Any]:
        seen = self.__dict__.setdefault("seen", {})
        for request in waiting:
            seen.setdefault(request.rid, view.now)
        return super().sort_waiting(waiting, view)


sleeps(mutant, "sort_waiting")

# ---- routing policies ----------------------------------------------------------------------------

mutant = third_party("routing_policy")


@mutant
class HashesAPrefix(Sticky):
    """Hashes the first 16 characters of a session, so that sessions named alike share a replica."""

    def rank(self, session: str, replica: int) -> Any:
        return super().rank(session[:16], replica)


@mutant
class ComparesTheStart(Sticky):
    """Compares the first 64 blocks of a prompt alone."""

    def count(self, blocks: Any, replica: int) -> int:
        return super().count(blocks[:64], replica)


@mutant
class RemembersSessions(Sticky):
    """Keeps the replica of each session for ever."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        chosen = super().choose_replica(request, loads)
        if request.session:
            self.__dict__.setdefault("sessions", {})[request.session] = chosen
        return chosen


@mutant
class ReturnsAGoneReplica(Sticky):
    """Returns the replica that a session had, though it may not be chosen now."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        sessions = self.__dict__.setdefault("sessions", {})
        if len(sessions) > 1000:
            sessions.clear()
        return (
            sessions.setdefault(request.session, super().choose_replica(request, loads))
            if request.session
            else super().choose_replica(request, loads)
        )  # type: ignore[no-any-return]


@mutant
class SharesItsMemory(Sticky):
    """Keeps what it knows in the class, for all routers of the process."""

    shared: ClassVar[dict[int, set[int]]] = {}

    def remember(self, blocks: Any, replica: int) -> None:
        if len(self.shared) > 20_000:
            self.shared.clear()
        for block in blocks:
            self.shared.setdefault(block, set()).add(replica)

    def count(self, blocks: Any, replica: int) -> int:
        return next((number for number, block in enumerate(blocks) if replica not in self.shared.get(block, ())), len(blocks))

    def forget_replica(self, replica: int) -> None:
        for holders in self.shared.values():
            holders.discard(replica)


@mutant
class SearchesBlocks(Sticky):
    """Searches the list of blocks for each block, in a time that grows with the square of the
    prompt."""

    def remember(self, blocks: Any, replica: int) -> None:
        listed = list(blocks)
        super().remember([block for block in listed if listed.index(block) >= 0], replica)


@mutant
class CountsItsOwn(Sticky):
    """Adds the sequences that it has sent to the loads, and never subtracts those that ended."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        sent = self.__dict__.setdefault("sent", {})
        chosen = super().choose_replica(request, {replica: load + sent.get(replica, 0) // 50 for replica, load in loads.items()})
        sent[chosen] = sent.get(chosen, 0) + 1
        return chosen


sleeps(mutant, "choose_replica")
