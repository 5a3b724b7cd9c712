"""The `torch_native` backend: multi-head and latent attention in PyTorch operations, on any device.

Gathers each group's keys from the pages (or slices them, where the pages are contiguous) and calls
scaled dot-product attention. The groups come from `plan.py`. Depends on no request and no page
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel

from frame.attention_backends import TORCH_NATIVE
from frame.attention_backends.torch_native.cached_rows import CachedRows, open_cache, take
from frame.attention_backends.torch_native.plan import Group, Grouping, Groups, show_spans
from frame.attention_backends.torch_native.sparse import attend_sparse
from frame.attention_backends.torch_native.tiled import ReadRows, TiledStep, attend_tiled, find_max_queries
from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import ForwardBatch, SparseKeys, TreeMask
from frame.core.interfaces.build import BuildContext

BLOCK_CELLS = 1 << 24  # scores (queries x keys) for which a mask is built at a time, at most
BLOCK_QUERIES = 512
EXPANDED_BYTES = 1 << 30  # latents stay absorbed if their expansion would be larger than this

MaskView = tuple[int | None, bool, bool, bool]  # (sliding window, causal, in chunks, reads spans)


class StepGroups:
    """The groups of one step, by view, each made once."""

    def __init__(self, batch: ForwardBatch, dtype: torch.dtype) -> None:
        self._batch, self._dtype = batch, dtype
        self._by_view: dict[MaskView, Groups] = {}
        self._tiled: dict[int, TiledStep] = {}

    def get_groups(self, view: MaskView, layer: int) -> Groups:
        """The groups of a view. `layer`: one that has it."""
        groups = self._by_view.get(view)
        if groups is None:
            window, causal, is_chunked, reads_spans = view
            token_bytes = self._token_bytes(layer) if causal else 0
            grouping = Grouping(self._batch, window, self._dtype, token_bytes, is_chunked, reads_spans)
            groups = grouping.make_groups(self._batch.num_decodes) if causal else grouping.make_bidirectional_groups()
            self._by_view[view] = groups
        return groups

    def get_tiled(self, queries: int) -> TiledStep:
        """The blocks of at most `queries` queries."""
        return self._tiled.setdefault(queries, TiledStep(self._batch, queries))

    def _token_bytes(self, layer: int) -> int:
        return sum(tensor[0, 0].numel() * tensor.element_size() for tensor in self._batch.kv.layer(layer))


class TorchNativeBackend(AttentionBackend):
    """Attention in PyTorch operations. `plan` is a `StepGroups`."""

    capabilities: ClassVar[AttentionCapabilities] = TORCH_NATIVE

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._max_queries: dict[tuple[int, ...], int] = {}  # of a tiled block, by the layer's shape
        self._views: dict[MaskView, int] = {}  # the views of this model's layers, each with a layer, collected in the first step

    def plan(self, batch: ForwardBatch) -> StepGroups:
        groups = StepGroups(batch, self.context.dtype)
        for view, layer in self._views.items():
            groups.get_groups(view, layer)
        return groups

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        if self.context.deterministic and spec.causal:
            parts = open_cache(spec, batch)
            return self._attend_tiled(spec, q, lambda slots: (parts[0].read(slots, q.dtype), parts[1].read(slots, q.dtype)), batch)
        groups = self._groups(spec, batch)
        if not spec.causal:
            each = groups.extends
            return _assemble(q.shape[0], each, [self.attend(spec, g, *(take(tensor, g.tokens) for tensor in (q, k, v))) for g in each])
        cached_k, cached_v = open_cache(spec, batch)
        work = [*groups.decodes, *groups.extends]
        # round this step's keys as every later step reads them
        if cached_k.is_rounded and any(group.from_step for group in work):
            k, v = (cached.read(batch.kv_slots, q.dtype) for cached in (cached_k, cached_v))
        results = []
        for group in work:
            if group.from_step:
                keys, values = take(k, group.keys), take(v, group.keys)
            else:
                keys, values = (cached.read(group.keys, q.dtype) for cached in (cached_k, cached_v))
            results.append(self.attend(spec, group, take(q, group.tokens), keys, values))
        return _assemble(q.shape[0], work, results)

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        spec = layer.spec
        (cached,) = open_cache(spec, batch)
        if (chosen := batch.get(SparseKeys)) is not None:
            if batch.get(TreeMask) is not None:
                raise ValueError("layers with sparse attention cannot verify trees of drafted tokens; use a drafter of chains")
            return attend_sparse(layer, q_nope, q_rope, cached, chosen.slots, invariant=self.context.deterministic)
        if self.context.deterministic:
            return layer.unabsorb(self._attend_latents(layer, torch.cat((layer.absorb(q_nope), q_rope), -1), cached, batch))
        groups = self._groups(spec, batch)
        if cached.is_rounded and any(group.from_step for group in groups.extends):
            latent = cached.read(batch.kv_slots, latent.dtype)
        decoded = self._decode_mla(layer, q_nope, q_rope, cached, groups.decodes, batch.num_decodes) if groups.decodes else None
        results = [self._extend_mla(layer, q_nope, q_rope, latent, cached, group) for group in groups.extends]
        if not results and decoded is not None:
            return decoded
        out = _assemble(q_nope.shape[0], groups.extends, results)
        if decoded is not None:
            out[: batch.num_decodes] = decoded
        return out

    def _attend_latents(self, layer: LatentProjections, q: torch.Tensor, cached: CachedRows, batch: ForwardBatch) -> torch.Tensor:
        """Absorbed queries [tokens, heads, rank + rope] -> [tokens, heads, rank], tiled."""

        def read(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = cached.read(slots, q.dtype)[:, None]
            return rows, rows[..., : layer.kv_lora_rank]

        return self._attend_tiled(replace(layer.spec, head_dim=q.shape[2], v_head_dim=layer.kv_lora_rank), q, read, batch)

    def _attend_tiled(self, spec: AttentionSpec, q: torch.Tensor, read: ReadRows, batch: ForwardBatch) -> torch.Tensor:
        shape = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        queries = self._max_queries.get(shape)
        if queries is None:
            queries = self._max_queries[shape] = find_max_queries(spec, spec.head_dim, spec.v_head_dim, q.device)
        groups: StepGroups = batch.plan
        return attend_tiled(spec, q, read, spec.v_head_dim, groups.get_tiled(queries))

    def _decode_mla(
        self,
        layer: LatentProjections,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        cached: CachedRows,
        groups: list[Group],
        num_decodes: int,
    ) -> torch.Tensor:
        """All decodes, absorbed and projected together -> [num_decodes, heads, v_head_dim]."""
        q = torch.cat((layer.absorb(q_nope[:num_decodes]), q_rope[:num_decodes]), dim=-1)
        results = [self._absorbed(layer, group, take(q, group.tokens), cached.read(group.keys, q.dtype)) for group in groups]
        return layer.unabsorb(_assemble(num_decodes, groups, results))

    def _extend_mla(
        self,
        layer: LatentProjections,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        cached: CachedRows,
        group: Group,
    ) -> torch.Tensor:
        """One group of extends in the cheaper form -> [rows, query_len, heads, v_head_dim]."""
        if group.from_step:
            keys = take(latent, group.keys)
        else:
            keys = cached.read(group.keys, latent.dtype)
        nope, rope = take(q_nope, group.tokens), take(q_rope, group.tokens)
        if _expands(layer, group, latent.element_size()):
            return self._expanded(layer, group, torch.cat((nope, rope), dim=-1), keys)
        attended = self._absorbed(layer, group, torch.cat((layer.absorb(nope), rope), dim=-1), keys)
        return layer.unabsorb(attended.flatten(0, 1)).reshape(group.rows, group.query_len, *q_nope.shape[1:2], -1)

    def _absorbed(self, layer: LatentProjections, group: Group, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Attention over the latents as one key head whose values are their first `rank` columns ->
        [rows, query_len, heads, rank]."""
        keys = rows[:, None]
        # the whole latent is used as values and cut afterwards: equal widths keep PyTorch's fast
        # kernel and avoid a copy
        return self.attend(layer.spec, group, q, keys, keys)[..., : layer.kv_lora_rank]

    def _expanded(self, layer: LatentProjections, group: Group, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Attention over keys and values expanded from the latents -> [rows, query_len, heads,
        v_head_dim]."""
        k_nope, v = layer.expand(rows[:, : layer.kv_lora_rank])
        k_rope = rows[:, None, layer.kv_lora_rank :].expand(-1, layer.spec.num_heads, -1)
        return self.attend(layer.spec, group, q, torch.cat((k_nope, k_rope), dim=-1), v)

    def attend(self, spec: AttentionSpec, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [rows * query_len, heads, d], k [rows * key_len, kv_heads, d], v […, kv_heads, dv] ->
        [rows, query_len, heads, dv]."""
        return attend(spec, group, q, k, v)

    def _groups(self, spec: AttentionSpec, batch: ForwardBatch) -> Groups:
        view = (spec.sliding_window, spec.causal, spec.chunked, spec.spans)
        self._views.setdefault(view, spec.layer)
        plan: StepGroups = batch.plan
        return plan.get_groups(view, spec.layer)


def attend(spec: AttentionSpec, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [rows * query_len, heads, d], k [rows * key_len, kv_heads, d], v […, kv_heads, dv] ->
    [rows, query_len, heads, dv]."""
    q = q.view(group.rows, group.query_len, *q.shape[1:])
    k, v = (tensor.view(group.rows, group.key_len, *tensor.shape[1:]) for tensor in (k, v))
    plain = spec.soft_cap is not None or spec.sinks is not None  # PyTorch's attention supports neither
    if group.query_len == 1 or group.mask is not None or not spec.causal:
        return _attend_unfused(spec, q, k, v, group.mask) if plain else _attend_sdpa(spec, q, k, v, group.mask)
    if group.offset == 0 and not plain and group.ends is None and (spec.sliding_window is None or group.key_len <= spec.sliding_window):
        return _attend_sdpa(spec, q, k, v, None, is_causal=True)
    compute = _attend_unfused if plain else _attend_sdpa
    cells = BLOCK_CELLS // (group.rows * spec.num_heads) if plain else BLOCK_CELLS
    blocks = []
    for lo, hi, first, stop in _blocks(group, spec.sliding_window, cells):
        mask = _block_mask(group.offset + lo - first, hi - lo, stop - first, spec, q)
        if spec.chunked and spec.sliding_window is not None:
            mask += _chunk_mask(group.first_key + group.offset + lo, hi - lo, group.first_key + first, stop - first, spec.sliding_window, q)
        if group.ends is not None:
            show_spans(mask[0, 0], group.ends[lo:hi] - first, torch.arange(lo, hi, device=mask.device) + group.offset - first)
        blocks.append(compute(spec, q[:, lo:hi], k[:, first:stop], v[:, first:stop], mask))
    return torch.cat(blocks, dim=1) if len(blocks) > 1 else blocks[0]


def _blocks(group: Group, window: int | None, cells: int) -> Iterator[tuple[int, int, int, int]]:
    """Query blocks and the keys that each sees: (first query, end, first key, end)."""
    size = max(16, min(BLOCK_QUERIES, cells // group.key_len))
    for lo in range(0, group.query_len, size):
        hi = min(lo + size, group.query_len)
        first = 0 if window is None else max(0, group.offset + lo - window + 1)
        yield lo, hi, first, group.offset + hi if group.ends is None else group.key_len


def _block_mask(offset: int, queries: int, keys: int, spec: AttentionSpec, like: torch.Tensor) -> torch.Tensor:
    """Additive [1, 1, queries, keys]; query i sees keys up to offset + i, within the window."""
    mask = like.new_full((queries, keys), -torch.inf).triu_(offset + 1)
    if spec.sliding_window is not None:
        mask += like.new_full((queries, keys), -torch.inf).tril_(offset - spec.sliding_window)
    return mask[None, None]


def _chunk_mask(query: int, queries: int, key: int, keys: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Additive [1, 1, queries, keys], from positions `query` and `key` on: a query sees no key
    before its own chunk of `size`."""
    at = torch.arange(query, query + queries, device=like.device)[:, None]
    hidden = torch.arange(key, key + keys, device=like.device)[None] < at // size * size
    return like.new_zeros(queries, keys).masked_fill_(hidden, -torch.inf)[None, None]


def _attend_sdpa(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool = False
) -> torch.Tensor:
    """F.scaled_dot_product_attention. Unequal widths are padded, because they disable PyTorch's
    fast kernels."""
    rows, queries, heads, width = q.shape
    kv_heads, value_width = k.shape[2], v.shape[3]
    if value_width != width:
        q, k, v = (_widened(tensor, max(width, value_width)) for tensor in (q, k, v))
    if queries == 1:  # query heads that share keys become queries of one head, so keys are read once
        q = q.reshape(rows, kv_heads, heads // kv_heads, -1)
    else:
        q = q.transpose(1, 2)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    grouped = queries > 1 and kv_heads < heads
    # avoids a copy per head; CUDA's kernels misread a stride of 0
    if grouped and kv_heads == 1 and k.device.type == "cpu":
        k, v, grouped = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1), False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=spec.scale, enable_gqa=grouped)
    out = out.reshape(rows, 1, heads, -1) if queries == 1 else out.transpose(1, 2)
    return out[..., :value_width]


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(tensor, (0, width - tensor.shape[3])) if tensor.shape[3] < width else tensor


def _attend_unfused(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention with soft cap and sinks, in float32. A sink is one more logit per head, without a
    value."""
    rows, queries, heads, _ = q.shape
    kv_heads, dtype = k.shape[2], q.dtype
    q = q.float().view(rows, queries, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)
    k, v = (tensor.float().transpose(1, 2)[:, :, None] for tensor in (k, v))
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


def _expands(layer: LatentProjections, group: Group, itemsize: int) -> bool:
    """Whether the expanded form needs fewer multiplications than the absorbed one, and fits into
    EXPANDED_BYTES."""
    spec, rank, rope = layer.spec, layer.kv_lora_rank, layer.qk_rope_head_dim
    # per head and expanded key, or per head and absorbed query
    projection = rank * (layer.qk_nope_head_dim + spec.v_head_dim)
    widths = layer.qk_nope_head_dim + rope + spec.v_head_dim
    if group.rows * group.key_len * spec.num_heads * widths * itemsize > EXPANDED_BYTES:
        return False
    expanded = group.key_len * (projection + group.query_len * widths)
    absorbed = group.query_len * (projection + group.key_len * (2 * rank + rope))
    return expanded < absorbed  # equal for heads as wide as the latent


def _assemble(tokens: int, groups: list[Group], results: list[torch.Tensor]) -> torch.Tensor:
    """The groups' results [rows, query_len, …] in the order of the step's tokens, without
    padding."""
    flat = [result.flatten(0, 1) for result in results]
    if len(groups) == 1 and groups[0].valid is None and flat[0].shape[0] == tokens:
        return flat[0]
    out = flat[0].new_empty(tokens, *flat[0].shape[1:])
    for group, result in zip(groups, flat, strict=True):
        out[group.targets] = result if group.valid is None else result.index_select(0, group.valid)
    return out
