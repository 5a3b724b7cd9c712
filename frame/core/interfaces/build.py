"""`BuildContext`: all that a model or a layer gets at construction. There are no globals and no
`get_*_context()`.

Used by models and layers. `entrypoints.processes.components` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from frame.core.interfaces.adapter_layers import AdapterLayers
from frame.core.interfaces.attention import AttentionBackend
from frame.core.interfaces.collective import Collective
from frame.core.interfaces.gemm_kernel import GemmChoice
from frame.core.interfaces.moe import MoEDispatcher, MoERunner
from frame.core.interfaces.rank_context import Limits, LoadCode, RankContext
from frame.core.interfaces.row_operations import RowOperations
from frame.core.interfaces.step_media import MediaSizes
from frame.core.interfaces.weight_format import WeightFormat

__all__ = ["BuildContext", "Collective", "Limits", "LoadCode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext(RankContext):
    """What is fixed when a rank's model is built."""

    attention: AttentionBackend | None = None  # None only while the backend itself is being built
    weight_format: WeightFormat | None = None
    gemm_kernels: tuple[GemmChoice, ...] = ()
    moe_runner: MoERunner | None = None  # None: the model has no experts
    moe_dispatcher: MoEDispatcher | None = None
    adapters: AdapterLayers | None = None  # None: adapters are off
    media: MediaSizes | None = None  # None: the model reads text alone

    @property
    def row_operations(self) -> RowOperations | None:
        """The operations between the products that a GEMM kernel offers; None: none does."""
        offered = (choice.kernel.row_operations for choice in self.gemm_kernels)
        return next((operations for operations in offered if operations is not None), None)
