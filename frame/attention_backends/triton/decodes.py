"""The decode rows of a step: cuts, launches and the space for parts, made once for a layer's shape. Knows no request and no cascade."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from frame.attention_backends.triton.decode import decode_kernel
from frame.attention_backends.triton.launch import Operands, other, scales
from frame.attention_backends.triton.merge import merge_kernel
from frame.attention_backends.triton.prefixes import MIN_ROWS
from frame.attention_backends.triton.schedule import Cut
from frame.attention_backends.triton.tiles import DecodeSizes, Device, choose_decode
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels import pdl
from frame.kernels.launch import Prepared, power_of_2

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.batch import ForwardBatch

MERGE_WARPS = 4
SHARING_ROWS = 2 * MIN_ROWS  # smaller batches are not compiled for shared prefixes


@dataclass(slots=True)
class DecodeKind:
    """Layers that are alike, and what their decodes need besides their tensors."""

    sizes: DecodeSizes
    cut: Cut
    parts: torch.Tensor  # float32 [lines, value]
    weights: torch.Tensor  # float32 [lines]
    launch: Prepared | None = None  # made by the first launch
    merge: Prepared | None = None  # if the decode kernel does not merge


class Decodes:
    """Launches the decode kernel. `capacity`: most rows of a step; `shares`: whether rows read a common prefix together."""

    def __init__(self, device: torch.device, model_config: Device, capacity: int, shares: bool) -> None:
        self._device, self._facts, self._capacity, self._shares = device, model_config, capacity, shares
        self._pdl = pdl(device)
        self._kinds: dict[tuple[Any, ...], DecodeKind] = {}
        self._layers: dict[tuple[Any, ...], tuple[AttentionSpec, DecodeKind, tuple[float, float]]] = {}  # by layer and strides
        self._space: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by lines and width, used by one layer after another

    def run(self, spec: AttentionSpec, operands: Operands, out: torch.Tensor, batch: ForwardBatch, plan: StepPlan) -> None:
        """All decode rows: row r is token r of queries and `out` [tokens, heads, value width]."""
        rows = plan.num_decodes
        shares = self._shares and rows >= SHARING_ROWS and spec.sliding_window is None
        key = (spec.layer, shares, operands.layout)
        found = self._layers.get(key)
        if found is None or found[0] is not spec:
            found = spec, self._kind(spec, operands, out, shares), scales(spec, operands)
            self._layers[key] = found
        kind = found[1]
        cut, parts, weights = kind.cut, kind.parts, kind.weights
        schedule = plan.schedule(cut, batch, self._pdl)
        sinks = other(spec.sinks, out)
        tensors = (*operands.pointers(), out, parts, weights, sinks, schedule, plan.prefixes.order, batch.page_table)
        numbers = (batch.page_table.stride(0), cut.capacity, cut.items(cut.capacity), cut.own_items, *found[2])
        if kind.launch is None:
            self._prepare(kind, spec, operands, (*tensors, *numbers))
            assert kind.launch is not None
        kind.launch((cut.blocks, cut.items(rows), 1), tensors, numbers)
        if kind.merge is not None:
            kind.merge((cut.heads, rows, 1), (parts, weights, out, schedule), (cut.own_items,))

    def _kind(self, spec: AttentionSpec, operands: Operands, out: torch.Tensor, shares: bool) -> DecodeKind:
        """Of a layer that was not met before: that of the layers like it."""
        constants = operands.constants(spec, out)
        heads, kv_heads = operands.q1.shape[1], operands.k1.shape[1]
        key = (shares, spec.sliding_window, heads, kv_heads, operands.q1.dtype, operands.k1.dtype, *constants.values())
        found = self._kinds.get(key)
        if found is not None:
            return found
        group = operands.group
        sizes = choose_decode(group, operands.loaded, operands.q1.element_size(), self._facts.shared_memory)
        taken = min(group, sizes.tile.queries)
        blocks = kv_heads * -(-group // taken)
        tile_rows = sizes.tile_lanes // taken
        cut = Cut(
            capacity=self._capacity,
            heads=heads,
            blocks=blocks,
            target=max(1, self._facts.processors * sizes.programs // blocks),
            min_keys=sizes.min_keys,
            block_keys=sizes.tile.keys,
            window=spec.sliding_window or 0,
            tile_rows=tile_rows if shares and tile_rows > 1 else 0,
        )
        self._kinds[key] = DecodeKind(sizes, cut, *self._space_for(cut, operands.value_width, out.device))
        return self._kinds[key]

    def _prepare(self, kind: DecodeKind, spec: AttentionSpec, operands: Operands, example: tuple[Any, ...]) -> None:
        sizes, tile, group, out = kind.sizes, kind.sizes.tile, operands.group, example[5]
        constants = {
            **operands.constants(spec, out),
            **tile.constants(group),
            "TILE_ROWS": kind.cut.tile_rows,
            "TILE_LANES": sizes.tile_lanes,
            "TILE_KEYS": sizes.tile_keys,
            "HEAD_LANES": power_of_2(min(group, tile.queries)),
            "NUM_HEADS": kind.cut.heads,
            "MERGES": not sizes.merges_apart,
        }
        if sizes.merges_apart:
            names = ("NUM_HEADS", "VALUE", "BLOCK_VALUE", "TILE_ROWS", "OUT_STRIDE", "OUT_HEAD")
            wide = {name: constants[name] for name in names}
            kind.merge = Prepared(merge_kernel, (*example[6:8], out, example[9], kind.cut.own_items), wide, self._device, MERGE_WARPS)
        kind.launch = Prepared(decode_kernel, example, constants, self._device, tile.warps)

    def _space_for(self, cut: Cut, value: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        lines = (cut.own_items + cut.shared_items * cut.tile_rows) * cut.heads
        found = self._space.get((lines, value))
        if found is None:
            found = torch.empty(lines, value, device=device), torch.empty(lines, device=device)
            self._space[lines, value] = found
        return found
