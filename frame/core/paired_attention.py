"""`PairedAttention`: one attention backend for prompts, another for decodes, over one cache. Knows both by their interface alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from frame.core.interfaces.attention import AttentionBackend
from frame.core.interfaces.batch import AttentionOut, HostView

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionSpec, LatentProjections
    from frame.core.interfaces.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Halves:
    """A step's decodes and its extends, each as a batch with its own backend's plan; None where there are none."""

    decodes: ForwardBatch | None
    extends: ForwardBatch | None


class PairedAttention(AttentionBackend):
    """Both backends have one layout, and both store K and V or neither does: `resolve` sees to it. `plan` is `Halves`."""

    def __init__(self, extends: AttentionBackend, decodes: AttentionBackend) -> None:
        super().__init__(decodes.context)
        self.capabilities = decodes.capabilities  # type: ignore[misc]  # of its class in all others; what layers and graphs ask for
        self._extends = extends
        self._decodes = decodes

    def plan(self, batch: ForwardBatch) -> Halves:
        first, rows = batch.num_decodes, batch.num_rows
        decodes = extends = None
        if first:
            half = batch if first == rows else _decodes(batch)
            decodes = replace(half, plan=self._decodes.plan(half))
        if first < rows:
            half = batch if not first else _extends(batch)
            extends = replace(half, plan=self._extends.plan(half))
        return Halves(decodes, extends)

    def capture_plan(self, batch: ForwardBatch) -> Halves:
        return Halves(replace(batch, plan=self._decodes.capture_plan(batch)), None)

    def replay_plan(self, plan: Halves, batch: ForwardBatch) -> None:
        if plan.decodes is not None:
            self._decodes.replay_plan(plan.decodes.plan, batch)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        halves: Halves = batch.plan
        if halves.decodes is None or halves.extends is None:
            backend, half = self._only(halves)
            return backend.run(spec, q, k, v, half)
        first = batch.num_decodes
        decoded = self._decodes.run(spec, q[:first], k[:first], v[:first], halves.decodes)
        return _joined(batch, decoded, self._extends.run(spec, q[first:], k[first:], v[first:], halves.extends))

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        halves: Halves = batch.plan
        if halves.decodes is None or halves.extends is None:
            backend, half = self._only(halves)
            return backend.run_mla(layer, q_nope, q_rope, latent, half)
        first = batch.num_decodes
        decoded = self._decodes.run_mla(layer, q_nope[:first], q_rope[:first], latent[:first], halves.decodes)
        extended = self._extends.run_mla(layer, q_nope[first:], q_rope[first:], latent[first:], halves.extends)
        return _joined(batch, decoded, extended)

    def _only(self, halves: Halves) -> tuple[AttentionBackend, ForwardBatch]:
        if halves.decodes is not None:
            return self._decodes, halves.decodes
        assert halves.extends is not None  # a step has rows
        return self._extends, halves.extends


def _joined(batch: ForwardBatch, decoded: torch.Tensor, extended: torch.Tensor) -> torch.Tensor:
    """Both results as one, which they are already if both went to the batch's own place."""
    place = batch.get(AttentionOut)
    if place is not None:
        own = place.tensor, place.tensor[len(decoded) :]
        if (decoded.data_ptr(), extended.data_ptr()) == (own[0].data_ptr(), own[1].data_ptr()):
            return place.tensor
    return torch.cat((decoded, extended))


def _decodes(batch: ForwardBatch) -> ForwardBatch:
    first = batch.num_decodes
    return _part(batch, slice(None, first), slice(None, first), batch.query_starts[: first + 1], first)


def _extends(batch: ForwardBatch) -> ForwardBatch:
    first = batch.num_decodes  # as many tokens as rows
    return _part(batch, slice(first, None), slice(first, None), batch.query_starts[first:] - first, 0)


def _part(batch: ForwardBatch, rows: slice, tokens: slice, query_starts: torch.Tensor, num_decodes: int) -> ForwardBatch:
    host = batch.host
    extensions = dict(batch.extensions)
    if (place := batch.get(AttentionOut)) is not None:
        extensions[AttentionOut] = place.part(tokens)
    return replace(
        batch,
        num_decodes=num_decodes,
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        kv_slots=batch.kv_slots[tokens],
        request_slots=batch.request_slots[rows],
        seq_lens=batch.seq_lens[rows],
        query_lens=batch.query_lens[rows],
        query_starts=query_starts,
        host=HostView(host.slots[rows], host.query_lens[rows], host.seq_lens[rows], host.page_table),
        extensions=extensions,
    )
