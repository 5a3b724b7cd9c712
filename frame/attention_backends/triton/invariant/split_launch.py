"""Launches the kernels of the batch-invariant mode: one tile size for each shape of a layer,
whatever the step. Depends on no request.

Steps with many tiles take one program for each, which sums its splits. Those with few tiles take
several, whose partial results go through a buffer; what does not fit takes more launches. Neither
changes a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from frame.attention_backends.triton.invariant.split_kernel import count_splits, merge_kernel, split_kernel
from frame.attention_backends.triton.operands import Operands, compute_scales, get_window, or_unused
from frame.attention_backends.triton.tile_sizes import DeviceLimits, choose_tile, get_max_queries
from frame.kernels.launch import PreparedLaunch, ceil_div, next_power_of_2

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.attention import AttentionSpec
    from frame.core.interfaces.batch import ForwardBatch

BUFFER_BYTES = 256 << 20
MAX_SUMMED = 64 * 256  # numbers of a tile's sum, of which a program holds two
_PROGRAMS = 6  # per multiprocessor, about
_MERGED = 512  # numbers of a merging program, about
_SHARED = ("Q1_STRIDE", "Q1_HEAD", "Q2_STRIDE", "Q2_HEAD", "K1_STRIDE", "K1_HEAD", "K2_STRIDE", "K2_HEAD", "V_STRIDE", "V_HEAD",
           "SCALE_STRIDE", "GROUP", "PAGE_SIZE", "WIDTH1", "WIDTH2", "VALUE", "BLOCK1", "BLOCK2", "BLOCK_VALUE", "SOFT_CAP",
           "VALUES_IN_KEYS", "WIDE", "UPCAST", "HAS_SINKS", "OUT_STRIDE", "OUT_HEAD")  # fmt: skip
_MERGE = ("VALUE", "BLOCK_VALUE", "HAS_SINKS", "OUT_STRIDE", "OUT_HEAD")


class SplitLauncher:
    """Launches attention of all tokens of a step over the paged cache."""

    def __init__(self, device: torch.device, device_limits: DeviceLimits) -> None:
        self._device, self._limits = device, device_limits
        # in one buffer for all layers, whose address captured graphs keep
        self._buffer = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
        self._launches: dict[tuple[Any, ...], PreparedLaunch] = {}

    def run(self, spec: AttentionSpec, cached: Operands, out: torch.Tensor, batch: ForwardBatch, plan: StepPlan) -> None:
        """All tokens of the step; `out` [tokens, heads, value]."""
        heads, value = out.shape[1:]
        maximum = get_max_queries(cached.loaded_widths, cached.q1.element_size())
        tile = choose_tile(maximum, cached.loaded_widths, cached.q1.element_size(), self._limits.shared_memory)
        per_program = min(cached.group, tile.queries)
        blocks = cached.k1.shape[1] * ceil_div(cached.group, per_program)
        per_tile = tile.queries // per_program
        tiles, max_splits = plan.get_all_tiles(per_tile), count_splits(int(batch.host.seq_lens.max(initial=1)))
        num_tiles, capacity = tiles.shape[1], self._limits.processors * _PROGRAMS
        merges = 2 * blocks * num_tiles > capacity and tile.queries * cached.block_widths[2] <= MAX_SUMMED
        room = num_tiles * per_tile  # tokens of a launch
        if not merges:
            room = max(per_tile, (self._buffer.numel() - 8) // (1 + max_splits * heads * (value + 2)))
        scale, value_scale = compute_scales(spec, cached)
        merge_heads = max(1, min(next_power_of_2(heads), _MERGED // next_power_of_2(value)))
        sinks = or_unused(spec.sinks, out)
        form = get_window(spec), spec.soft_cap, spec.sinks is None, cached.q1.dtype, cached.k1.dtype, heads, value, cached.layout
        for first_tile, count, first_token, tokens in plan.divide_tiles(per_tile, room):
            lines = 0 if merges else tokens * max_splits * heads
            at, numbers_from = self._buffer[:tokens].view(torch.int32), ceil_div(tokens, 4) * 4  # which are aligned
            partials, sums = self._buffer[numbers_from:].split((lines * value, self._buffer.numel() - numbers_from - lines * value))
            rows = tiles, batch.query_starts, batch.seq_lens, batch.request_slots, batch.page_table
            tensors = (*cached.get_tensors(), partials, sums, at, out, sinks, *rows, *cached.get_scales())
            numbers = num_tiles, first_tile, first_token, max_splits, batch.page_table.stride(0), scale, value_scale
            if (launch := self._launches.get((merges, form))) is None:
                made = cached.make_constants(spec, out)
                constants = {name: made[name] for name in _SHARED} | tile.make_constants(cached.group)
                constants |= {"NUM_HEADS": heads, "WINDOW": form[0], "MERGES": merges}
                launch = PreparedLaunch(split_kernel, (*tensors, *numbers), constants, self._device, tile.warps)
                self._launches[merges, form] = launch
            turns = 1 if merges else max(1, min(max_splits, capacity // (blocks * count)))
            launch((blocks, count, turns), tensors, numbers)
            if merges:
                continue
            results, factors = (partials, sums, at, out, sinks), (first_token, max_splits, value_scale)
            if (launch := self._launches.get((None, form))) is None:
                made = cached.make_constants(spec, out)
                constants = {name: made[name] for name in _MERGE} | {"NUM_HEADS": heads, "WINDOW": form[0], "HEADS": merge_heads}
                launch = PreparedLaunch(merge_kernel, (*results, *factors), constants, self._device, 4)
                self._launches[None, form] = launch
            launch((tokens, ceil_div(heads, merge_heads), 1), results, factors)
