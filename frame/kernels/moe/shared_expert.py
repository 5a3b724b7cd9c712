# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The sum of the routed experts and the shared expert, with the shared expert's gate.

Reference: `frame.models.layers.moe.MoE`. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame import kernels
from frame.kernels.launch import choose_warps, launch_dependents, next_power_of_2


def add_shared_expert(
    routed: torch.Tensor, shared: torch.Tensor, x: torch.Tensor | None = None, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """routed + sigmoid(x @ gate) * shared -> [tokens, hidden], computed in float32.

    routed: [tokens, hidden], or [tokens, parts, hidden] whose parts are summed. shared and x:
    [tokens, hidden]. gate: [1, hidden]; without x and gate the factor is 1. Last dimensions are
    contiguous.
    """
    tokens, hidden = shared.shape
    out = shared.new_empty(tokens, hidden)
    block = next_power_of_2(hidden)
    gated = x is not None and gate is not None
    _add_shared_expert[(tokens,)](
        routed, shared, x if gated else shared, gate if gated else shared, out,
        routed.stride(0), routed.stride(1), shared.stride(0), 0 if x is None else x.stride(0),
        HIDDEN=hidden, BLOCK=block, PARTIALS=routed.shape[1] if routed.dim() == 3 else 1, GATED=gated,
        PDL=kernels.supports_pdl(shared.device), num_warps=choose_warps(block),
    )  # fmt: skip
    return out


@triton.jit
def _add_shared_expert(
    routed, shared, x, gate, out, routed_stride, partial_stride, shared_stride, x_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. It follows kernels of two streams, so that it is launched without PDL; the next
    kernel may still start early."""
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    total = tl.load(shared + token * shared_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        values = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(gate + columns, mask=inside, other=0.0).to(tl.float32)
        total *= tl.sigmoid(tl.sum(values * weights))
    for partial in tl.static_range(PARTIALS):
        total += tl.load(routed + token * routed_stride + partial * partial_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, total.to(out.dtype.element_ty), mask=inside)
