"""Launches the decode kernel: split configuration, compiled variants and workspace, made once per
layer shape. Depends on no request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from frame import kernels
from frame.attention_backends.triton.decode_kernel import decode_kernel
from frame.attention_backends.triton.merge_kernel import merge_kernel
from frame.attention_backends.triton.operands import Operands, compute_scales, get_window, or_unused
from frame.attention_backends.triton.shared_prefixes import MIN_ROWS
from frame.attention_backends.triton.split_schedule import SplitConfig
from frame.attention_backends.triton.tile_sizes import DecodeSizes, DeviceLimits, choose_decode
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import TreeMask
from frame.kernels import INTERPRETED
from frame.kernels.launch import PreparedLaunch, ceil_div, next_power_of_2

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.batch import ForwardBatch

MERGE_WARPS, MERGE_HEADS = 4, 4  # of a program of `merge_kernel`
SHARING_ROWS = 2 * MIN_ROWS  # smaller batches use the variant without shared prefixes


@dataclass(slots=True)
class DecodeVariant:
    """A compiled variant: layers of equal shape, and what their launches need besides the layers'
    tensors."""

    sizes: DecodeSizes
    split: SplitConfig
    trees: bool  # rows may be tokens of trees
    partials: torch.Tensor  # float32 [lines, value]: partial results
    weights: torch.Tensor  # float32 [lines]: log2 of the partial sums of weights
    is_latent: bool = False  # `latent_decode` computes it
    launch: PreparedLaunch | None = None  # compiled at the first launch
    merge: PreparedLaunch | None = None  # if the decode kernel does not merge


class DecodeLauncher:
    """Launches the decode kernel. `capacity`: most rows of a step. `shares`: whether rows read a
    common prefix together (cascade attention). `tokens`: consecutive tokens of one request that
    are rows of a step, and read its keys together, as far as a tile has room for them."""

    def __init__(self, device: torch.device, device_limits: DeviceLimits, capacity: int, shares: bool, tokens: int = 1) -> None:
        self._device, self._limits, self._capacity, self._shares = device, device_limits, capacity, shares
        self._tokens = tokens
        self._has_gluon = not INTERPRETED and kernels.supports_tma_streaming(device)
        self._pdl = kernels.supports_pdl(device)
        self._variants: dict[tuple[Any, ...], DecodeVariant] = {}
        # by layer and strides
        self._layers: dict[tuple[Any, ...], tuple[AttentionSpec, DecodeVariant, tuple[float, float]]] = {}
        # by (lines, width); layers use it one after another
        self._space: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, spec: AttentionSpec, operands: Operands, out: torch.Tensor, batch: ForwardBatch, plan: StepPlan) -> None:
        """All decode rows. Row r is token r of the queries and of `out` [tokens, heads, value
        width]."""
        rows = plan.num_decodes
        trees = batch.get(TreeMask)
        shares = self._shares and rows >= SHARING_ROWS and spec.sliding_window is None and not batch.group and trees is None
        key = (spec.layer, shares, trees is None, operands.layout)
        known = self._layers.get(key)
        if known is None or known[0] is not spec:
            known = spec, self._find_variant(spec, operands, out, shares, trees is not None), compute_scales(spec, operands)
            self._layers[key] = known
        variant = known[1]
        split, partials, weights = variant.split, variant.partials, variant.weights
        schedule = plan.get_schedule(split, batch, self._pdl)
        sinks = or_unused(spec.sinks, out)
        planned = schedule, plan.prefixes.order, batch.page_table
        masks = batch.seq_lens if trees is None else trees.bits, batch.seq_lens
        tensors = (*operands.get_tensors(), out, partials, weights, sinks, *planned, *operands.get_scales(), *masks)
        numbers = (batch.page_table.stride(0), split.capacity, split.count_items(split.capacity), split.max_suffix_items, *known[2])
        if variant.launch is None and not (variant.is_latent and variant.merge):
            self._prepare(variant, spec, operands, (*tensors, *numbers))
        if variant.launch is None:
            _latents().attend_latents(operands, (out, partials, weights, schedule, batch.page_table), split, known[2][0])
        else:
            variant.launch((split.blocks, split.count_items(rows), 1), tensors, numbers)
        if variant.merge is not None:
            variant.merge((ceil_div(split.heads, MERGE_HEADS), rows, 1), (partials, weights, out, schedule), (split.max_suffix_items,))

    def _find_variant(self, spec: AttentionSpec, operands: Operands, out: torch.Tensor, shares: bool, trees: bool) -> DecodeVariant:
        """The variant of a layer that was not seen before."""
        constants = operands.make_constants(spec, out)
        heads, kv_heads = operands.q1.shape[1], operands.k1.shape[1]
        key = (shares, trees, get_window(spec), heads, kv_heads, operands.q1.dtype, operands.k1.dtype, *constants.values())
        known = self._variants.get(key)
        if known is not None:
            return known
        group = operands.group
        itemsizes = operands.q1.element_size(), operands.k1.element_size()
        sizes = choose_decode(group, operands.loaded_widths, itemsizes[0], self._limits.shared_memory, itemsizes[1])
        taken = min(group, sizes.tile.queries)
        blocks = kv_heads * -(-group // taken)
        tile_rows = sizes.tile_lanes // taken
        split = SplitConfig(
            capacity=self._capacity,
            heads=heads,
            blocks=blocks,
            target=max(1, self._limits.processors * sizes.programs // blocks),
            min_keys=sizes.min_keys,
            block_keys=sizes.tile.keys,
            window=get_window(spec),
            tile_rows=tile_rows if shares and tile_rows > 1 else 0,
            tokens=1 if get_window(spec) or sizes.merge_separately else min(self._tokens, sizes.tile.queries // taken),
        )
        is_latent = self._has_gluon and not trees and _latents().can_run(spec, operands, split)
        if is_latent:
            split = replace(split, shares=split.target)
        space = self._space_for(split, operands.value_width, out.device)
        self._variants[key] = DecodeVariant(sizes, split, trees, *space, is_latent)
        return self._variants[key]

    def _prepare(self, variant: DecodeVariant, spec: AttentionSpec, operands: Operands, example: tuple[Any, ...]) -> None:
        sizes, tile, group, out = variant.sizes, variant.sizes.tile, operands.group, example[5]
        constants = {
            **operands.make_constants(spec, out),
            **tile.make_constants(group),
            "TILE_ROWS": variant.split.tile_rows,
            "TILE_LANES": sizes.tile_lanes,
            "TILE_KEYS": sizes.tile_keys,
            "TOKENS": variant.split.tokens,
            "TREES": variant.trees,
            "MERGE_LANES": next_power_of_2(min(group, tile.queries) * variant.split.tokens),
            "NUM_HEADS": variant.split.heads,
            "MERGE_IN_KERNEL": not sizes.merge_separately,
        }
        if sizes.merge_separately:
            names = ("NUM_HEADS", "VALUE", "BLOCK_VALUE", "TILE_ROWS", "OUT_STRIDE", "OUT_HEAD")
            wide = {**{name: constants[name] for name in names}, "HEADS": MERGE_HEADS}
            variant.merge = PreparedLaunch(
                merge_kernel, (*example[6:8], out, example[9], variant.split.max_suffix_items), wide, self._device, MERGE_WARPS
            )
        if not variant.is_latent:
            variant.launch = PreparedLaunch(decode_kernel, example, constants, self._device, tile.warps)

    def _space_for(self, split: SplitConfig, value: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        lines = (split.max_suffix_items * split.tokens + split.max_shared_items * split.tile_rows) * split.heads
        known = self._space.get((lines, value))
        if known is None:
            known = torch.empty(lines, value, device=device), torch.empty(lines, device=device)
            self._space[lines, value] = known
        return known


@cache
def _latents() -> ModuleType:
    """Imported where it can run: Triton's Gluon is not on every machine."""
    from frame.attention_backends.triton.hopper import latent_decode

    return latent_decode
