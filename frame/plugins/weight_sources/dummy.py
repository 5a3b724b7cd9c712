"""`dummy`: random weights. A tensor depends only on the seed, its name and its shape, so ranks and
devices agree.

One period of normal numbers is drawn and copied to the device; every tensor repeats it from an
offset of its own. The scale keeps activations finite at any depth.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel

from frame.interfaces.weights import WeightSource, WeightSourceContext

PERIOD = 1_000_003  # random numbers that are drawn. A prime, so that the rows of a matrix differ
_E2M1_DEVIATION = 2.9  # of uniform e2m1 values
_ONES = ("norm", "ln_", "_scale")  # tensors with these parts in their names are ones


class RandomNumbers:
    """A period of normal numbers from a seed, stored twice in a row so that a whole period follows
    any offset."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.seed, self.device, self.dtype = seed, device, dtype
        drawn = torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed))
        self._drawn = torch.cat((drawn, drawn)).to(device)
        self._scaled: dict[int, torch.Tensor] = {}  # by the number of inputs

    def read_period(self, offset: int, inputs: int) -> torch.Tensor:
        """A period [PERIOD] from `offset` on with standard deviation 1 / sqrt(inputs);
        read-only."""
        if inputs not in self._scaled:
            self._scaled[inputs] = (self._drawn * inputs**-0.5).to(self.dtype)
        return self._scaled[inputs][offset : offset + PERIOD]


class RandomTensor:
    """A tensor that is generated when it is sliced: norms and scales are ones, other vectors are
    zeros, matrices are normal with standard deviation 1 / sqrt(inputs). `integers`: the dtype of
    one that holds integers of any value."""

    def __init__(self, name: str, shape: tuple[int, ...], numbers: RandomNumbers, integers: torch.dtype | None = None) -> None:
        self.shape = shape
        self._integers = integers
        self._name = name
        self._numbers = numbers

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._make()[index]

    def _make(self) -> torch.Tensor:
        numbers = self._numbers
        if self._integers is not None:
            return self._make_integers(self._integers)
        if len(self.shape) < 2 or "_scale" in self._name:
            value = 1.0 if any(mark in self._name for mark in _ONES) else 0.0
            return torch.full(self.shape, value, device=numbers.device, dtype=numbers.dtype)
        digest = hashlib.sha256(f"{numbers.seed}/{self._name}".encode()).digest()
        period = numbers.read_period(int.from_bytes(digest[:8], "little") % PERIOD, self.shape[-1])
        values = torch.empty(self.shape, device=numbers.device, dtype=numbers.dtype)
        flat = values.view(-1)
        whole = flat.numel() // PERIOD * PERIOD
        flat[:whole].view(-1, PERIOD).copy_(period)
        flat[whole:].copy_(period[: flat.numel() - whole])
        return values

    def _make_integers(self, dtype: torch.dtype) -> torch.Tensor:
        """Numbers over the whole range of the dtype, such as packed quantized values. Exponents of
        MXFP4 scales are those of weights with standard deviation 1 / sqrt(inputs)."""
        if "scale" in self._name.rpartition(".")[2]:
            exponent = 127 - round(math.log2(_E2M1_DEVIATION * (32 * self.shape[-1]) ** 0.5))
            return torch.full(self.shape, exponent, device=self._numbers.device, dtype=dtype)
        digest = hashlib.sha256(f"{self._numbers.seed}/{self._name}".encode()).digest()
        generator = torch.Generator(self._numbers.device).manual_seed(int.from_bytes(digest[:7], "little"))
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, self.shape, generator=generator, device=self._numbers.device, dtype=dtype)


class DummySource(WeightSource):
    """Random values for every tensor that the model expects, on the device of its parameters."""

    def __init__(self, context: WeightSourceContext, options: BaseModel | None = None) -> None:
        self._shapes = dict(context.expected_shapes())
        self._integers = dict(context.integer_dtypes())
        self._numbers = RandomNumbers(context.seed, context.device, context.dtype)

    def list_names(self) -> Sequence[str]:
        return list(self._shapes)

    def open_tensor(self, name: str) -> RandomTensor:
        return RandomTensor(name, self._shapes[name], self._numbers, self._integers.get(name))
