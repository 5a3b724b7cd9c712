"""Launches the kernels of the batch-invariant mode: one tile size and one split size for each shape
of a layer, whatever the step. Depends on no request.

The partial results of many tokens do not fit into the buffer, so a step may take several launches,
which changes no bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from frame.attention_backends.triton.invariant.split_kernel import merge_kernel, split_kernel
from frame.attention_backends.triton.operands import Operands, compute_scales, get_window, or_unused
from frame.attention_backends.triton.tile_sizes import DeviceLimits, Tile, choose_tile, get_max_queries
from frame.kernels.launch import PreparedLaunch, ceil_div, next_power_of_2

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.attention import AttentionSpec
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.rank_context import Limits

BUFFER_BYTES = 256 << 20
MIN_SPLIT, MAX_SPLITS = 512, 64  # keys of a split at least; splits of a sequence at most
_PROGRAMS = 6  # per multiprocessor, about
_MERGED = 2048  # numbers of a merging program, about
_SHARED = ("Q1_STRIDE", "Q1_HEAD", "Q2_STRIDE", "Q2_HEAD", "K1_STRIDE", "K1_HEAD", "K2_STRIDE", "K2_HEAD", "V_STRIDE", "V_HEAD",
           "SCALE_STRIDE", "GROUP", "PAGE_SIZE", "WIDTH1", "WIDTH2", "VALUE", "BLOCK1", "BLOCK2", "BLOCK_VALUE", "SOFT_CAP",
           "VALUES_IN_KEYS", "WIDE", "UPCAST")  # fmt: skip
_MERGE = ("VALUE", "BLOCK_VALUE", "HAS_SINKS", "OUT_STRIDE", "OUT_HEAD")


class SplitLauncher:
    """Launches attention of all tokens of a step over the paged cache."""

    def __init__(self, device: torch.device, device_limits: DeviceLimits, limits: Limits) -> None:
        self._device, self._limits = device, device_limits
        self._split = max(MIN_SPLIT, next_power_of_2(ceil_div(limits.max_context, MAX_SPLITS)))
        # in one buffer for all layers, whose address captured graphs keep
        self._buffer = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
        self._launches: dict[tuple[Any, ...], tuple[PreparedLaunch, PreparedLaunch]] = {}

    def run(self, spec: AttentionSpec, cached: Operands, out: torch.Tensor, batch: ForwardBatch, plan: StepPlan) -> None:
        """All tokens of the step; `out` [tokens, heads, value]."""
        heads, value = out.shape[1:]
        maximum = get_max_queries(cached.loaded_widths, cached.q1.element_size())
        tile = choose_tile(maximum, cached.loaded_widths, cached.q1.element_size(), self._limits.shared_memory)
        blocks = cached.k1.shape[1] * ceil_div(cached.group, min(cached.group, tile.queries))
        per_tile = tile.queries // min(cached.group, tile.queries)
        max_splits = ceil_div(int(batch.host.seq_lens.max(initial=1)), self._split)
        # tokens of a launch
        room = max(per_tile, (self._buffer.numel() - 8) // (1 + max_splits * heads * (value + 2)))
        tiles = plan.get_all_tiles(per_tile)
        scale, value_scale = compute_scales(spec, cached)
        merge_heads = max(1, min(next_power_of_2(heads), _MERGED // next_power_of_2(value)))
        for first_tile, count, first_token, tokens in plan.divide_tiles(per_tile, room):
            lines = tokens * max_splits * heads
            at, numbers_from = self._buffer[:tokens].view(torch.int32), ceil_div(tokens, 4) * 4  # which are aligned
            partials, sums = self._buffer[numbers_from:].split((lines * value, self._buffer.numel() - numbers_from - lines * value))
            rows = tiles, batch.query_starts, batch.seq_lens, batch.request_slots, batch.page_table
            tensors = (*cached.get_tensors(), partials, sums, at, *rows, *cached.get_scales())
            numbers = tiles.shape[1], first_tile, first_token, max_splits, batch.page_table.stride(0), scale
            merged = partials, sums, at, out, or_unused(spec.sinks, out)
            merged_numbers = first_token, max_splits, value_scale
            key = (get_window(spec), spec.soft_cap, spec.sinks is None, cached.q1.dtype, cached.k1.dtype, heads, value, cached.layout)
            launches = self._launches.get(key)
            if launches is None:
                launches = self._prepare(spec, cached, out, tile, (*tensors, *numbers), (*merged, *merged_numbers), merge_heads)
                self._launches[key] = launches
            turns = max(1, min(max_splits, self._limits.processors * _PROGRAMS // (blocks * count)))
            launches[0]((blocks, count, turns), tensors, numbers)
            launches[1]((tokens, ceil_div(heads, merge_heads), 1), merged, merged_numbers)

    def _prepare(
        self,
        spec: AttentionSpec,
        cached: Operands,
        out: torch.Tensor,
        tile: Tile,
        example: tuple[Any, ...],
        merge_example: tuple[Any, ...],
        merge_heads: int,
    ) -> tuple[PreparedLaunch, PreparedLaunch]:
        made = cached.make_constants(spec, out)
        both = {"NUM_HEADS": out.shape[1], "SPLIT": self._split, "WINDOW": get_window(spec)}
        constants = {name: made[name] for name in _SHARED} | both | tile.make_constants(cached.group)
        merge_constants = {name: made[name] for name in _MERGE} | both | {"HEADS": merge_heads}
        return (
            PreparedLaunch(split_kernel, example, constants, self._device, tile.warps),
            PreparedLaunch(merge_kernel, merge_example, merge_constants, self._device, 4),
        )
