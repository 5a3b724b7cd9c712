"""`session`: requests of a session go to one replica, by rendezvous hashing (Thaler and
Ravishankar 1998): it remembers nothing, so several routers agree, and the sessions of a replica
that leaves are spread over the others."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from frame.interfaces.routing import RoutingPolicy, RoutingRequest


class Session(RoutingPolicy):
    """The replica with the greatest hash of session and number; without a session, the least
    loaded."""

    def choose_replica(self, request: RoutingRequest, loads: Mapping[int, int]) -> int:
        if not request.session:
            return min(loads, key=loads.__getitem__)
        name = blake2b(request.session.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        return max(loads, key=lambda replica: blake2b(b"%d" % replica, key=name, digest_size=8).digest())
