"""Random checkpoints (`load_format: dummy`): a tensor depends on the seed, its name and its shape alone, so ranks agree.

Scaled so that activations stay finite through any depth. Knows no model; it is told the names and shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

LARGEST_DRAWN = 1_000_003  # numbers drawn for one tensor; a larger one repeats them. A prime: rows of a matrix still differ


class RandomTensor:
    """A tensor that is drawn when it is first sliced: norms are ones, other vectors zeros, matrices normal with std 1 / sqrt(inputs)."""

    def __init__(self, name: str, shape: tuple[int, ...], seed: int) -> None:
        self.shape = shape
        self._name = name
        self._seed = seed

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._draw()[index]

    def _draw(self) -> torch.Tensor:
        if len(self.shape) < 2:
            return torch.ones(self.shape) if "norm" in self._name or "ln_" in self._name else torch.zeros(self.shape)
        digest = hashlib.sha256(f"{self._seed}/{self._name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        size = torch.Size(self.shape).numel()
        drawn = torch.randn(min(size, LARGEST_DRAWN), generator=generator).mul_(self.shape[-1] ** -0.5)
        if size > LARGEST_DRAWN:
            drawn = drawn.repeat(-(-size // LARGEST_DRAWN))[:size]
        return drawn.view(self.shape)


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, RandomTensor]]:
    """A checkpoint with these names and shapes."""
    for name, shape in shapes.items():
        yield name, RandomTensor(name, shape, seed)
