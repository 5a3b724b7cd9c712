"""Expert GEMMs by Triton kernels, without synchronising with the host, so that a CUDA graph can
capture them.

Few tokens go to kernels that are bound by reading each pair's expert; more tokens are sorted by
expert first. Knows no routing and no rank: it gets tokens with the ids and weights of their
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import triton
from pydantic import BaseModel
from torch import nn

from frame import kernels
from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.moe import DispatchOutput, MoERunner
from frame.kernels import nvidia
from frame.kernels.linear.fp8_quantize import quantize_groups
from frame.kernels.moe.align import CHUNKS, align_tokens
from frame.kernels.moe.expert_tiles import FIXED_TILES, ROUNDED_ROWS, Tile, Tiles, choose_tiles, choose_vectors, list_token_thresholds
from frame.kernels.moe.grouped_gemm import (
    SILU,
    Activation,
    Pairs,
    Rows,
    Weights,
    can_prefill_fp8,
    combine_pairs,
    compute_down,
    compute_down_vector,
    compute_gate_up,
    compute_gate_up_vector,
    compute_pairs,
)
from frame.models.layers.weights.expert_activation import activate, find_activation

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import ShrinkPairs

_CPU_MEMORY = 1 << 20  # bytes of shared memory assumed for the interpreter, which has no limit


class Triton(MoERunner):
    """`gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner], inputs
    contiguous; float8 ones with `_fp8_scale` float32 by blocks of 128 x 128 or by output, and sizes
    that are multiples of 128: then tokens are rounded too."""

    takes_fp8 = ("block", "output")

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        if not kernels.can_use_triton(context.device):
            raise ValueError("The triton MoE runner needs a GPU; on a CPU it runs only under TRITON_INTERPRET=1: use torch_native there.")
        self._has_tma = context.device.type == "cpu" or nvidia.get_compute_capability(context.device) >= (9, 0)
        self._shared_memory = _shared_memory(context.device)
        self._compiled: set[tuple[object, ...]] = set()  # sizes of layers whose kernels are compiled
        # by sizes of layers: tiles whose results have the bits of `FIXED_TILES`
        self._equal: dict[tuple[object, ...], list[Tiles]] = {}
        self._compiled_rows: dict[tuple[int, ...], int] = {}  # of such layers with adapters: the most tokens of a step

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        summands = self.run_parts(tokens, experts)
        return combine_pairs(summands.flatten(0, 1), summands.shape[1]) if summands.dim() == 3 else summands

    def run_parts(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        if len(tokens.x) == 0:
            return tokens.x.clone()
        layer = _Layer(_weights(experts, "gate_up"), _weights(experts, "down"), find_activation(experts), experts)
        sizes = (*layer.sizes, tokens.ids.shape[1])
        if sizes not in self._compiled and self.context.device.type == "cuda" and not nvidia.is_capturing():
            self._compiled.add(sizes)
            self._compile(tokens, layer)
        return self._run(tokens.x, Pairs(tokens.ids.contiguous(), tokens.weights.contiguous()), layer)

    def multiply_pairs(self, x: torch.Tensor, ids: torch.Tensor, experts: nn.Module, name: Literal["gate_up", "down"]) -> torch.Tensor:
        """See `SupportsPairMatmul`."""
        weights = replace(_weights(experts, name), bias=None)
        count, num_experts, is_float8 = ids.numel(), len(weights.values), weights.scale is not None
        tile = choose_tiles(count, num_experts, float8=is_float8).first
        order = align_tokens(ids.contiguous(), num_experts, tile.bm)
        rows = Rows(*quantize_groups(x)) if is_float8 else Rows(x)
        pairs = Pairs(ids, torch.empty(ids.shape, dtype=torch.float32, device=ids.device))  # which are not read
        return compute_pairs(rows, weights, pairs, order, self._fit_tile(tile, weights, 1), x.dtype)

    def run_with_deltas(self, tokens: DispatchOutput, experts: nn.Module, gate_up: ShrinkPairs, down: ShrinkPairs) -> torch.Tensor | None:
        """See `SupportsPairDeltas`."""
        activation, first = find_activation(experts), _weights(experts, "gate_up")
        if activation.name == "none" or first.scale is not None:
            return None
        layer = _Layer(first, _weights(experts, "down"), activation, experts)
        pairs, form = Pairs(tokens.ids.contiguous(), tokens.weights.contiguous()), (*first.values.shape, tokens.ids.shape[1])
        rows = len(tokens.x)
        if rows > (compiled := self._compiled_rows.get(form, 1)) and self.context.device.type == "cuda" and not nvidia.is_capturing():
            self._compiled_rows[form] = rows
            for count in list_token_thresholds(form[-1], form[0], CHUNKS, rows - 1):  # variants of later steps
                if count <= compiled:
                    continue
                self._run_with_deltas(tokens.x[:count], Pairs(pairs.ids[:count], pairs.weights[:count]), layer, gate_up, down)
        return self._run_with_deltas(tokens.x, pairs, layer, gate_up, down)

    def _run_with_deltas(self, x: torch.Tensor, pairs: Pairs, layer: _Layer, gate_up: ShrinkPairs, down: ShrinkPairs) -> torch.Tensor:
        first, second, ids = layer.first, layer.second, pairs.ids
        vectors = choose_vectors(len(x), ids.shape[1], len(first.values))
        if vectors is not None:
            vector = compute_gate_up_vector(x, first, pairs, vectors[0], layer.activation, gate_up(x, ids, None))
            return compute_down_vector(vector, second, pairs, vectors[1], down(vector, ids, None))
        tiles = choose_tiles(pairs.count, len(first.values))
        order = align_tokens(ids, len(first.values), tiles.first.bm)
        tile = self._fit_tile(tiles.first, first, 2 if layer.activation.is_gated else 1)
        act = compute_gate_up(Rows(x), first, pairs, order, tile, x.dtype, layer.activation, gate_up(x, ids, order))
        delta = down(act.values, ids, replace(order, by_row=True))
        out = compute_down(act, second, pairs, order, self._fit_tile(tiles.second, second, 1), x.dtype, delta)
        return combine_pairs(out, ids.shape[1])

    def _compile(self, tokens: DispatchOutput, layer: _Layer) -> None:
        """Run every variant of the kernels once, so that no later step waits for a compilation."""
        top, experts, maximum = tokens.ids.shape[1], len(layer.first.values), self.context.limits.max_tokens_per_step
        for count in list_token_thresholds(top, experts, CHUNKS, maximum):
            ids = torch.arange(count * top, device=tokens.ids.device).remainder_(experts).view(count, top)
            x, pairs = tokens.x.new_zeros(count, tokens.x.shape[1]), Pairs(ids, tokens.weights.new_zeros(count, top))
            tiles = self._choose_tiles(pairs, layer)
            if self.context.deterministic and tiles not in self._equal.get(layer.sizes, ()):
                self._test(tiles, ids, layer)
            self._run(x, pairs, layer)

    def _test(self, tiles: Tiles, ids: torch.Tensor, layer: _Layer) -> None:
        """Use `tiles` in the batch-invariant mode if they give the bits of `FIXED_TILES`, with few
        tokens for each expert and with three times as many."""
        values = layer.first.values
        if not values.any():  # on which all tiles agree
            return
        generator = torch.Generator(values.device).manual_seed(0)
        x = torch.randn(len(ids), values.shape[2], device=values.device, generator=generator).to(values.dtype)
        for some in (ids, ids // 3):
            pairs = Pairs(some, torch.ones(ids.shape, device=ids.device))
            if not torch.equal(self._multiply(x, pairs, layer, tiles), self._multiply(x, pairs, layer, FIXED_TILES)):
                return
        self._equal.setdefault(layer.sizes, []).append(tiles)

    def _choose_tiles(self, pairs: Pairs, layer: _Layer) -> Tiles:
        """The fastest tiles for so many pairs."""
        first, second = layer.first, layer.second
        is_float8 = first.scale is not None
        prefill_fp8 = is_float8 and layer.activation == SILU and can_prefill_fp8(first) and can_prefill_fp8(second)
        return choose_tiles(pairs.count, len(first.values), float8=is_float8, prefill_fp8=prefill_fp8)

    def _run(self, x: torch.Tensor, pairs: Pairs, layer: _Layer) -> torch.Tensor:
        first, second, activation = layer.first, layer.second, layer.activation
        tiles, is_fixed = self._choose_tiles(pairs, layer), self.context.deterministic
        can_use_vectors = activation.name != "none" and first.scale is None and not is_fixed
        vectors = choose_vectors(len(x), pairs.ids.shape[1], len(first.values)) if can_use_vectors else None
        if vectors is not None:
            return compute_down_vector(compute_gate_up_vector(x, first, pairs, vectors[0], activation), second, pairs, vectors[1])
        if is_fixed and tiles not in self._equal.get(layer.sizes, ()):
            tiles = FIXED_TILES
        return self._multiply(x, pairs, layer, tiles)

    def _multiply(self, x: torch.Tensor, pairs: Pairs, layer: _Layer, tiles: Tiles) -> torch.Tensor:
        """The result with these tiles, of pairs sorted by expert."""
        first, second, activation = layer.first, layer.second, layer.activation
        is_float8, is_fused = first.scale is not None, activation.name != "none"
        order = align_tokens(pairs.ids, len(first.values), tiles.first.bm)
        tile, dtype = self._fit_tile(tiles.first, first, 2 if activation.is_gated else 1), x.dtype
        rounds = is_float8 and is_fused and tile.bm <= ROUNDED_ROWS
        rows = Rows(*quantize_groups(x)) if is_float8 else Rows(x)
        act = compute_gate_up(rows, first, pairs, order, tile, torch.float8_e4m3fn if rounds else dtype, activation)
        if not is_fused:
            act = Rows(activate(layer.experts, act.values))
        if is_float8 and act.scale is None:
            act = Rows(*quantize_groups(act.values))
        return compute_down(act, second, pairs, order, self._fit_tile(tiles.second, second, 1), dtype).view(*pairs.ids.shape, -1)

    def _fit_tile(self, tile: Tile, weights: Weights, width: int) -> Tile:
        """The tile sizes for these weights on this device."""
        values = weights.values
        _, outputs, inputs = values.shape
        tma = tile.tma and self._has_tma and values.stride(0) == outputs * values.stride(1) and inputs * values.element_size() % 16 == 0
        return tile.fit_shared_memory(outputs // width, inputs, values.element_size(), width, self._shared_memory, tma=tma)


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer's experts multiply. `activation` "none": PyTorch computes that of `experts`."""

    first: Weights
    second: Weights
    activation: Activation
    experts: nn.Module

    @property
    def sizes(self) -> tuple[object, ...]:
        """What the kernels depend on."""
        values = self.first.values
        return (*values.shape, values.dtype, self.activation, self.first.bias is None)


def _weights(experts: nn.Module, name: str) -> Weights:
    values: torch.Tensor = getattr(experts, name)
    scale = getattr(experts, f"{name}_fp8_scale") if values.dtype == torch.float8_e4m3fn else None
    return Weights(values, scale, getattr(experts, f"{name}_bias", None))


def _shared_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_MEMORY
    return int(triton.runtime.driver.active.utils.get_device_properties(nvidia.get_index(device))["max_shared_mem"])
