"""`LatentLayer`: the deltas of a latent attention's `kv_b_proj`, of all adapters on the device.

They are applied to queries and results: with W + B A in place of W, an absorbed query q of a head
gets (q B_k) A, and a result o gets (o A^T) B_v^T. The layer calls it as its `LatentDelta`. Must not
know slots, requests or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from frame.adapters.pooled_layers import PooledLayer

if TYPE_CHECKING:
    from frame.adapters.deltas import LayerPages
    from frame.adapters.pooled_layers import StepRows
    from frame.core.interfaces.adapter_layers import Span


@dataclass(slots=True)
class LatentLayer(PooledLayer):
    """`widths`: rows of a head, for keys and for values. A page has, by head, B of the keys as `a`
    and of the values as `b` (`heads`), and A both ways (`latent`)."""

    widths: tuple[int, ...] = ()
    heads: PooledLayer = field(kw_only=True)
    latent: PooledLayer = field(kw_only=True)

    @classmethod
    def create(cls, name: str, latent: Span, heads: Span, widths: tuple[Span, Span], rows: StepRows) -> LatentLayer:
        """See `AdapterLayers.add_latent_layer`."""
        sizes = tuple(span.size for span in widths)
        by_head = PooledLayer((), widths[0], (widths[1],), heads.size // sum(sizes), False, rows)
        both_ways = PooledLayer((), latent, (latent,), 0, False, rows)
        return cls((name,), latent, (heads,), 0, False, rows, widths=sizes, heads=by_head, latent=both_ways)

    @property
    def is_active(self) -> bool:
        return self.rows.may_change(self.index)

    @property
    def adapted_rows(self) -> torch.Tensor:
        """See `LatentDelta`."""
        return self.rows.select_plan(0).places >= 0

    @property
    def sizes(self) -> tuple[int, int]:
        return sum(self.heads.sizes), sum(self.latent.sizes)

    def begin_at(self, index: int, first: int) -> None:
        """See `PooledLayer`."""
        self.index, self.first = index, first
        self.heads.first, self.latent.first = first, first + self.sizes[0]

    def open_pages(self, pages: torch.Tensor, counts: torch.Tensor, scales: torch.Tensor, has_scale: torch.Tensor) -> None:
        """See `PooledLayer`. `scales` are applied here."""
        for part in (self.heads, self.latent):
            part.open_pages(pages, counts, scales[:, :0], torch.zeros_like(has_scale))
        PooledLayer.open_pages(self, pages[:0], counts, scales, has_scale)

    def list_pages(self) -> list[LayerPages]:
        """See `PooledLayer`."""
        return [self.heads.allocated, self.latent.allocated]

    def view_page(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PooledLayer`. `b` is a copy."""
        (keys, values), (a, _) = self.heads.view_page(page), self.latent.view_page(page)
        return a, torch.cat((keys.transpose(-2, -1), values), -2).flatten(-3, -2).unsqueeze(-3)

    def write_page(self, page: torch.Tensor, place: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """See `PooledLayer`."""
        keys, values = b.unflatten(0, (-1, sum(self.widths))).split(self.widths, 1)  # [heads, width, ranks]
        (page_keys, page_values), (page_a, transposed) = self.heads.view_page(page), self.latent.view_page(page)
        ranks = slice(0, len(a))
        page_keys[:, ranks], page_values[..., ranks] = keys.transpose(1, 2), values
        page_a[0, ranks], transposed[0, :, ranks] = a, a.t()

    def absorb(self, q_nope: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """See `LatentDelta`."""
        return self._add(self._scale(q_nope, slice(0, self.widths[0])), multiply, self.heads, self.latent)

    def unabsorb(self, out: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """See `LatentDelta`."""
        return self._scale(self._add(out, multiply, self.latent, self.heads), slice(self.widths[0], None))

    def _add(
        self, x: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], first: PooledLayer, second: PooledLayer
    ) -> torch.Tensor:
        """The product, and that of x with `a` of the first and `b` of the second."""
        operations = self.rows.operations
        pairs, plain = self.rows.select_heads(self.heads.num_experts)
        plans = (pairs, plain) if first is self.heads else (plain, pairs)
        shrunk = operations.shrink(x.flatten(0, 1).contiguous(), first.allocated, plans[0])
        out = multiply(x)
        operations.expand(out.flatten(0, 1), shrunk, second.allocated, plans[1])
        return out

    def _scale(self, x: torch.Tensor, columns: slice) -> torch.Tensor:
        """Multiply [rows, heads, width] by the factors of the rows' adapters."""
        places, pages = self.rows.select_plan(0).places, self.allocated
        scales = pages.scales.unflatten(1, (-1, sum(self.widths)))[..., columns]
        index = places.clamp_min(0)
        is_scaled = (pages.has_scale.index_select(0, index) > 0) & (places >= 0)
        return (x * scales.index_select(0, index).masked_fill(~is_scaled[:, None, None], 1.0)).to(x.dtype)
