"""Adding to single logits of some rows. Knows no processor and no state."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_to(logits: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows[i], columns[i, j]] += values[i, j], also where a column comes twice. rows int64 [m], columns int64 [m, k], values like
    logits [m, k]; where a column comes twice, all but one of its values are 0 or all are minus infinity."""
    if logits.is_cuda and logits.is_contiguous():  # where `index_put_` sorts, several kernels long; the order of additions is no matter
        places = rows.unsqueeze(1) * logits.shape[1] + columns
        logits.view(-1).index_add_(0, places.view(-1), values.reshape(-1))
    else:
        logits.index_put_((rows.unsqueeze(1), columns), values, accumulate=True)
