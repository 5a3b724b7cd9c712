"""`HostAdapter`: one rank's part of an adapter in host memory, in the layout of the pool's pages.
`AdapterReader` makes it, and steps copy it to the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from frame.interfaces.adapter import AdapterConfig


@dataclass(slots=True)
class HostAdapter:
    """`norms`: the norms of whole rows after the delta, by layer; those of rows that the adapter
    leaves alone are NaN. `scales`: the same as factors, once a step has computed them."""

    config: AdapterConfig
    pages: torch.Tensor  # [pages, elements], pinned where the platform has pinned memory
    counts: torch.Tensor  # int32 [layers]; pages that each layer reads
    scales: dict[int, torch.Tensor] = field(default_factory=dict)  # float32 [outputs], by layer
    norms: dict[int, torch.Tensor] = field(default_factory=dict)  # float32 [outputs]
