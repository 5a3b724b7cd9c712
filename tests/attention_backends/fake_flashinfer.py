"""A fake FlashInfer: wrappers with the signatures of 0.6.12 that compute in float64 on the host.

`test_flashinfer.py` compares these signatures with an installed library's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tests.attention_backends.fake_page_tables import attend


class _Wrapper:
    """Common part of the wrappers. `buffers`: the addresses that a captured graph reads."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}
        self.planned: dict[str, Any] = {}

    def lists(self, name: str) -> torch.Tensor:
        """A page list as the kernels read it: from the buffer, or as planned."""
        found: torch.Tensor = self.buffers.get(name, self.planned[name])
        return found

    def keep(self, **lists: torch.Tensor) -> None:
        for name, value in lists.items():
            assert value.dtype == torch.int32, f"{name} is {value.dtype}"
            if name in self.buffers and self.buffers[name].data_ptr() != value.data_ptr():
                self.buffers[name][: len(value)].copy_(value)
        self.planned.update(lists)

    def keys(self, cache: tuple[torch.Tensor, ...], row: int, last_page: torch.Tensor, starts: torch.Tensor) -> Iterable[torch.Tensor]:
        first, last = int(starts[row]), int(starts[row + 1])
        pages = self.lists("pages")[first:last].long()
        size = cache[0].shape[1]
        length = (last - first - 1) * size + int(last_page[row])
        return (part[pages].flatten(0, 1)[:length] for part in cache)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__()
        assert kv_layout == "NHD"
        self.rows = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None and paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.rows = len(paged_kv_last_page_len_buffer)
            self.buffers = {
                "starts": paged_kv_indptr_buffer,
                "pages": paged_kv_indices_buffer,
                "last_page": paged_kv_last_page_len_buffer,
            }
        self.use_tensor_cores = use_tensor_cores

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert indptr.device.type == "cpu", "a list on the device would make the plan wait for it"
        assert self.rows in (None, len(last_page_len))
        self.keep(starts=indptr, pages=indices, last_page=last_page_len)
        self.planned.update(heads=(num_qo_heads, num_kv_heads, head_dim), dtype=q_data_type, scale=sm_scale)
        self.planned.update(window=window_left, soft_cap=logits_soft_cap or 0.0, page_size=page_size)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, ...],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = 1,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> torch.Tensor:
        planned = self.planned
        assert tuple(q.shape[1:]) == (planned["heads"][0], planned["heads"][2]) and q.dtype == planned["dtype"] and q.stride(-1) == 1
        assert out is not None and paged_kv_cache[0].shape[1] == planned["page_size"]
        starts, last_page, scale = self.lists("starts"), self.lists("last_page"), planned["scale"] * (k_scale or 1.0)
        for row in range(q.shape[0]):
            k, v = self.keys(paged_kv_cache, row, last_page, starts)
            out[row : row + 1] = attend(q[row : row + 1], k, v, scale, planned["window"], planned["soft_cap"], causal=False)
        return out.mul_(v_scale or 1.0)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Copies nothing; the caller has filled the buffers."""
    assert self.rows == len(last_page_len), "for captured wrappers"
    assert global_override_indptr_cpu is not None
    self.planned.update(scale=sm_scale, window=window_left, soft_cap=logits_soft_cap or 0.0)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        assert kv_layout == "NHD"
        assert backend in ("fa2", "fa3")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert qo_indptr.device.type == paged_kv_indptr.device.type == "cpu"
        self.keep(queries=qo_indptr, starts=paged_kv_indptr, pages=paged_kv_indices, last_page=paged_kv_last_page_len)
        self.planned.update(heads=(num_qo_heads, num_kv_heads, head_dim_qk), dtype=q_data_type, scale=sm_scale, causal=causal)
        self.planned.update(window=window_left, soft_cap=logits_soft_cap or 0.0, page_size=page_size)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, ...],
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> torch.Tensor:
        planned = self.planned
        queries = planned["queries"]
        assert q.shape[0] == int(queries[-1]) and q.dtype == planned["dtype"] and out is not None
        for row in range(len(queries) - 1):
            k, v = self.keys(paged_kv_cache, row, planned["last_page"], planned["starts"])
            part = slice(int(queries[row]), int(queries[row + 1]))
            scale = planned["scale"] * (k_scale or 1.0)
            out[part] = attend(q[part], k, v, scale, planned["window"], planned["soft_cap"], causal=planned["causal"])
        return out.mul_(v_scale or 1.0)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        **others: Any,
    ) -> None:
        self.keep(queries=qo_indptr, keys=kv_indptr)
        self.planned.update(heads=(num_qo_heads, num_kv_heads), widths=(head_dim_qk, head_dim_vo), scale=sm_scale, causal=causal)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        queries, keys = self.planned["queries"].tolist(), self.planned["keys"].tolist()
        assert (k.shape[-1], v.shape[-1]) == self.planned["widths"] and k.shape[0] == v.shape[0] == keys[-1] and out is not None
        for row in range(len(queries) - 1):
            part, own = slice(queries[row], queries[row + 1]), slice(keys[row], keys[row + 1])
            out[part] = attend(q[part], k[own], v[own], self.planned["scale"], causal=self.planned["causal"])
        return out


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if use_cuda_graph:
            assert qo_indptr is not None and kv_indptr is not None and kv_indices is not None and kv_len_arr is not None
            self.buffers = {"queries": qo_indptr, "starts": kv_indptr, "pages": kv_indices, "lengths": kv_len_arr}

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        self.keep(queries=qo_indptr, starts=kv_indptr, pages=kv_indices, lengths=kv_len_arr)
        self.planned.update(heads=num_heads, widths=(head_dim_ckv, head_dim_kpe), scale=sm_scale, causal=causal, page_size=page_size)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
    ) -> torch.Tensor:
        assert (q_nope.shape[-1], q_pe.shape[-1]) == self.planned["widths"] == (ckv_cache.shape[-1], kpe_cache.shape[-1])
        assert out is not None and out.stride() == out.contiguous().stride()
        queries, starts, lengths = (self.lists(name).tolist() for name in ("queries", "starts", "lengths"))
        for row in range(len(queries) - 1):
            pages = self.lists("pages")[starts[row] : starts[row + 1]].long()
            latent, rope = (part[pages].flatten(0, 1)[: lengths[row], None] for part in (ckv_cache, kpe_cache))
            part = slice(queries[row], queries[row + 1])
            q = torch.cat((q_nope[part], q_pe[part]), dim=-1)
            out[part] = attend(q, torch.cat((latent, rope), dim=-1), latent, self.planned["scale"], causal=self.planned["causal"])
        return out
