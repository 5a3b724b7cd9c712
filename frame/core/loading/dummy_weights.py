"""Random checkpoints (`load_format: dummy`): a tensor depends on the seed, its name and its shape alone, so ranks and devices agree.

Made where they are used: a period of normal numbers is drawn once and copied to the device, and every tensor is that period, repeated, from
a place of its own. Scaled so that activations stay finite through any depth. Knows no model; it is told the names and shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

PERIOD = 1_000_003  # numbers that are drawn. A prime: rows of a matrix still differ
_ONES = ("norm", "ln_", "_scale")  # in the names of tensors of ones


class RandomNumbers:
    """One period of normal numbers of a seed, twice in a row so that any place is followed by a whole one, on `device` in `dtype`."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.seed, self.device, self.dtype = seed, device, dtype
        drawn = torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed))
        self._drawn = torch.cat((drawn, drawn)).to(device)
        self._scaled: dict[int, torch.Tensor] = {}  # by the number of inputs, of which a model has few

    def from_place(self, place: int, inputs: int) -> torch.Tensor:
        """A period [PERIOD] with the standard deviation 1 / sqrt(inputs), read from `place` on; not to be written to."""
        if inputs not in self._scaled:
            self._scaled[inputs] = (self._drawn * inputs**-0.5).to(self.dtype)
        return self._scaled[inputs][place : place + PERIOD]


class RandomTensor:
    """A tensor that is made when it is sliced: norms and scales are ones, other vectors zeros, matrices
    normal with std 1 / sqrt(inputs)."""

    def __init__(self, name: str, shape: tuple[int, ...], numbers: RandomNumbers) -> None:
        self.shape = shape
        self._name = name
        self._numbers = numbers

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._make()[index]

    def _make(self) -> torch.Tensor:
        numbers = self._numbers
        if len(self.shape) < 2 or "_scale" in self._name:
            value = 1.0 if any(part in self._name for part in _ONES) else 0.0
            return torch.full(self.shape, value, device=numbers.device, dtype=numbers.dtype)
        digest = hashlib.sha256(f"{numbers.seed}/{self._name}".encode()).digest()
        period = numbers.from_place(int.from_bytes(digest[:8], "little") % PERIOD, self.shape[-1])
        made = torch.empty(self.shape, device=numbers.device, dtype=numbers.dtype)
        flat = made.view(-1)
        whole = flat.numel() // PERIOD * PERIOD
        flat[:whole].view(-1, PERIOD).copy_(period)
        flat[whole:].copy_(period[: flat.numel() - whole])
        return made


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, RandomTensor]]:
    """A checkpoint with these names and shapes, on `device` in `dtype`."""
    numbers = RandomNumbers(seed, torch.device(device), dtype)
    for name, shape in shapes.items():
        yield name, RandomTensor(name, shape, numbers)
