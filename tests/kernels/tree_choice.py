"""The choice of branches and nodes of trees equals that of PyTorch.

Run by `test_interpreted.py` under TRITON_INTERPRET=1, and by tests/gpu.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from frame import kernels
from frame.kernels import INTERPRETED
from frame.speculation.tree_choice import Branches, begin_branches, choose_branches, choose_nodes

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def choose(device: torch.device, width: int, depth: int, maximum: int) -> tuple[list[Branches], torch.Tensor]:
    """The branches of each pass and the nodes of three rows, by random tokens. A token of each row
    is certain, as are those that follow it."""
    generator = torch.Generator().manual_seed(width)

    def follow(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = -torch.rand(3, count, width, generator=generator)
        values[:, 0, 0] = 0.0
        return values.to(device), torch.randint(1000, (3, count, width), generator=generator).to(device)

    values, ids = (each[:, 0] for each in follow(1))
    passes, found = [begin_branches(values, ids)], [(values, ids)]
    for place in range(1, depth):
        if place > 1:
            passes.append(choose_branches(values, ids, passes[-1], width + (place - 2) * width * width))
        values, ids = follow(width)
        values, ids = (passes[-1].values.unsqueeze(2) + values).flatten(1), ids.flatten(1)
        found.append((values, ids))
    numbers = torch.cat([each.numbers for each in passes[: depth - 1]] or [found[0][1][:, :0]], 1)
    values, ids = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return passes, choose_nodes(values, ids, numbers, width, maximum)


@pytest.mark.parametrize(("width", "depth", "maximum"), [(2, 5, 6), (3, 4, 16), (4, 3, 7), (8, 1, 8)])
def test_trees_are_those_of_the_plain_version(width: int, depth: int, maximum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, nodes = choose(DEVICE, width, depth, maximum)
    monkeypatch.setattr(kernels, "can_use_triton", lambda device: False)
    plain_passes, plain_nodes = choose(torch.device("cpu"), width, depth, maximum)
    assert nodes.tolist() == plain_nodes.tolist()
    for found, plain in zip(passes, plain_passes, strict=True):
        for field in fields(Branches):
            assert getattr(found, field.name).tolist() == getattr(plain, field.name).tolist(), field.name
