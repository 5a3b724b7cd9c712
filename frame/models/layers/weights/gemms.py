"""Chooses the kernels of a weight by their measured speeds, and joins their GEMMs.

Used by linear layers and experts. Depends on no format and no kernel by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.gemm_kernel import GemmChoice, choose_ranges, find_kernel_obstacle

if TYPE_CHECKING:
    from frame.core.interfaces.gemm_kernel import Gemm, GemmKernel, GroupedGemm
    from frame.core.interfaces.weight_format import CanonicalWeight

    P = TypeVar("P")


def build_gemm(choices: Sequence[GemmChoice], weights: Sequence[CanonicalWeight], name: str) -> Gemm:
    """The GEMM with the weights of the layer `name`, which follow one another in the outputs.
    Raises ConfigurationError if the named kernel does not multiply one of them."""
    shards = [_join_ranges(_prepare(choices, weight, name, lambda kernel, weight: kernel.prepare(weight))) for weight in weights]
    return shards[0] if len(shards) == 1 else MergedGemm(shards)


def build_grouped(choices: Sequence[GemmChoice], weights: Sequence[CanonicalWeight], name: str) -> GroupedGemm:
    """The grouped GEMM with the experts of `name`. One kernel serves any number of rows."""
    shards: list[GroupedGemm] = []
    for weight in weights:
        prepared = _prepare(choices, weight, name, lambda kernel, weight: kernel.prepare_experts(weight))
        shards.append(prepared[-1][1])
    return shards[0] if len(shards) == 1 else MergedGroupedGemm(shards)


def find_kernel(choices: Sequence[GemmChoice], weight: CanonicalWeight, name: str) -> GemmChoice:
    """The kernel for many rows."""
    return _choose(choices, weight, name)[-1][1]


def count_bytes(choices: Sequence[GemmChoice], weights: Sequence[CanonicalWeight], name: str) -> int:
    """The bytes that the GEMMs with these weights keep; `weights` may be on the meta device."""
    num_bytes = 0
    for weight in weights:
        used = _choose(choices, weight, name)
        if weight.quantized.dim() > 2:
            used = used[-1:]  # one kernel multiplies experts
        num_bytes += sum(choice.kernel.count_bytes(weight) for choice in {choice.name: choice for _, choice in used}.values())
    return num_bytes


def _choose(choices: Sequence[GemmChoice], weight: CanonicalWeight, name: str) -> list[tuple[int, GemmChoice]]:
    quant_type = weight.scheme.quant_type
    obstacles = {choice.name: find_kernel_obstacle(choice.kernel, weight) for choice in choices if choice.multiplies(quant_type)}
    for choice in choices:
        obstacle = obstacles.get(choice.name)
        if choice.required and obstacle:
            raise ConfigurationError(
                f"gemm kernel {choice.name!r} does not multiply {name} ({weight.scheme}, {weight.outputs} x {weight.inputs}): "
                f"{obstacle}; leave model.gemm_kernel open."
            )
    usable = [choice for choice in choices if choice.name in obstacles and obstacles[choice.name] is None]
    prepared = choose_ranges(usable, quant_type)
    if not prepared:
        why = "; ".join(f"{kernel}: {obstacle}" for kernel, obstacle in obstacles.items()) or "none is made for this type"
        raise ConfigurationError(
            f"no gemm kernel multiplies {name} ({weight.scheme}, {weight.outputs} x {weight.inputs}): {why}; set model.gemm_kernel: torch."
        )
    return prepared


def _prepare(
    choices: Sequence[GemmChoice], weight: CanonicalWeight, name: str, prepare: Callable[[GemmKernel, CanonicalWeight], P]
) -> list[tuple[int, P]]:
    gemms: dict[str, P] = {}
    prepared = []
    for rows, choice in _choose(choices, weight, name):
        if choice.name not in gemms:
            gemms[choice.name] = prepare(choice.kernel, weight)
        prepared.append((rows, gemms[choice.name]))
    return prepared


def _join_ranges(ranges: Sequence[tuple[int, Gemm]]) -> Gemm:
    return ranges[0][1] if len(ranges) == 1 else RangedGemm(ranges)


@dataclass(frozen=True, slots=True)
class RangedGemm:
    """Several GEMMs with the same weight: the first whose number of rows is not exceeded (the
    last: 0) multiplies."""

    ranges: Sequence[tuple[int, Gemm]]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return _distinct(tensor for _, gemm in self.ranges for tensor in gemm.tensors)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._select(x)(x, bias)

    def multiply_gated(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        gated = getattr(self._select(x), "multiply_gated", None)
        return None if gated is None else gated(x, bias)  # type: ignore[no-any-return]

    def _select(self, x: torch.Tensor) -> Gemm:
        count = x.shape[0] if x.dim() == 2 else x.numel() // max(1, x.shape[-1])
        for rows, gemm in self.ranges:
            if count <= rows:
                return gemm
        return self.ranges[-1][1]


@dataclass(frozen=True, slots=True)
class MergedGemm:
    """GEMMs whose outputs follow one another."""

    shards: Sequence[Gemm]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return _distinct(tensor for shard in self.shards for tensor in shard.tensors)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.cat([shard(x) for shard in self.shards], -1)
        return out if bias is None else out + bias


@dataclass(frozen=True, slots=True)
class MergedGroupedGemm:
    """Grouped GEMMs whose outputs follow one another."""

    shards: Sequence[GroupedGemm]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return _distinct(tensor for shard in self.shards for tensor in shard.tensors)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.cat([shard(x, ends) for shard in self.shards], -1)


def _distinct(tensors: object) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())  # type: ignore[attr-defined]
