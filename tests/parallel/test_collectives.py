"""What ranks agree on."""

from __future__ import annotations

import torch

from frame.core.interfaces.collective import CollectiveContext, LocalGroup
from frame.parallel.collectives import is_true_on_all_ranks

CPU = torch.device("cpu")


class Others(LocalGroup):
    """A group of two whose other rank gives 0."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat((tensor, torch.zeros_like(tensor)), dim)


def test_one_rank_decides_alone_and_several_together() -> None:
    assert is_true_on_all_ranks(True, LocalGroup(), CPU) and not is_true_on_all_ranks(False, LocalGroup(), CPU)
    assert not is_true_on_all_ranks(True, Others(CollectiveContext(0, 2)), CPU)
