"""The `torch_native` backend: multi-head and latent attention in PyTorch operations, on any device.

Gathers each group's keys out of the pages (or slices them, where the pages lie side by side) and calls scaled dot-product
attention. Knows no request and no page arithmetic; the groups come from `plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel

from frame.attention_backends import TORCH_NATIVE
from frame.attention_backends.torch_native.plan import Group, Grouping, Groups
from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.build import BuildContext

BLOCK_CELLS = 1 << 24  # most scores (queries x keys) that a mask is built for at once
BLOCK_QUERIES = 512
EXPANDED_BYTES = 1 << 30  # a latent prefix that would expand to more than this stays absorbed

Places = slice | torch.Tensor


class StepGroups:
    """A step's plan: the groups of every window that layers ask for, each made once."""

    def __init__(self, batch: ForwardBatch, dtype: torch.dtype) -> None:
        self._batch, self._dtype = batch, dtype
        self._token_bytes = sum(part[0, 0].numel() * part.element_size() for part in batch.kv.layer(0))
        self._by_window: dict[int | None, Groups] = {}

    def window(self, window: int | None) -> Groups:
        groups = self._by_window.get(window)
        if groups is None:
            groups = Grouping(self._batch, window, self._dtype, self._token_bytes).make(self._batch.num_decodes)
            self._by_window[window] = groups
        return groups


class TorchNativeBackend(AttentionBackend):
    """Plain PyTorch attention. `plan` is a `StepGroups`."""

    capabilities: ClassVar[AttentionCapabilities] = TORCH_NATIVE

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._windows: set[int | None] = set()  # those that this model's layers use, learnt in the first step

    def plan(self, batch: ForwardBatch) -> StepGroups:
        groups = StepGroups(batch, self.context.dtype)
        for window in self._windows:
            groups.window(window)
        return groups

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        groups = self._groups(spec, batch)
        cached_k, cached_v = (part.view(-1, *part.shape[2:]) for part in batch.kv.layer(spec.layer))
        out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_dim)
        for group in (*groups.decodes, *groups.extends):
            keys, values = (k, v) if group.keys is None else (cached_k, cached_v)
            places = group.tokens if group.keys is None else group.keys
            result = attend(spec, group, _take(q, group.tokens), _take(keys, places), _take(values, places))
            _put(out, group, result)
        return out

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        spec = layer.spec
        groups = self._groups(spec, batch)
        (cached,) = batch.kv.layer(spec.layer)
        cached = cached.view(-1, cached.shape[-1])
        out = q_nope.new_empty(q_nope.shape[0], spec.num_heads, spec.v_head_dim)
        if groups.decodes:
            n = batch.num_decodes
            q = torch.cat((layer.absorb(q_nope[:n]), q_rope[:n]), dim=-1)
            attended = q.new_empty(n, spec.num_heads, layer.kv_lora_rank)
            for group in groups.decodes:
                _put(attended, group, _absorbed(layer, group, _take(q, group.tokens), _take(cached, _cached(group))))
            out[:n] = layer.unabsorb(attended)
        for group in groups.extends:
            rows = _take(latent, group.tokens) if group.keys is None else _take(cached, group.keys)
            nope, rope = _take(q_nope, group.tokens), _take(q_rope, group.tokens)
            if _expands(layer, group, latent.element_size()):
                result = _expanded(layer, group, torch.cat((nope, rope), dim=-1), rows)
            else:
                q = torch.cat((layer.absorb(nope), rope), dim=-1)
                result = layer.unabsorb(_absorbed(layer, group, q, rows).flatten(0, 1)).view(*_shape(group), *out.shape[1:])
            _put(out, group, result)
        return out

    def _groups(self, spec: AttentionSpec, batch: ForwardBatch) -> Groups:
        self._windows.add(spec.sliding_window)
        plan: StepGroups = batch.plan
        return plan.window(spec.sliding_window)


