"""What the ranks of a group agree on, by tensors. Must not know how a group is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from frame.core.interfaces.collective import Collective


def is_true_on_all_ranks(value: bool, tp: Collective, device: torch.device) -> bool:
    """Whether `value` is true on all ranks."""
    if tp.size == 1:
        return value
    return bool(tp.all_gather(torch.tensor([int(value)], device=device), dim=0).min())
