"""`ParallelPlan`: how a model is divided among ranks. One value, checked by `resolve` before a
process starts.

Used by the resolved configuration, the processes, and the contexts of layers and plugins. Imports
no torch. Must not know a device or a host.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """`tp`: ranks that share the tensors of each layer. `ep`: ranks among which whole experts are
    divided; 1: each expert's tensors are divided like the other layers'."""

    tp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.tp

    def __str__(self) -> str:
        return f"tp {self.tp}" + (f", ep {self.ep}" if self.ep > 1 else "")


ONE_RANK = ParallelPlan()
