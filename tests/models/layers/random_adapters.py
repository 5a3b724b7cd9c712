"""`AdapterLayers` with random deltas for every layer that registers, by the reference products, and
the same deltas merged into a checkpoint's tensors."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from frame.adapters.deltas import LayerPages, RowPlan, TorchDeltas
from frame.core.interfaces.adapter_layers import LatentDelta, LayerDelta, Span
from frame.interfaces.adapter import PAGE_RANKS, LowRankDelta
from frame.models.layers import decoder, encoder

RANKS = (5, 20)  # of the adapter of each place: one page, and two
PAGES = torch.tensor([[1, 1], [2, 0]], dtype=torch.int32)  # of each place


class RandomAdapters:
    """The deltas of a checkpoint layer depend on its name and the place alone. Every second layer
    of the second adapter has an output scale. `places` int32 [rows]: of the rows that layers
    compute; None: the step has no adapters."""

    adapts_routers = True

    def __init__(self) -> None:
        self.places: torch.Tensor | None = None
        self.pairs: tuple[torch.Tensor, torch.Tensor] | None = None
        self.made: dict[str, list[LowRankDelta]] = {}  # by checkpoint layer; the adapters' in order

    def make(self, name: str, outputs: int, inputs: int, scales: bool) -> list[LowRankDelta]:
        deltas = []
        for place, rank in enumerate(RANKS):
            random = torch.Generator().manual_seed(zlib.crc32(f"{place} {name}".encode()))
            a, b = torch.randn(rank, inputs, generator=random), torch.randn(outputs, rank, generator=random)
            scale = torch.rand(outputs, generator=random) + 0.5 if scales and place and zlib.crc32(name.encode()) % 2 else None
            deltas.append(LowRankDelta(a * inputs**-0.5, b * (0.3 * rank**-0.5), output_scale=scale))
        self.made[name] = deltas
        return deltas

    def add_layer(
        self, names: Sequence[str], inputs: Span, outputs: Sequence[Span], num_experts: int = 0, lookup: bool = False
    ) -> LayerDelta:
        with torch.device("cpu"):  # models are built on the meta device
            return RandomDelta(self, self._draw(names, inputs, outputs, num_experts, lookup))

    def add_latent_layer(self, name: str, latent: Span, heads: Span, widths: tuple[Span, Span]) -> LatentDelta:
        with torch.device("cpu"):
            deltas = self.make(name, heads.full, latent.full, scales=True)
        return RandomLatentDelta(self, deltas, slice(heads.start, heads.start + heads.size), (widths[0].size, widths[1].size))

    def _draw(self, names: Sequence[str], inputs: Span, outputs: Sequence[Span], num_experts: int, lookup: bool) -> LayerPages:
        assert not set(names) & self.made.keys(), "a layer registers twice"
        experts, parts = max(1, num_experts), len(outputs)
        assert len(names) == experts * parts
        total = sum(span.size for span in outputs)
        a = torch.zeros(3, experts * parts, PAGE_RANKS, inputs.size)
        b = torch.zeros(3, experts, total, PAGE_RANKS)
        scales, has_scale = torch.ones(2, total), torch.zeros(2, dtype=torch.int32)
        columns = slice(inputs.start, inputs.start + inputs.size)
        for number, name in enumerate(names):
            expert, part = divmod(number, parts)
            span, first = outputs[part], sum(each.size for each in outputs[:part])
            rows = slice(span.start, span.start + span.size)
            shape = (inputs.full, span.full) if lookup else (span.full, inputs.full)
            for place, stored in enumerate(self.make(name, *shape, scales=not num_experts and not lookup)):
                delta = replace(stored, a=stored.b.t(), b=stored.a.t()) if lookup else stored
                for index, start in enumerate(range(0, RANKS[place], PAGE_RANKS)):
                    page, some = int(PAGES[place, index]), slice(start, min(start + PAGE_RANKS, RANKS[place]))
                    width = some.stop - some.start
                    a[page, number, :width] = delta.a[some, columns]
                    b[page, expert, first : first + span.size, :width] = delta.b[rows, some]
                if delta.output_scale is not None:
                    scales[place, first : first + span.size], has_scale[place] = delta.output_scale[rows], 1
        splits = tuple(span.size for span in outputs)
        return LayerPages(a, b, splits, torch.tensor([1, 2], dtype=torch.int32), scales, has_scale, num_experts)

    @contextlib.contextmanager
    def select_rows(self, indices: torch.Tensor | None) -> Iterator[None]:
        before = self.places
        self.places = None if before is None or indices is None else before[indices]
        yield
        self.places = before

    @contextlib.contextmanager
    def select_pairs(self, tokens: torch.Tensor, experts: torch.Tensor) -> Iterator[None]:
        self.pairs = tokens, experts
        yield
        self.pairs = None

    def merge(self, place: int, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The tensors of a checkpoint with the adapter of `place`."""
        for name, tensor in weights:
            deltas = self.made.get(name.removesuffix(".weight"))
            if deltas is None:
                yield name, tensor
                continue
            delta = deltas[place]
            merged = tensor[...] + delta.b @ delta.a
            yield name, merged if delta.output_scale is None else merged * delta.output_scale[:, None]

    def merge_loads(self, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let models that are loaded from now on have the adapter of `place` in their weights."""
        for module, name in ((decoder, "load_parameters"), (decoder, "load_tied"), (encoder, "load_parameters")):
            monkeypatch.setattr(module, name, self._merge_first(getattr(module, name), place))

    def _merge_first(self, load: Callable[..., set[str]], place: int) -> Callable[..., set[str]]:
        def merge_and_load(*arguments: Any) -> set[str]:
            weights = next(each for each in arguments if isinstance(each, Iterator))
            return load(*(self.merge(place, each) if each is weights else each for each in arguments))

        return merge_and_load


class RandomDelta:
    """One layer's."""

    operations = TorchDeltas()
    can_gate = can_pair = False

    def __init__(self, layers: RandomAdapters, pages: LayerPages) -> None:
        self.layers, self.pages = layers, pages

    @property
    def is_active(self) -> bool:
        return self.layers.places is not None

    def plan(self) -> RowPlan:
        assert self.layers.places is not None
        if not self.pages.num_experts:
            return RowPlan(self.layers.places, PAGES)
        assert self.layers.pairs is not None
        tokens, experts = self.layers.pairs
        return RowPlan(self.layers.places[tokens], PAGES, experts)

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        plan = self.plan()
        assert x.shape == (len(plan.places), self.pages.a.shape[-1])
        return self.operations.shrink(x, self.pages, plan).flatten(1)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        assert len(ids) == len(self.plan().places)
        size = self.pages.a.shape[-1]
        rows = torch.zeros(len(ids), size)
        mine = (ids >= 0) & (ids < size)
        rows[mine, ids[mine]] = 1.0
        return self.shrink(rows)

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        plan = self.plan()
        assert out.shape == (len(plan.places), self.pages.b.shape[2])
        assert out.stride(-1) == 1
        self.operations.expand(out, shrunk.unflatten(1, (self.pages.num_parts, -1)), self.pages, plan, bias)
        return out


class RandomLatentDelta:
    """Those of the keys and values that a latent makes, row by row."""

    gemm: Any = None

    def __init__(self, layers: RandomAdapters, deltas: Sequence[LowRankDelta], rows: slice, widths: tuple[int, int]) -> None:
        self.layers, self.widths = layers, widths
        self.heads = [delta.b[rows].unflatten(0, (-1, sum(widths))) for delta in deltas]  # [heads, nope + value, r]
        self.latents = [delta.a for delta in deltas]  # [r, rank]
        self.scales = [
            torch.ones(rows.stop)[rows].unflatten(0, (-1, sum(widths))) if scale is None else scale[rows].unflatten(0, (-1, sum(widths)))
            for scale in (delta.output_scale for delta in deltas)
        ]

    @property
    def is_active(self) -> bool:
        return self.layers.places is not None

    @property
    def adapted_rows(self) -> torch.Tensor:
        assert self.layers.places is not None
        return self.layers.places >= 0

    def absorb(self, q_nope: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        assert self.layers.places is not None
        assert len(q_nope) == len(self.layers.places)
        nope = self.widths[0]
        q = q_nope.clone()
        for row, place in self._list_rows():
            q[row] *= self.scales[place][:, :nope]
        out = multiply(q)
        for row, place in self._list_rows():
            out[row] += torch.einsum("hn,hnr,ri->hi", q[row], self.heads[place][:, :nope], self.latents[place])
        return out

    def unabsorb(self, out: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        nope, values = self.widths[0], multiply(out)
        for row, place in self._list_rows():
            values[row] += torch.einsum("hi,ri,hvr->hv", out[row], self.latents[place], self.heads[place][:, nope:])
            values[row] *= self.scales[place][:, nope:]
        return values

    def _list_rows(self) -> list[tuple[int, int]]:
        assert self.layers.places is not None
        return [(row, place) for row, place in enumerate(self.layers.places.tolist()) if place >= 0]


def follow_rows(session: Any, adapters: RandomAdapters, places: Mapping[int, int]) -> Any:
    """The session, whose steps now have the adapters of `places`, by slot."""
    build = session.batch

    def batch(rows: Sequence[tuple[int, Sequence[int]]], num_decodes: int, *others: Any) -> Any:
        adapters.places = torch.tensor([places[slot] for slot, tokens in rows for _ in tokens], dtype=torch.int32)
        return build(rows, num_decodes, *others)

    session.batch = batch
    return session
