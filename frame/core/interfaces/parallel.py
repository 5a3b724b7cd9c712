"""`ParallelPlan`: how a model is divided among ranks. One value, checked by `resolve` before a
process starts.

Used by the resolved configuration, the processes, and the contexts of layers and plugins. Imports
no torch. Must not know a device or a host.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """`tp`: ranks that share the tensors of each layer. `pp`: stages, each with `tp` ranks and a
    range of the layers. `ep`: ranks of a stage among which whole experts are divided; 1: each
    expert's tensors are divided like the other layers'. `dp`: replicas of the engine, each with
    ranks and requests of its own. With `dp_attention`, instead: groups of `tp / dp` ranks in one
    engine, each with requests, a KV cache and attention of its own, which share the experts.
    `hosts`: among which the ranks are divided equally. `redundant_experts`: further places for
    the weights of experts, divided among the `ep` ranks with the others. `balances_experts`:
    experts move between ranks while serving.

    Rank r of an engine is rank `r % tp` of stage `r // tp`.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    dp_attention: bool = False
    hosts: int = 1
    redundant_experts: int = 0
    balances_experts: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of an engine."""
        return self.tp * self.pp

    @property
    def num_devices(self) -> int:
        """Ranks of all replicas."""
        return self.num_ranks * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Engines of a server."""
        return 1 if self.dp_attention else self.dp

    @property
    def num_groups(self) -> int:
        """Attention groups of an engine, each with requests of its own."""
        return self.dp if self.dp_attention else 1

    @property
    def attention_tp(self) -> int:
        """Ranks that share the tensors of an attention layer."""
        return max(1, self.tp // self.num_groups)

    def find_group(self, rank: int) -> int:
        """The attention group of a rank."""
        return rank % self.tp // self.attention_tp

    @property
    def result_ranks(self) -> tuple[int, ...]:
        """The ranks whose results count: the first of each attention group of the last stage."""
        first = self.tp * (self.pp - 1)
        return tuple(range(first, first + self.tp, self.attention_tp))

    def find_layers(self, stage: int, num_layers: int) -> range:
        """The layers of a stage. The first stages have one more where they cannot be equal."""
        each, more = divmod(num_layers, self.pp)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))

    def __str__(self) -> str:
        groups = "attention groups" if self.dp_attention else "dp"
        sizes = (("pp", self.pp), ("ep", self.ep), (groups, self.dp), ("hosts", self.hosts))
        return ", ".join([f"tp {self.tp}", *(f"{name} {size}" for name, size in sizes if size > 1)])


ONE_RANK = ParallelPlan()
