"""The interface of routing policies: which of several replicas gets a request (kind
`routing_policy`).

The router calls it, the server of data-parallel replicas, and the scheduler of attention groups.
Imports no torch. Must not know HTTP, tokens or a replica's address.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from frame.core.interfaces.plugin import Anything, Reason


@dataclass(frozen=True, slots=True)
class RoutingCapabilities(Anything):
    """What a policy promises. The conformance suite tests each promise."""

    avoids_load: bool = True  # a replica with many more outstanding sequences than another gets no new prompt
    keeps_prefixes: bool = False  # a prompt goes where its beginning went, while loads are nearly equal (two sequences)
    keeps_sessions: bool = False  # requests of a session go to one replica, while it is there; the same in each process

    def unsupported(self, requirements: Any) -> list[Reason]:
        """Of a server with several replicas: `frame router` takes every policy."""
        if self.keeps_sessions and not self.keeps_prefixes:
            return [Reason("keeps requests of a session together, and only `frame router` reads sessions")]
        return []


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """What a policy is built for. seed: of its random choices."""

    seed: int = 0


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a policy may read of a request."""

    blocks: Sequence[int] = ()  # a 64-bit hash of each prefix of the prompt, the shortest first; empty: unknown
    session: str = ""  # what the client calls the conversation (`X-Session-ID`); "": nothing
    # Share of the prompt by replica, as caches tell, which counts in place of what was sent there;
    # others are unknown. Replicas that may not be chosen now may be among them.
    cached: Mapping[int, float] = field(default_factory=dict)
    notes: dict[int, int] = field(default_factory=dict, compare=False)  # the policy's own, for `forget_request`


class RoutingPolicy(ABC):
    """Chooses the replica of a request.

    Contract: one thread calls it, and waits for it: a choice takes less than 1 ms and never waits
    for anything. What it remembers is bounded. Replicas are numbers that come and go; `loads` names
    those that may be chosen now, which is different for each request.
    """

    def __init__(self, context: RoutingContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        """One of the replicas in `loads`: outstanding sequences by replica, at least one entry. The
        request then counts as sent there."""

    def forget_request(self, request: RoutingRequest, replica: int) -> None:
        """The replica that was chosen refused the request: its cache got nothing of it, and keeps
        what it had before. The request has the `notes` that the choice made; meanwhile replicas may
        have been chosen for other requests."""

    def forget_replica(self, replica: int) -> None:
        """The replica was started again: its cache is empty. It may be one that was never seen."""
