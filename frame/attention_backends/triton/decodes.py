"""The decode rows of a step: cuts, launches and the space for parts, made once for a layer's shape. Knows no request and no cascade."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from frame.attention_backends.triton.decode import decode_kernel, merge_kernel
from frame.attention_backends.triton.launch import Launch, Operands, other, power_of_two, scales
from frame.attention_backends.triton.prefixes import MIN_ROWS
from frame.attention_backends.triton.schedule import Cut
from frame.attention_backends.triton.tiles import DecodeSizes, Device, choose_decode
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels import pdl

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.batch import ForwardBatch

FEW_ROWS = 4  # have sizes of their own: what counts is how long one program takes
SHARING_ROWS = 2 * MIN_ROWS  # smaller batches are not compiled for shared prefixes


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """What one layer's decodes need besides its tensors."""

    spec: AttentionSpec
    cut: Cut
    launch: Launch
    merge: Launch | None  # if the decode kernel does not merge
    parts: torch.Tensor  # float32 [lines, value]
    weights: torch.Tensor  # float32 [lines]


class Decodes:
    """Launches the decode kernel. `capacity`: most rows of a step; `shares`: whether rows read a common prefix together."""

    def __init__(self, device: torch.device, facts: Device, capacity: int, shares: bool) -> None:
        self._facts, self._capacity, self._shares = facts, capacity, shares
        self._pdl = pdl(device)
        self._launches: dict[tuple[Any, ...], DecodeLaunch] = {}  # by layer and strides of its queries
        self._space: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by lines and width, used by one layer after another

    def run(self, spec: AttentionSpec, operands: Operands, out: torch.Tensor, batch: ForwardBatch, plan: StepPlan) -> None:
        """All decode rows: row r is token r of queries and `out` [tokens, heads, value width]."""
        rows = plan.num_decodes
        shares = self._shares and rows >= SHARING_ROWS and spec.sliding_window is None
        few = rows <= FEW_ROWS
        key = (spec.layer, shares, few, operands.q_strides)
        found = self._launches.get(key)
        if found is None or found.spec is not spec:
            sizes = choose_decode(operands.group, operands.loaded, operands.q1.element_size(), self._facts.shared_memory, few)
            found = self._prepare(spec, operands, out, sizes, shares)
            self._launches[key] = found
        schedule = plan.schedule(found.cut, batch, self._pdl)
        arguments = (
            *operands.pointers(),
            out,
            found.parts,
            found.weights,
            other(spec.sinks, out),
            schedule,
            plan.prefixes.order,
            batch.page_table,
            batch.page_table.stride(0),
            found.cut.capacity,
            found.cut.items(found.cut.capacity),
            found.cut.own_items,
            *scales(spec, operands),
        )
        found.launch((found.cut.blocks, found.cut.items(rows), 1), arguments)
        if found.merge:
            found.merge((found.cut.heads, rows, 1), (found.parts, found.weights, out, schedule, found.cut.own_items))

    def _prepare(self, spec: AttentionSpec, operands: Operands, out: torch.Tensor, sizes: DecodeSizes, shares: bool) -> DecodeLaunch:
        tile, group, heads = sizes.tile, operands.group, operands.q1.shape[1]
        taken = min(group, tile.queries)
        blocks = operands.k1.shape[1] * -(-group // taken)
        tile_rows = sizes.tile_lanes // taken
        cut = Cut(
            capacity=self._capacity,
            heads=heads,
            blocks=blocks,
            target=max(1, self._facts.processors * sizes.programs // blocks),
            min_keys=sizes.min_keys,
            block_keys=tile.keys,
            window=spec.sliding_window or 0,
            tile_rows=tile_rows if shares and tile_rows > 1 else 0,
        )
        constants = {
            **operands.constants(spec, tile, out),
            "TILE_ROWS": cut.tile_rows,
            "TILE_LANES": sizes.tile_lanes,
            "TILE_KEYS": sizes.tile_keys,
            "HEAD_LANES": power_of_two(taken),
            "NUM_HEADS": heads,
            "MERGES": not sizes.merges_apart,
            "AT_ONCE": sizes.at_once,
            "PDL": self._pdl,
        }
        names = ("NUM_HEADS", "VALUE", "BLOCK_VALUE", "TILE_ROWS", "OUT_STRIDE", "OUT_HEAD", "AT_ONCE", "PDL")
        wide = {name: constants[name] for name in names}
        merge = Launch(merge_kernel, wide, launch_pdl=self._pdl) if sizes.merges_apart else None
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers, "launch_pdl": self._pdl}
        launch = Launch(decode_kernel, constants, **options)
        parts, weights = self._space_for(cut, operands.value_width, out.device)
        return DecodeLaunch(spec, cut, launch, merge, parts, weights)

    def _space_for(self, cut: Cut, value: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        lines = (cut.own_items + cut.shared_items * cut.tile_rows) * cut.heads
        found = self._space.get((lines, value))
        if found is None:
            found = torch.empty(lines, value, device=device), torch.empty(lines, device=device)
            self._space[lines, value] = found
        return found
