"""Adds values to single logits of some rows. Used by the processors; knows no state."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_to(logits: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows[i], columns[i, j]] += values[i, j]. rows int64 [m], columns int64 [m, k], values
    [m, k] of the logits' dtype. If a row has a column twice, all but one of its values must be 0,
    or all must be minus infinity."""
    if logits.is_cuda and logits.is_contiguous():  # `index_put_` would sort, with several kernels; the order of additions does not matter
        places = rows.unsqueeze(1) * logits.shape[1] + columns
        logits.view(-1).index_add_(0, places.view(-1), values.reshape(-1))
    else:
        logits.index_put_((rows.unsqueeze(1), columns), values, accumulate=True)
