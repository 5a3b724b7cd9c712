"""The extend rows of a step: tile sizes and launches, kept from one step to the next. Knows no request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from frame.attention_backends.triton.extend import extend_kernel
from frame.attention_backends.triton.launch import Launch, Operands, other
from frame.attention_backends.triton.tiles import Device, choose_tile, extend_queries
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels import pdl

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.batch import ForwardBatch


class Extends:
    """Launches the extend kernel."""

    def __init__(self, device: torch.device, facts: Device) -> None:
        self._facts = facts
        self._pdl = pdl(device)
        self._launches: dict[tuple[Any, ...], tuple[AttentionSpec, Launch]] = {}  # by layer, tile and strides of its queries

    def run(
        self,
        spec: AttentionSpec,
        operands: Operands,
        out: torch.Tensor,
        batch: ForwardBatch,
        plan: StepPlan,
        key_starts: torch.Tensor | None = None,
    ) -> None:
        """All extend rows. Queries and `out` are indexed by the step's tokens; `key_starts` tells where a row's keys begin that lie
        side by side."""
        group = operands.group
        queries = extend_queries(group, max(operands.blocks), operands.q1.element_size(), plan.longest_query)
        tiles = plan.tiles(queries // min(group, queries))
        q2 = operands.q2
        key = (spec.layer, queries, operands.page_size, operands.q1.stride(), None if q2 is None else q2.stride())
        found = self._launches.get(key)
        if found is None or found[0] is not spec:
            found = spec, self._prepare(spec, operands, out, batch, queries)
            self._launches[key] = found
        arguments = (
            *operands.pointers(),
            out,
            other(spec.sinks, out),
            tiles,
            batch.query_starts,
            batch.seq_lens,
            batch.request_slots,
            batch.page_table,
            other(key_starts, batch.seq_lens),
            tiles.shape[1],
            plan.num_decodes,
            spec.scale,
        )
        blocks = operands.k1.shape[1] * -(-group // min(group, queries))
        found[1]((blocks, tiles.shape[1], 1), arguments)

    def _prepare(self, spec: AttentionSpec, operands: Operands, out: torch.Tensor, batch: ForwardBatch, queries: int) -> Launch:
        tile = choose_tile(queries, operands.loaded, operands.q1.element_size(), self._facts.shared_memory, is_decode=False)
        constants = {
            **operands.constants(spec, tile, out),
            "TABLE_STRIDE": batch.page_table.stride(0),
            "WINDOW": spec.sliding_window or 0,
            "PDL": self._pdl,
        }
        return Launch(extend_kernel, constants, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=self._pdl)
