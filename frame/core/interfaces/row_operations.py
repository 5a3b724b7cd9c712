"""`RowOperations`: what a kernel package computes between the GEMMs, on the rows of a step.

A GEMM kernel offers them to the layers (`GemmKernel.row_operations`), and the layers use them where
no Triton kernel runs. Must not know a layer, a batch or a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class QKVLayout(NamedTuple):
    """How a row of [queries | keys | values] is divided into heads.

    `num_heads`, `num_kv_heads`: numbers of query and key-value heads. `dim`: head dimension.
    `rotated`: the first entries of a head that rotate. `interleaved`: pairs are neighbours (GPT-J
    style); otherwise halves (GPT-NeoX style). `gated`: each query is followed by a gate of its
    size, which the kernels leave as it is.
    """

    num_heads: int
    num_kv_heads: int
    dim: int
    rotated: int
    interleaved: bool = False
    gated: bool = False


class KVCacheTarget(NamedTuple):
    """Where the keys and values of a batch are stored.

    `slots` int64 [tokens]; `k` and `v` contiguous [pages, page_size, num_kv_heads, dim] of any
    float dtype, or int8. Values for a float8_e4m3 cache are divided by the scale and saturate. An
    int8 cache has the scales of each token and head, float16 [pages, page_size, num_kv_heads].
    """

    slots: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None


class RowOperations(Protocol):
    """Operations computed in float32. Each is called only for what its `can_` method allows."""

    def can_norm(self, size: int) -> bool:
        """Whether `add_rms_norm` takes rows of this size."""
        ...

    def can_rotate(self, heads: QKVLayout) -> bool:
        """Whether `norm_rope_store` takes this layout."""
        ...

    def can_store(self, dtype: torch.dtype) -> bool:
        """Whether `norm_rope_store` writes to a cache of this dtype."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual) for [rows, size]; without a residual the second result
        is `x` itself. weight: float32 [size].

        The sum is rounded to the tensors' dtype, written over `residual`, and normed as rounded.
        """
        ...

    def norm_rope_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        heads: QKVLayout,
        norm: tuple[torch.Tensor, float] | None,
        cache: KVCacheTarget | None,
    ) -> torch.Tensor:
        """qkv [tokens, (num_heads + 2 * num_kv_heads) * dim] -> rotated queries, contiguous
        [tokens, num_heads, dim]. The keys are normed and rotated in place.

        positions int64 [tokens]; table [positions, 2, 1, rotated] (cosine and signed sine); norm:
        RMSNorm weights float32 [2, dim] (queries, keys) and epsilon; cache: where to store keys and
        values.
        """
        ...

    def begin_recording(self) -> None:
        """From now on keep the calls of this thread of the package's operations, GEMMs and
        attention as well as make them. The caller keeps the tensors of these calls."""
        ...

    def end_recording(self) -> Callable[[], object]:
        """Stop recording. -> what makes the kept calls again, with the same tensors, in order."""
        ...
