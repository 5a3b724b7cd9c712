"""Operations whose result for a row has the same bits whatever the other rows are (batch
invariance), in PyTorch.

Used by layers, adapters, GEMM kernels, MoE runners and attention backends under
`RankContext.deterministic`. BLAS libraries choose a kernel, and with it the order of a sum, by the
number of rows: on CPUs by whether it is 1, odd or small, on GPUs by split-K. Numbers of rows that
are multiples of `TILE` get equal bits almost everywhere, so rows are padded, and `InvariantRows`
tests it for each product at start. Must not know a layer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F

TILE = 16  # rows
# what cuBLAS may use for split-K, whose sums depend on the number of rows: too little for most
WORKSPACES: Mapping[str, str] = MappingProxyType({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"})
_LANES = 128  # PyTorch's vectors are at most this wide; it computes a rest of elements by other instructions
_PIECE = 1 << 15  # elements that PyTorch does not divide among threads
_PROOF_SECONDS = 0.1  # of one product; more rows than were tested by then are multiplied in pieces
_PROOF_BYTES = 256 << 20  # of the results of a proof at a time
_MAX_ROWS = 4096

Multiply = Callable[[torch.Tensor], torch.Tensor]  # [rows, ...] -> [rows, ...]


def limit_workspaces() -> None:
    """Set `WORKSPACES` in this process, before its first matmul on a GPU. What the user set stays:
    `InvariantRows` tests it."""
    for name, value in WORKSPACES.items():
        os.environ.setdefault(name, value)


class InvariantRows:
    """`multiply` with padded rows, at most `max_rows` at a time: the largest number for which every
    row's bits were equal at all smaller ones and in all places. Products of one `form` (the
    operation, with shapes and strides of its weight) are tested once in a process; `example` [1,
    ...]: an input, whose values are not used. Raises RuntimeError if the bits of a row depend on
    its place in a tile."""

    _proofs: ClassVar[dict[tuple[object, ...], int]] = {}  # `max_rows` by form, dtype and device

    def __init__(self, multiply: Multiply, example: torch.Tensor, *form: object) -> None:
        self.multiply = multiply
        form = (*form, example.dtype, example.device)
        if form not in self._proofs:
            self._proofs[form] = find_max_rows(multiply, example)
        self.max_rows = self._proofs[form]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        if rest := -rows % TILE:
            padded = x.new_empty(rows + rest, *x.shape[1:])  # whatever the other rows hold
            padded[:rows] = x
            x = padded
        if len(x) <= self.max_rows:
            return self.multiply(x)[:rows]
        return torch.cat([self.multiply(piece) for piece in x.split(self.max_rows)])[:rows]


def find_max_rows(multiply: Multiply, example: torch.Tensor) -> int:
    """The largest tested number of rows for which `multiply` gives the bits that it gives for one
    tile, where all smaller ones do so too."""
    device = example.device
    generator = torch.Generator("cpu").manual_seed(0)
    few = torch.randn(4 * TILE, *example.shape[1:], generator=generator).to(device, example.dtype)
    tile = multiply(few[:TILE])
    for shift in range(1, TILE):
        if not torch.equal(multiply(few[:TILE].roll(shift, 0)), tile.roll(shift, 0)):
            raise RuntimeError(
                f"execution.deterministic: the product of {list(example.shape[1:])} inputs in {example.dtype} depends on a row's place "
                f"on {device.type}; set it to false, or report the versions of PyTorch and its BLAS library."
            )
    expected = torch.cat([multiply(piece) for piece in few.split(TILE)])
    if not expected.any():  # of a weight of zeros, which proves nothing
        return TILE
    bound = min(_MAX_ROWS, _PROOF_BYTES // (expected[0].numel() * expected.element_size()))
    proven, end = TILE, time.perf_counter() + _PROOF_SECONDS
    for rows in _list_row_counts(bound):
        if time.perf_counter() > end:
            break
        x = few.repeat(-(-rows // len(few)), *[1] * (few.dim() - 1))[:rows]
        if not all(torch.equal(piece, expected[: len(piece)]) for piece in multiply(x).split(len(few))):
            break
        proven = rows
    return proven


def _list_row_counts(bound: int) -> Iterator[int]:
    """Multiples of a tile: all of the few, at which libraries change kernels, and some of the
    many."""
    rows = TILE
    while (rows := rows + TILE if rows < 512 else rows * 2) <= bound:
        yield rows


class InvariantMatmul:
    """x [..., inputs] times `weight` [outputs, inputs], transposed."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.tensors = (weight,)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight)

        self._rows = InvariantRows(multiply, weight[:1], "linear", *weight.shape, *weight.stride())

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x […, inputs] -> […, outputs]."""
        out = self._rows(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias


def map_elements(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """An elementwise function of tensors of one shape, with exponentials. On a CPU PyTorch computes
    the last elements of each thread's part by other instructions, so there are no such elements
    here."""
    shape, count = inputs[0].shape, inputs[0].numel()
    if inputs[0].device.type != "cpu" or not count:
        return function(*inputs)
    pieces = zip(*(F.pad(x.flatten(), (0, -count % _LANES)).split(_PIECE) for x in inputs), strict=True)
    return torch.cat([function(*piece) for piece in pieces])[:count].view(shape)


def add_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over a dimension, in an order that depends on its size alone."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        total = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat((total, x.narrow(dim, size - 1, 1)), dim) if size % 2 else total
    return x.squeeze(dim)


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU by `map_elements`."""
    return map_elements(F.silu, x)
