# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""RMSNorm with a gate, over groups of entries, as linear attention ends.

Reference: `frame.models.layers.linear_attention.gated_norm.GatedNorm`. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import choose_warps, launch_dependents, launch_options, next_power_of_2, wait_for_previous


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, *, gates_first: bool, silu: bool = True
) -> torch.Tensor:
    """RMSNorm over each `group` entries of contiguous x [tokens, size], computed in float32.

    gate: [tokens, size], whose rows may be strided. weight: [size], or [group] for all groups
    alike. gates_first: the gated x is normed; otherwise the normed x is gated. silu: the activation
    of the gate is SiLU, else the sigmoid.
    """
    tokens, size = x.shape
    out = torch.empty_like(x)
    block = next_power_of_2(group)
    _gated_norm[(tokens, size // group)](
        x, gate, weight, out, gate.stride(0), eps,
        SIZE=size, GROUP=group, BLOCK=block, SHARED=weight.numel() == group, GATES_FIRST=gates_first, SILU=silu,
        **launch_options(x.device, choose_warps(block)),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm(
    x, gate, weight, out, gate_stride, eps,
    SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    SHARED: tl.constexpr,  # all groups have the same weights
    GATES_FIRST: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, groups."""
    launch_dependents(PDL)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inside = tl.arange(0, BLOCK)
    has = inside < GROUP
    entries = group * GROUP + inside
    scale = tl.load(weight + (inside if SHARED else entries), mask=has, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    values = tl.load(x + token * SIZE + entries, mask=has, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + entries, mask=has, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gates)
    if SILU:
        factor *= gates
    if GATES_FIRST:
        values *= factor
    values *= tl.rsqrt(tl.sum(values * values) / GROUP + eps) * scale
    if not GATES_FIRST:
        values *= factor
    tl.store(out + token * SIZE + entries, values.to(out.dtype.element_ty), mask=has)
