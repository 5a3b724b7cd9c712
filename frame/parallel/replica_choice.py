"""`ReplicaChooser` and `sum_loads`: several schedulers behind one address, which are those of
replicas or of attention groups.

Used by the server's client, by the scheduler of attention groups and by the router. Must not know a
routing policy by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from frame.core.blame import describe, remedy
from frame.core.interfaces.media import MediaItem
from frame.core.messages import Heartbeat
from frame.interfaces.routing import RoutingPolicy, RoutingRequest

log = logging.getLogger(__name__)

BLOCK = 128  # tokens of a prompt that are compared together
MAX_BLOCKS = 32  # of a prompt


class ReplicaChooser:
    """Asks a routing policy for the replica of a request. A policy that fails, or names a replica
    that cannot be chosen, is not asked again: from then on, and without a policy, the least loaded
    replica is chosen."""

    def __init__(self, policy: RoutingPolicy | None) -> None:
        self._policy = policy

    def choose_replica(
        self, prompt: Sequence[int], namespace: str, loads: Mapping[int, int], media: Sequence[MediaItem] = (), adapter: str = ""
    ) -> int:
        """`loads`: outstanding sequences by replica, of those that take requests. `adapter`: the
        digest of the request's adapter."""
        return self.choose(RoutingRequest(_hash_blocks(prompt, namespace, media, adapter)), loads)

    def choose(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        """The replica of a request, one of `loads`."""
        if self._policy is not None:
            try:
                chosen = self._policy.choose_replica(request, loads)
                if chosen in loads:
                    return chosen
                self._give_up(self._policy, f"chose replica {chosen!r} of {[*loads]}")
            except Exception as error:  # noqa: BLE001 - third-party code must not end the requests
                self._give_up(self._policy, f"failed ({type(error).__name__}: {error})", error)
        return min(loads, key=loads.__getitem__)

    @property
    def has_policy(self) -> bool:
        """Whether a policy is asked."""
        return self._policy is not None

    def forget_request(self, request: RoutingRequest, replica: int) -> None:
        """The replica refused the request."""
        self._tell(f"a request of replica {replica}", lambda policy: policy.forget_request(request, replica))

    def forget_replica(self, replica: int) -> None:
        """Its cache is empty: it was started again."""
        self._tell(f"replica {replica}", lambda policy: policy.forget_replica(replica))

    def _tell(self, what: str, forget: Callable[[RoutingPolicy], None]) -> None:
        if self._policy is not None:
            try:
                forget(self._policy)
            except Exception as error:  # noqa: BLE001 - third-party code must not end the requests
                self._give_up(self._policy, f"failed to forget {what} ({type(error).__name__}: {error})", error)

    def _give_up(self, policy: RoutingPolicy, sentence: str, error: Exception | None = None) -> None:
        self._policy = None
        log.error(
            "%s %s; the replica with the least load is chosen from now on; %s", describe(policy), sentence, remedy(policy), exc_info=error
        )


def _hash_blocks(prompt: Sequence[int], namespace: str, media: Sequence[MediaItem], adapter: str) -> list[int]:
    """A hash of each prefix of whole blocks. An adapter counts as a block before the prompt, which
    every namespace shares: a replica that has served it holds its weights. An item counts in the
    block in which it begins: those after it contain it, and its digest stands for what no token id
    shows."""
    hashes, last = [hash(adapter)] if adapter else [], hash((namespace, adapter))
    begun: dict[int, tuple[bytes, ...]] = {}
    for item in media:
        block = item.runs[0].start // BLOCK if item.runs else 0
        begun[block] = (*begun.get(block, ()), item.digest)
    for start in range(0, min(len(prompt), MAX_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
        last = hash((last, *begun.get(start // BLOCK, ()), *prompt[start : start + BLOCK]))
        hashes.append(last)
    return hashes


_OTHERS = {"pages", "max_total_tokens", "ended"}  # counts in the replies to commands
_COUNTS = frozenset(field.name for field in msgspec.structs.fields(Heartbeat) if field.type in (int, float)) | _OTHERS


def sum_loads(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The data of several engines as one's: counts are added, the rest is the first engine's."""
    total = dict(loads[0])
    for name in total:
        values = [load[name] for load in loads if name in load]
        if name in _COUNTS:
            total[name] = sum(values)
        elif name == "accepted_at":
            total[name] = [sum(column) for column in zip_longest(*values, fillvalue=0)]
        elif name in ("groups", "tiers"):
            total[name] = [_sum_named(same) for same in zip(*values, strict=False)]
    return total


def _sum_named(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of parts of one name are added."""
    return {key: sum(part[key] for part in parts) if isinstance(value, int) else value for key, value in parts[0].items()}