def attend(spec: AttentionSpec, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [rows * query_len, heads, d], k [rows * key_len, kv_heads, d], v […, kv_heads, dv] -> [rows, query_len, heads, dv]."""
    q = q.view(*_shape(group), *q.shape[1:])
    k, v = (part.view(group.rows, group.key_len, *part.shape[1:]) for part in (k, v))
    plain = spec.soft_cap is not None or spec.sinks is not None  # PyTorch's own attention has neither
    if group.query_len == 1 or group.mask is not None:
        return _plain(spec, q, k, v, group.mask) if plain else _fused(spec, q, k, v, group.mask)
    if group.offset == 0 and not plain and (spec.sliding_window is None or group.key_len <= spec.sliding_window):
        return _fused(spec, q, k, v, None, is_causal=True)
    compute = _plain if plain else _fused
    cells = BLOCK_CELLS // (group.rows * spec.num_heads) if plain else BLOCK_CELLS
    blocks = [
        compute(spec, q[:, lo:hi], k[:, first:last], v[:, first:last], _block_mask(group.offset + lo - first, hi - lo, last - first, spec, q))
        for lo, hi, first, last in _blocks(group, spec.sliding_window, cells)
    ]
    return torch.cat(blocks, dim=1) if len(blocks) > 1 else blocks[0]


def _blocks(group: Group, window: int | None, cells: int) -> Iterator[tuple[int, int, int, int]]:
    """Query blocks and the keys that each of them sees: (first query, end, first key, end)."""
    size = max(16, min(BLOCK_QUERIES, cells // group.key_len))
    for lo in range(0, group.query_len, size):
        hi = min(lo + size, group.query_len)
        first = 0 if window is None else max(0, group.offset + lo - window + 1)
        yield lo, hi, first, group.offset + hi


def _block_mask(offset: int, queries: int, keys: int, spec: AttentionSpec, like: torch.Tensor) -> torch.Tensor:
    """Additive [1, 1, queries, keys]; query i sees keys up to offset + i, and not before the window."""
    mask = like.new_full((queries, keys), -torch.inf).triu_(offset + 1)
    if spec.sliding_window is not None:
        mask += like.new_full((queries, keys), -torch.inf).tril_(offset - spec.sliding_window)
    return mask[None, None]


def _fused(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool = False
) -> torch.Tensor:
    """Scaled dot-product attention; all of one width, because unequal widths leave PyTorch's fast kernels."""
    rows, queries, heads, width = q.shape
    kv_heads, value_width = k.shape[2], v.shape[3]
    if value_width != width:
        q, k, v = (F.pad(part, (0, max(width, value_width) - part.shape[3])) for part in (q, k, v))
    if queries == 1:  # the heads that share keys become queries of one head: keys are read once
        q = q.reshape(rows, kv_heads, heads // kv_heads, -1)
    else:
        q = q.transpose(1, 2)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if queries > 1 and kv_heads == 1:
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
    grouped = queries > 1 and 1 < kv_heads < heads
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=spec.scale, enable_gqa=grouped)
    out = out.reshape(rows, 1, heads, -1) if queries == 1 else out.transpose(1, 2)
    return out[..., :value_width]


def _plain(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention with soft cap and sinks, in float32. A sink is one more logit of its head, with no value."""
    rows, queries, heads, _ = q.shape
    kv_heads, dtype = k.shape[2], q.dtype
    q = q.float().view(rows, queries, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)
    k, v = (part.float().transpose(1, 2)[:, :, None] for part in (k, v))
    scores = q @ k.transpose(-1, -2) * spec.scale  # [rows, kv_heads, heads / kv_heads, queries, keys]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if mask is not None:
        scores = scores + mask.float()[:, :, None]
    top = scores.amax(-1, keepdim=True)
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(kv_heads, -1, 1, 1)
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if spec.sinks is not None:
        total = total + torch.exp(sinks - top)
    out = (weights @ v) / total
    return out.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1).to(dtype)


def _absorbed(layer: LatentProjections, group: Group, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Attention over the latent itself, as one key head whose values are its first `rank` numbers -> [rows, query_len, heads, rank]."""
    keys = rows[:, None]
    # the whole latent as values, cut afterwards: equal widths keep the fast kernel and spare a copy
    return attend(layer.spec, group, q, keys, keys)[..., : layer.kv_lora_rank]


def _expanded(layer: LatentProjections, group: Group, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Attention over keys and values made of the latent, head by head -> [rows, query_len, heads, v_head_dim]."""
    k_nope, v = layer.expand(rows[:, : layer.kv_lora_rank])
    k_rope = rows[:, None, layer.kv_lora_rank :].expand(-1, layer.spec.num_heads, -1)
    return attend(layer.spec, group, q, torch.cat((k_nope, k_rope), dim=-1), v)


def _expands(layer: LatentProjections, group: Group, itemsize: int) -> bool:
    """Whether the expanded form costs fewer multiplications than the absorbed one, and fits."""
    spec, rank, rope = layer.spec, layer.kv_lora_rank, layer.qk_rope_head_dim
    projection = rank * (layer.qk_nope_head_dim + spec.v_head_dim)  # per head and expanded key, or per head and absorbed query
    widths = layer.qk_nope_head_dim + rope + spec.v_head_dim
    if group.rows * group.key_len * spec.num_heads * widths * itemsize > EXPANDED_BYTES:
        return False
    expanded = group.key_len * (projection + group.query_len * widths)
    absorbed = group.query_len * (projection + group.key_len * (2 * rank + rope))
    return expanded <= absorbed


def _shape(group: Group) -> tuple[int, int]:
    return group.rows, group.query_len


def _cached(group: Group) -> Places:
    assert group.keys is not None, "a decode reads its keys from the cache"
    return group.keys


def _take(source: torch.Tensor, places: Places) -> torch.Tensor:
    return source[places] if isinstance(places, slice) else source.index_select(0, places)


def _put(out: torch.Tensor, group: Group, result: torch.Tensor) -> None:
    """result [rows, query_len, …] into the step's tokens, padding left out."""
    flat = result.flatten(0, 1)
    if group.real is not None:
        flat = flat.index_select(0, group.real)
    out[group.targets] = flat
