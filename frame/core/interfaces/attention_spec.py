"""`AttentionSpec` and `LatentProjections`: one attention layer, as backends and the KV cache see
it.

Used by models, attention backends and the KV cache. Must not import other interfaces: this page is
shared by `attention` and `batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer on this rank, fixed at construction.

    With `causal` False (an encoder's layer) every token attends to its whole row, which one step
    computes: `run` takes this step's K and V, and there is no cache to read. The scales are set
    when the model has been loaded, and are constants from then on.
    """

    layer: int  # index into the KV cache
    num_heads: int
    num_kv_heads: int  # for MLA: 1
    head_dim: int  # of queries and keys; for MLA: qk_nope_head_dim + qk_rope_head_dim
    v_head_dim: int
    scale: float  # factor of the products of queries and keys
    sliding_window: int | None = None  # tokens, the query's own position included
    chunked: bool = False  # the row is cut into chunks of `sliding_window` tokens; a query sees the keys of its own chunk alone
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True
    spans: bool = True  # the layer reads `MediaSpans`; False: its tokens see those before them alone
    k_scale: float = 1.0  # fp8 cache: a stored key times `k_scale` is the key; for MLA the whole latent row has it
    v_scale: float = 1.0  # fp8 cache: a stored value times `v_scale` is the value


class LatentProjections(Protocol):
    """The two forms of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1), which the
    layer offers to the backend.

    Absorbed: attend over the latent with `absorb`ed queries, then `unabsorb`. Expanded: `expand`
    the latent to keys and values. A backend takes the form that suits the phase. Both give the same
    result.
    """

    spec: AttentionSpec
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, nope] -> [tokens, heads, rank]."""
        ...

    def unabsorb(self, out: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, rank] -> [tokens, heads, v_head_dim]."""
        ...

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, rank] -> (k_nope [n, heads, nope], v [n, heads, v_head_dim])."""
        ...
