"""The rows of a layer's cache as PyTorch operations read them: in the dtype of the queries, with
the scales of an fp8 or int8 cache applied. Depends on no plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from frame.core.interfaces.attention_spec import AttentionSpec
    from frame.core.interfaces.batch import ForwardBatch

FP8 = torch.float8_e4m3fn

Index = slice | torch.Tensor


class CachedRows(NamedTuple):
    """One tensor of a layer's cache [slots, …], and its scale, or those of an int8 cache [slots,
    …]."""

    rows: torch.Tensor
    scale: float | torch.Tensor

    @property
    def is_rounded(self) -> bool:
        """Whether the cache holds other numbers than were stored."""
        return self.rows.dtype in (FP8, torch.int8)

    def read(self, places: Index, dtype: torch.dtype) -> torch.Tensor:
        """Rows in the dtype of the queries. fp8 is gathered as bytes, because PyTorch cannot index
        it."""
        if isinstance(self.scale, torch.Tensor):
            return (take(self.rows, places) * take(self.scale, places).float().unsqueeze(-1)).to(dtype)
        if self.rows.dtype != FP8:
            return take(self.rows, places)
        rows = take(self.rows.view(torch.uint8), places).view(FP8).to(dtype)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


def open_cache(spec: AttentionSpec, batch: ForwardBatch) -> list[CachedRows]:
    """The keys and values, or the latents, of a layer, by slot."""
    tensors = [tensor.flatten(0, 1) for tensor in batch.kv.layer(spec.layer)]
    if tensors[0].dtype == torch.int8:
        scales: list[float | torch.Tensor] = [tensor.flatten(0, 1) for tensor in batch.kv.scales(spec.layer)]
    else:
        scales = [spec.k_scale, spec.v_scale]
    return [CachedRows(tensor, scale) for tensor, scale in zip(tensors, scales, strict=False)]  # a latent has one scale


def take(source: torch.Tensor, places: Index) -> torch.Tensor:
    return source[places] if isinstance(places, slice) else source.index_select(0, places)
