"""Fake functions of attention libraries that take page tables, with their real signatures:
flashinfer 0.6.12, flash-attention's `hopper/`, sgl-flash-mla 1.0.

They compute in float64 on the host. `test_page_tables.py` compares the signatures with installed
libraries.
"""

from __future__ import annotations

from typing import Any

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """One row: q [n, heads, d], k and v [m, kv_heads, …]. The last query is at the last
    key's position."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    keys = torch.arange(k.shape[0])[None]
    hidden = (keys > at) & causal
    if window_left >= 0:
        hidden |= keys < at - window_left
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, q.shape[0], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def row_of(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a row with the pages `table`; cache [pages, page_size, …]."""
    count = -(-length // cache.shape[1])
    return cache[table[:count].long()].flatten(0, 1)[:length]


def check_tables(block_tables: torch.Tensor, page_size: int, rows: int) -> None:
    assert block_tables.dtype == torch.int32
    assert block_tables.shape[0] == rows
    assert block_tables.shape[1] % max(1, 128 // page_size) == 0, "tables hold pages for a multiple of 128 tokens"


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor:
    assert kv_layout == "NHD" and backend == "trtllm-gen" and out is not None and not workspace_buffer.any()
    check_tables(block_tables, kv_cache[0].shape[1], query.shape[0])
    assert max_seq_len >= int(seq_lens.max()) and seq_lens.dtype == torch.int32
    for row, length in enumerate(seq_lens.tolist()):
        k, v = (row_of(part, block_tables[row], length) for part in kv_cache)
        out[row : row + 1] = attend(query[row : row + 1], k, v, bmm1_scale, window_left, sinks=sinks) * bmm2_scale
    return out


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor:
    assert kv_layout == "NHD" and causal and out is not None
    check_tables(block_tables, kv_cache[0].shape[1], batch_size)
    assert cum_seq_lens_q.dtype == cum_seq_lens_kv.dtype == torch.int32
    starts = cum_seq_lens_q.tolist()
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist() and starts[-1] == query.shape[0]
    assert max_q_len == int(cum_seq_lens_q.diff().max()) and max_kv_len == int(seq_lens.max())
    for row, length in enumerate(seq_lens.tolist()):
        k, v = (row_of(part, block_tables[row], length) for part in kv_cache)
        part = slice(starts[row], starts[row + 1])
        out[part] = attend(query[part], k, v, bmm1_scale, window_left, sinks=sinks) * bmm2_scale
    return out


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
) -> torch.Tensor:
    rows, queries, heads, width = query.shape
    assert backend == "trtllm-gen" and queries == 1 and width == kv_lora_rank + qk_rope_head_dim == kv_cache.shape[-1]
    assert out is not None and tuple(out.shape) == (rows, 1, heads, kv_lora_rank) and not workspace_buffer.any()
    check_tables(block_tables, kv_cache.shape[1], rows)
    assert max_seq_len >= int(seq_lens.max())
    for row, length in enumerate(seq_lens.tolist()):
        latent = row_of(kv_cache, block_tables[row], length)[:, None]
        out[row] = attend(query[row], latent, latent[..., :kv_lora_rank], bmm1_scale) * bmm2_scale
    return out


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: Any = (None, None, None, None),
    num_elts_per_sage_attn_blk: Any = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
) -> torch.Tensor:
    assert is_causal and not return_lse and out is not None and window_left == -1
    starts, keys = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
    assert key.shape[:2] == value.shape[:2] and keys[-1] == key.shape[0] and len(starts) == batch_size + 1
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert (max_q_len, max_kv_len) == (int(cum_seq_lens_q.diff().max()), int(seq_lens.max()))
    for row in range(batch_size):
        part, own = slice(starts[row], starts[row + 1]), slice(keys[row], keys[row + 1])
        out[part] = attend(query[part], key[own], value[own], bmm1_scale) * bmm2_scale
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    assert page_table is not None and cu_seqlens_q is not None and softmax_scale is not None and causal
    assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1 and max_seqlen_q == int(cu_seqlens_q.diff().max())
    starts = cu_seqlens_q.tolist()
    assert starts[-1] == q.shape[0] and window_size[1] in (-1, 0)
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    for row, length in enumerate(cache_seqlens.tolist()):
        keys, values = (row_of(part, page_table[row], length) for part in (k_cache, v_cache))
        part = slice(starts[row], starts[row + 1])
        query = q[part]
        if qv is not None:  # scored against the values, and added
            keys, query = torch.cat((keys, values), dim=-1), torch.cat((query, qv[part]), dim=-1)
        out[part] = attend(query, keys, values, softmax_scale, window_size[0], softcap)
    return out


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], None]:
    return {}, None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert use_legacy and block_table is not None and cache_seqlens is not None and softmax_scale is not None
    assert k_cache.shape[2] == 1 and q.shape[1] == 1 and q.is_contiguous()
    lengths = cache_seqlens.tolist()
    assert tile_scheduler_metadata.setdefault("lengths", lengths) == lengths, "a schedule is good for one step"
    out = q.new_empty(*q.shape[:3], head_dim_v)
    for row, length in enumerate(lengths):
        latent = row_of(k_cache, block_table[row], length)
        out[row] = attend(q[row], latent, latent[..., :head_dim_v], softmax_scale)
    return out, out.new_zeros(q.shape[0], q.shape[2], 1)
