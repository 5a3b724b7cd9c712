"""Norms, and rotary embedding with the cache store, of bfloat16 rows in one call each.

The GEMM kernels offer them to the layers. Must not know layers.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import ctypes

    from frame.core.interfaces.row_operations import KVCacheTarget, QKVLayout

_LANES, _MAX_DIM = 16, 256


class X86Operations:
    """`RowOperations` of the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._add_rms_norm = library.frame_x86_add_rms_norm
        self._norm_rope_store = library.frame_x86_norm_rope_store

    def begin_recording(self) -> None:
        self._library.frame_x86_begin()

    def end_recording(self) -> Recording:
        return Recording(self._library)

    def can_norm(self, size: int) -> bool:
        return size % _LANES == 0

    def can_rotate(self, heads: QKVLayout) -> bool:
        if heads.interleaved or heads.gated or heads.dim > _MAX_DIM:
            return False
        return heads.dim % _LANES == 0 and heads.rotated % (2 * _LANES) == 0

    def can_store(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != torch.bfloat16:
            raise TypeError(f"the norm takes bfloat16, not {x.dtype}")
        rows, size = x.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        out, stream = x.new_empty(rows, size), x if residual is None else residual
        address = None if residual is None else residual.data_ptr()
        threads = torch.get_num_threads()
        self._add_rms_norm(
            x.data_ptr(), rows, size, x.stride(0), address, stream.stride(0), weight.data_ptr(), eps, out.data_ptr(), threads
        )
        return out, stream

    def norm_rope_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        heads: QKVLayout,
        norm: tuple[torch.Tensor, float] | None,
        cache: KVCacheTarget | None,
    ) -> torch.Tensor:
        tokens = qkv.shape[0]
        q = qkv.new_empty(tokens, heads.num_heads, heads.dim)
        weights, eps = (None, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
        targets = (None, None, None) if cache is None else (cache.slots.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr())
        self._norm_rope_store(
            *(qkv.data_ptr(), tokens, qkv.stride(0), heads.num_heads, heads.num_kv_heads, heads.dim, heads.rotated),
            *(positions.data_ptr(), table.data_ptr(), weights, eps, *targets, q.data_ptr(), torch.get_num_threads()),
        )
        return q


class Recording:
    """The calls of this thread since `begin_recording`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._calls = library.frame_x86_end()
        self._replay = library.frame_x86_replay
        weakref.finalize(self, library.frame_x86_free, self._calls)

    def __call__(self) -> None:
        self._replay(self._calls)
