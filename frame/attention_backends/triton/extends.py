"""The extend rows of a step: tile sizes and launches, kept from one step to the next. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from frame.attention_backends.triton.extend import extend_kernel
from frame.attention_backends.triton.launch import Launch, Operands, other, scales
from frame.attention_backends.triton.tiles import Device, Tile, choose_extend
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels import INTERPRETED, pdl

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class ExtendLaunch:
    """What one layer's extends need besides its tensors."""

    spec: AttentionSpec
    launch: Launch
    block_keys: int


class Extends:
    """Launches the extend kernel."""

    def __init__(self, device: torch.device, facts: Device) -> None:
        self._facts = facts
        self._pdl = pdl(device)
        # from compute capability 9.0 on, boxes of consecutive rows are copied by a unit of their own
        self._describes = INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))
        self._launches: dict[tuple[Any, ...], ExtendLaunch] = {}  # by layer, tile, where keys lie and strides

    def run(
        self,
        spec: AttentionSpec,
        cached: Operands | None,
        own: Operands | None,
        out: torch.Tensor,
        batch: ForwardBatch,
        plan: StepPlan,
        key_starts: torch.Tensor | None = None,
    ) -> None:
        """All extend rows. Queries, `out` and `own`, this step's keys and values, are indexed by the step's tokens; without `own`
        those are read from the cache as well. With `key_starts`, `own` has all keys of a row, from there on."""
        some = cached or own
        assert some is not None
        if cached and own and not plan.has_prefixes:
            cached = None
        group = some.group
        tile = choose_extend(
            group, plan.longest_query, some.loaded, some.q1.element_size(), self._facts.shared_memory, gathers=cached is not None
        )
        queries = tile.queries
        tiles = plan.tiles(queries // min(group, queries))
        described = own is not None and self._describes and own.describable
        # the cache's strides are always the same; those of own keys are others when they were gathered from it
        key = (
            spec.layer, queries, described, None if cached is None else cached.q_strides, None if own is None else own.strides()
        )  # fmt: skip
        found = self._launches.get(key)
        if found is None or found.spec is not spec:
            found = self._prepare(spec, cached, own, out, tile, described)
            self._launches[key] = found
        arguments = (
            *some.pointers(),
            *(own.descriptors(found.block_keys) if own and described else (own or some).pointers()[2:]),
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
            batch.page_table.stride(0),
            *scales(spec, some),
        )
        blocks = some.k1.shape[1] * -(-group // min(group, queries))
        found.launch((blocks, tiles.shape[1], 1), arguments)

    def _prepare(
        self, spec: AttentionSpec, cached: Operands | None, own: Operands | None, out: torch.Tensor, tile: Tile, described: bool
    ) -> ExtendLaunch:
        some, beside = cached or own, own or cached
        assert some is not None
        assert beside is not None
        constants = some.constants(spec, tile, out)
        names = [f"{part}_{what}" for part in ("OWN1", "OWN2", "OWN_V") for what in ("STRIDE", "HEAD")]
        constants |= dict(zip(names, beside.strides()[4:], strict=True))
        constants |= {
            "WINDOW": spec.sliding_window or 0,
            "PAGED": cached is not None,
            "BESIDE": own is not None,
            "WHOLE": own is not None and own.are_whole,
            "DESCRIBED": described,
            "PDL": self._pdl,
        }
        launch = Launch(
            extend_kernel, constants, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, launch_pdl=self._pdl
        )
        return ExtendLaunch(spec, launch, tile.keys)
