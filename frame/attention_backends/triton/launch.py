"""Launches of the kernels: strides, tile sizes and grids from tensors. Knows the shapes of one layer, no cache and no plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from frame.attention_backends.triton.decode import decode_kernel, merge_kernel
from frame.attention_backends.triton.extend import extend_kernel
from frame.attention_backends.triton.plan import StepPlan
from frame.attention_backends.triton.scan import INTERPRETED, Tile, choose_tile, padded
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Device:
    """What tile and split sizes depend on."""

    processors: int
    shared_memory: int  # bytes that one program may use

    @classmethod
    def of(cls, device: torch.device) -> Device:
        if device.type != "cuda":
            return cls(processors=2, shared_memory=128 << 10)
        index = device.index if device.index is not None else torch.cuda.current_device()
        facts = triton.runtime.driver.active.utils.get_device_properties(index)
        return cls(processors=facts["multiprocessor_count"], shared_memory=facts["max_shared_mem"])


@dataclass(frozen=True, slots=True)
class Operands:
    """Queries [tokens, heads, …] and keys [places, kv_heads, …] in two parts each (the second may be None), and values
    [places, kv_heads, width]; without values the keys' first part is the values. Last dimensions are contiguous."""

    q1: torch.Tensor
    q2: torch.Tensor | None
    k1: torch.Tensor
    k2: torch.Tensor | None
    v: torch.Tensor | None
    page_size: int  # 0: a row's keys lie side by side

    @property
    def group(self) -> int:
        return self.q1.shape[1] // self.k1.shape[1]

    @property
    def value_width(self) -> int:
        return int((self.k1 if self.v is None else self.v).shape[2])

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Padded widths of both key parts and of the values."""
        return padded(self.k1.shape[2]), 16 if self.k2 is None else padded(self.k2.shape[2]), padded(self.value_width)

    def tile(self, queries: int, device: Device, is_decode: bool) -> Tile:
        first, second, value = self.blocks
        loaded = (first, 0 if self.k2 is None else second, 0 if self.v is None else value)
        return choose_tile(queries, loaded, self.q1.element_size(), device.shared_memory, is_decode)

    def pointers(self) -> tuple[torch.Tensor, ...]:
        return self.q1, _or(self.q2, self.q1), self.k1, _or(self.k2, self.k1), _or(self.v, self.k1)

    def strides(self) -> tuple[int, ...]:
        return tuple(stride for part in self.pointers() for stride in (part.stride(0), part.stride(1)))

    def constants(self, spec: AttentionSpec, tile: Tile) -> dict[str, object]:
        """The compile-time arguments that both kernels have."""
        first, second, value = self.blocks
        return {
            "GROUP": self.group,
            "HEADS": min(self.group, tile.queries),
            "PAGE_SIZE": self.page_size,
            "WIDTH1": self.k1.shape[2],
            "WIDTH2": 0 if self.k2 is None else self.k2.shape[2],
            "VALUE": self.value_width,
            "BLOCK1": first,
            "BLOCK2": second,
            "BLOCK_VALUE": value,
            "BLOCK_QUERIES": tile.queries,
            "BLOCK_KEYS": tile.keys,
            "WINDOW": spec.sliding_window or 0,
            "SOFT_CAP": spec.soft_cap or 0.0,
            "HAS_SINKS": spec.sinks is not None,
            "SHARED": self.v is None,
            "UPCAST": INTERPRETED,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def extend_queries(operands: Operands, longest: int) -> int:
    """Queries times heads that one program of the extend kernel takes, when rows have at most `longest` queries."""
    most = 64 if max(operands.blocks) > 128 or operands.q1.element_size() == 4 else 128
    return max(16, min(most, triton.next_power_of_2(longest * operands.group)))


def decode_queries(group: int) -> int:
    """Heads that one program of the decode kernel takes, padded."""
    return max(16, min(64, triton.next_power_of_2(group)))


def launch_extends(
    spec: AttentionSpec,
    operands: Operands,
    out: torch.Tensor,
    batch: ForwardBatch,
    plan: StepPlan,
    device: Device,
    key_starts: torch.Tensor | None = None,
) -> None:
    """All extend rows. Queries and `out` are indexed by the step's tokens."""
    rows = slice(plan.num_decodes, None)
    group = operands.group
    queries = extend_queries(operands, int(plan.query_lens.max()))
    tile = operands.tile(queries, device, is_decode=False)
    constants = operands.constants(spec, tile)
    heads = min(group, queries)
    tiles = plan.tiles(queries // heads)
    grid = (tiles.shape[1], operands.k1.shape[1] * -(-group // heads))
    extend_kernel[grid](
        *operands.pointers(),
        out,
        _or(spec.sinks, out),
        tiles[0],
        tiles[1],
        batch.query_starts[rows],
        batch.seq_lens[rows],
        batch.request_slots[rows],
        batch.page_table,
        _or(key_starts, batch.seq_lens),
        batch.page_table.stride(0),
        *operands.strides(),
        out.stride(0),
        out.stride(1),
        spec.scale,
        **constants,
    )


def launch_decodes(spec: AttentionSpec, operands: Operands, out: torch.Tensor, batch: ForwardBatch, plan: StepPlan, device: Device) -> None:
    """All decode rows: row r is token r of queries and `out`."""
    rows, heads, value = plan.num_decodes, operands.q1.shape[1], operands.value_width
    group, kv_heads = operands.group, operands.k1.shape[1]
    queries = decode_queries(group)
    tile = operands.tile(queries, device, is_decode=True)
    blocks = kv_heads * -(-group // min(group, queries))
    num_splits, split_keys = plan.splits(spec.sliding_window, blocks, heads * value * 4, device.processors, tile.keys)
    split = num_splits > 1
    target = out.new_empty((rows, heads, num_splits, value), dtype=torch.float32) if split else out
    weights = out.new_empty((rows, heads, num_splits), dtype=torch.float32) if split else out
    decode_kernel[(blocks, num_splits, rows)](
        *operands.pointers(),
        target,
        weights,
        _or(spec.sinks, out),
        batch.seq_lens,
        batch.request_slots,
        batch.page_table,
        batch.page_table.stride(0),
        *operands.strides(),
        out.stride(0),
        out.stride(1),
        num_splits,
        split_keys,
        spec.scale,
        NUM_HEADS=heads,
        SPLIT=split,
        **operands.constants(spec, tile),
    )
    if split:
        merge_kernel[(rows, heads)](
            target,
            weights,
            out,
            batch.seq_lens,
            out.stride(0),
            out.stride(1),
            num_splits,
            split_keys,
            NUM_HEADS=heads,
            VALUE=value,
            BLOCK_VALUE=padded(value),
            WINDOW=spec.sliding_window or 0,
        )


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer for an argument that the kernel will not use."""
    return other if tensor is None else tensor
