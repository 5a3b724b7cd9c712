"""`ReplicaChooser` and `sum_loads`: several schedulers behind one address, which are those of
replicas or of attention groups.

Used by the server's client and by the scheduler of attention groups. Must not know a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from frame.core.messages import Heartbeat

BLOCK = 128  # tokens of a prompt that are compared together
MAX_BLOCKS = 32  # of a prompt
MAX_PREFIXES = 65_536  # blocks remembered, the most recently used
LOAD_WEIGHT = 1.0  # score lost by a replica with a mean load more than the least; less would never move a whole prompt from one of two
SLACK = 4  # sequences; a smaller difference is no load


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
        minimum, mean = min(loads.values()), sum(loads.values()) / len(loads)

        def score(replica: int) -> float:
            excess = max(0, loads[replica] - minimum - SLACK)
            return matched[replica] / max(1, len(blocks)) - LOAD_WEIGHT * excess / max(1.0, mean)

        chosen = max(loads, key=lambda replica: (score(replica), -loads[replica]))
        for block in blocks:
            self._replicas[block] = self._replicas.get(block, 0) | 1 << chosen
            self._replicas.move_to_end(block)
        while len(self._replicas) > MAX_PREFIXES:
            self._replicas.popitem(last=False)
        return chosen

    def forget_replica(self, replica: int) -> None:
        """Its cache is empty: it was started again."""
        self._replicas = OrderedDict((block, left) for block, held in self._replicas.items() if (left := held & ~(1 << replica)))


def _hash_blocks(prompt: Sequence[int], namespace: str) -> list[int]:
    """A hash of each prefix of whole blocks."""
    hashes, last = [], hash(namespace)
    for start in range(0, min(len(prompt), MAX_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
        last = hash((last, *prompt[start : start + BLOCK]))
        hashes.append(last)
    return hashes


_COUNTS = frozenset(field.name for field in msgspec.structs.fields(Heartbeat) if field.type in (int, float)) | {"pages", "max_total_tokens"}


def sum_loads(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The data of several engines as one's: counts are added, the rest is the first engine's."""
    total = dict(loads[0])
    for name in total:
        values = [load[name] for load in loads if name in load]
        if name in _COUNTS:
            total[name] = sum(values)
        elif name == "accepted_at":
            total[name] = [sum(column) for column in zip_longest(*values, fillvalue=0)]
        elif name == "groups":
            total[name] = [_sum_groups(same) for same in zip(*values, strict=False)]
    return total


def _sum_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(group[name] for group in groups) if name != "group" else value for name, value in groups[0].items()}
