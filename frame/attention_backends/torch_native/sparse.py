"""Sparse latent attention in PyTorch operations: each token attends to the keys of `SparseKeys`.

Used by the `torch_native` backend. Must not know how keys are selected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from frame.kernels.linear.invariant import add_halves, map_elements

if TYPE_CHECKING:
    from frame.attention_backends.torch_native.cached_rows import CachedRows
    from frame.core.interfaces.attention import LatentProjections

GATHERED = 1 << 26  # numbers of gathered latents at a time, at most


def attend_sparse(
    layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, cached: CachedRows, slots: torch.Tensor, *, invariant: bool
) -> torch.Tensor:
    """As `AttentionBackend.run_mla`, absorbed. slots: int64 [tokens, keys], -1 for no key.
    invariant: no token's bits depend on other tokens. Each token is a matrix of batched matmuls, of
    the layer's sizes; the conformance suite tests that their number changes no bit."""
    rank, scale = layer.kv_lora_rank, layer.spec.scale
    q = torch.cat((layer.absorb(q_nope), q_rope), -1)
    step, outs = max(1, GATHERED // (slots.shape[1] * q.shape[2])), []
    for first in range(0, len(q), step):
        some = slots[first : first + step]
        none = (some < 0)[:, None]
        rows = cached.read(some.clamp_min(0).flatten(), q.dtype).view(*some.shape, -1).masked_fill_(none.mT, 0)
        scores = (q[first : first + step] @ rows.transpose(1, 2)).float() * scale
        scores = scores.masked_fill_(none, -torch.inf)
        weights = _normalize(scores) if invariant else scores.softmax(-1)
        outs.append(weights.to(q.dtype) @ rows[..., :rank])
    return layer.unabsorb(torch.cat(outs))


def _normalize(scores: torch.Tensor) -> torch.Tensor:
    """Softmax of rows, whose bits depend on the row alone."""
    weights = map_elements(torch.exp, scores - scores.amax(-1, keepdim=True))
    return weights / add_halves(weights, -1).unsqueeze(-1)
