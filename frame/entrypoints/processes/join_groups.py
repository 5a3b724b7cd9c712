"""The groups of a rank's parallel plan: which ranks are members of each, and where they meet. Used
by `build_engine`. Must not know a collective by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from frame.config.resolved import Resolved
from frame.core.interfaces.collective import LOOPBACK, Collective, CollectiveContext, LocalGroup
from frame.core.interfaces.platform import Platform
from frame.core.interfaces.rank_context import Pipeline
from frame.plugins.registry import Registry

if TYPE_CHECKING:
    from frame.parallel.rank_watch import RankWatch


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's number among `size` ranks, the address where they meet, the index of its device
    among those of its host, the host's address, and the watch of several ranks."""

    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    local_index: int = 0
    host: str = LOOPBACK
    watch: RankWatch | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """A rank's groups. `pipeline` None: there is one stage."""

    tp: Collective
    experts: Collective | None = None  # None: there is one attention group
    pipeline: Pipeline | None = None


def join_groups(resolved: Resolved, registry: Registry, place: Place, platform: Platform) -> Groups:
    """Join the groups of this rank; the order is the same on all ranks. Raises RuntimeError if
    other ranks do not join in time."""
    plan = resolved.plan
    stage, tp_rank = divmod(place.rank, plan.tp)

    def join(name: str, rank: int, size: int) -> Collective:
        if name and size == 1:
            return LocalGroup()
        context = CollectiveContext(
            rank, size, place.rendezvous, platform, place.host, name=name, listens=place.rank == 0 if name else None,
            deterministic=resolved.user.execution.deterministic,
        )  # fmt: skip
        group: Collective = registry.create(resolved.choice("collective"), context)
        if place.watch is None:
            return group
        from frame.parallel.rank_watch import WatchedGroup

        return WatchedGroup(group, place.watch, name or "tp")

    if plan.num_groups > 1:
        number, own = plan.find_group(place.rank), place.rank % plan.attention_tp
        return Groups(join(f"attention{number}", own, plan.attention_tp), join("", place.rank, place.size))
    if plan.pp == 1:
        return Groups(join("", place.rank, place.size))
    tp = join(f"tp{stage}", tp_rank, plan.tp)
    hidden, tokens = (join(f"{name}{tp_rank}", stage, plan.pp) for name in ("hidden", "tokens"))
    layers = plan.find_layers(stage, resolved.model.num_layers)
    return Groups(tp, pipeline=Pipeline(index=stage, size=plan.pp, layers=layers, hidden=hidden, tokens=tokens))
