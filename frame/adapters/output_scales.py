"""`compute_scales`: the factors that give the rows of a changed weight their norms (DoRA, arXiv
2402.09353).

The base weight is read off its GEMM, so every weight format works. Used once for each layer of an
adapter, by all ranks in the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from frame.adapters.pooled_layers import PooledLayer
    from frame.core.interfaces.collective import Collective

_COLUMNS = 512  # of the weight that are computed at a time


def compute_scales(layer: PooledLayer, norms: torch.Tensor, delta: tuple[torch.Tensor, torch.Tensor], tp: Collective) -> torch.Tensor:
    """norms: float32 [outputs], NaN for rows that keep theirs. delta: `a` and `b` of the layer's
    pages. -> float32 [outputs]."""
    inputs, dtype = layer.inputs, delta[0].dtype
    squares = torch.zeros_like(norms)
    for start in range(0, inputs.size, _COLUMNS):
        columns = slice(start, min(start + _COLUMNS, inputs.size))
        identity = torch.eye(inputs.size, dtype=dtype, device=norms.device)[columns]
        weight = layer.gemm(identity).float()  # [columns, outputs]
        first = 0
        for part, span in enumerate(layer.outputs):
            a = delta[0][:, part, :, columns].flatten(0, 1).float()  # [ranks, columns]
            b = delta[1][:, 0, first : first + span.size].transpose(0, 1).flatten(1).float()  # [outputs, ranks]
            weight[:, first : first + span.size] += (b @ a).t()
            first += span.size
        squares += weight.square().sum(0)
    if tp.size > 1 and inputs.size < inputs.full:
        squares = tp.all_reduce(squares)
    return torch.where(norms.isnan(), 1.0, norms / squares.sqrt())
