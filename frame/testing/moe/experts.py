"""Random mixture-of-experts layers, and their results in float64, by definition. For the suites of
MoE runners and dispatchers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from frame.core.interfaces.moe import MoECapabilities, MoERequirements
from frame.core.interfaces.parallel import ParallelPlan
from frame.entrypoints.tools.bench.paged_batches import DTYPES
from frame.plugins.devices import open_platform
from frame.testing.conformance import Subject

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative to the largest value


def supports(subject: Subject, dtype: str, num_ranks: int = 1) -> bool:
    """Whether the plugin states that it runs on the device in this dtype, with whole experts on
    each of `num_ranks` ranks."""
    device, capabilities = subject.setting.device, subject.record.capabilities
    need = MoERequirements(
        device=device.partition(":")[0],
        compute_capability=open_platform(device).compute_capability,
        dtype=dtype,
        plan=ParallelPlan(tp=num_ranks, ep=num_ranks),
    )
    return dtype in getattr(capabilities, "dtypes", DTYPES) and not (
        isinstance(capabilities, MoECapabilities) and capabilities.unsupported(need)
    )


def draw(numbers: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """`numbers`: tokens, experts, experts of a token, hidden, inner -> x, ids, weights, gate_up
    [experts, 2 * inner, hidden], down [experts, hidden, inner]. The last expert is not chosen if
    there are more than k."""
    tokens, experts, k, hidden, inner = numbers
    generator = torch.Generator().manual_seed(1000 * seed + tokens)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x = normal(tokens, hidden, scale=scale)
    ids = torch.rand(tokens, max(k, experts - 1), generator=generator).topk(k, dim=1).indices
    weights = torch.rand(tokens, k, generator=generator) * 2
    return x, ids, weights, normal(experts, 2 * inner, hidden, scale=hidden**-0.5), normal(experts, hidden, inner, scale=inner**-0.5)


def reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[tokens, hidden] in float64: the weighted sum over each token's experts. With `biases`
    [experts, 2 * inner] and [experts, hidden], the activation is `activate_by_halves`."""
    out = x.new_zeros(x.shape, dtype=torch.float64)
    for expert in ids.unique().tolist():
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        first, second = (None, None) if biases is None else (bias[expert].double() for bias in biases)
        gate, up = F.linear(x[token].double(), gate_up[expert].double(), first).chunk(2, dim=-1)
        active = F.silu(gate) * up if biases is None else activate_by_halves(gate, up)
        result = F.linear(active, down[expert].double(), second)
        out.index_add_(0, token, result * weights[token, choice, None].double())
    return out


def activate_by_halves(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """An activation that no model has: tanh(gate) * (up + 1/2)."""
    return torch.tanh(gate) * (up + 0.5)


def split(gate_up: torch.Tensor, down: torch.Tensor, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's slice of every expert, cut in its inner dimension."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.cat((gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]), dim=1), down.chunk(size, 2)[rank]
