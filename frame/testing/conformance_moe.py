"""What every MoE runner must satisfy, checked expert by expert in float64.

Weights lie in memory both ways that methods create them. Knows no routing: ids and weights are
drawn, with experts that nobody chose, experts that everybody chose, and weights of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.moe import DispatchOutput, MoECapabilities, MoERequirements, MoERunner
from frame.testing.attention_cases import build_context
from frame.testing.conformance import Check, Subject
from frame.testing.devices import open_platform

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # relative to the largest value
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZES = ((1, 4, 1, 32, 16), (7, 8, 2, 64, 32), (33, 16, 4, 48, 24), (200, 8, 3, 64, 40))  # tokens, experts, k, hidden, inner
LARGE = ((1, 64, 8, 512, 256), (300, 64, 8, 512, 256), (2048, 32, 4, 256, 128))


@dataclass(frozen=True)
class Sizes:
    """One layer and one batch."""

    numbers: tuple[int, int, int, int, int]  # tokens, experts, experts a token, hidden, inner
    dtype: torch.dtype
    device: str


class PlainExperts(nn.Module):
    """`gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner]; with
    `hidden_first`, `down` lies hidden first."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, hidden_first: bool) -> None:
        super().__init__()
        if hidden_first:
            down = down.transpose(0, 1).contiguous().transpose(0, 1)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)


def suite(subject: Subject) -> Iterator[Check]:
    """`moe_runner/2`, in every dtype of the capabilities."""
    setting, capabilities = subject.setting, subject.record.capabilities
    for name in getattr(capabilities, "dtypes", DTYPES):
        need = MoERequirements(device=setting.device.partition(":")[0], compute_capability=_capability(setting.device), dtype=name)
        if isinstance(capabilities, MoECapabilities) and capabilities.unsupported(need):
            continue
        for numbers in (*SIZES, *(LARGE if setting.thorough else ())):
            sizes = Sizes(numbers, DTYPES[name], setting.device)
            label = "x".join(map(str, numbers))
            yield Check(f"agrees_with_float64-{label}-{name}", partial(_agrees, subject, sizes))
        sizes = Sizes(SIZES[1], DTYPES[name], setting.device)
        yield Check(f"weight_of_zero_adds_nothing-{name}", partial(_zero_weights, subject, sizes))
        yield Check(f"one_expert_for_all-{name}", partial(_one_expert, subject, sizes))
        yield Check(f"a_token_stands_alone-{name}", partial(_alone, subject, sizes))


def reference(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] in float64: the weighted sum over each token's experts."""
    gate, up = torch.einsum("th,tkih->tki", x.double(), gate_up.double()[ids]).chunk(2, dim=-1)
    out = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, down.double()[ids])
    return (out * weights.double()[..., None]).sum(1)


def _draw(sizes: Sizes) -> tuple[torch.Tensor, ...]:
    tokens, experts, k, hidden, inner = sizes.numbers
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(sizes.dtype)

    x = normal(tokens, hidden)
    ids = torch.rand(tokens, experts, generator=generator).topk(k, dim=1).indices
    weights = torch.rand(tokens, k, generator=generator)
    gate_up = normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    down = normal(experts, hidden, inner, scale=inner**-0.5)
    return x, ids, weights, gate_up, down


def _run(
    subject: Subject, sizes: Sizes, parts: tuple[torch.Tensor, ...], hidden_first: bool = False, skip: slice = slice(0)
) -> torch.Tensor:
    """The runner's result in float64 on the host; tokens of `skip` become NaN."""
    x, ids, weights, gate_up, down = (part.to(sizes.device) for part in parts)
    x = x.clone()
    x[skip] = torch.nan
    runner: MoERunner = subject.target(build_context(sizes.device, sizes.dtype, 16), subject.options)
    before = x.clone(), ids.clone(), weights.clone()
    out = runner.run(DispatchOutput(x, ids, weights), PlainExperts(gate_up, down, hidden_first))
    assert out.shape == x.shape, f"the result's shape is {tuple(out.shape)}, not {tuple(x.shape)}"
    assert out.dtype == sizes.dtype, f"the result's dtype is {out.dtype}, not {sizes.dtype}"
    same = [torch.equal(torch.nan_to_num(now), torch.nan_to_num(then)) for now, then in zip((x, ids, weights), before, strict=True)]
    assert all(same), "the runner changed what it was given"
    return out.double().cpu()


def _close(got: torch.Tensor, expected: torch.Tensor, sizes: Sizes) -> None:
    error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    assert torch.isfinite(got).all(), f"the result is not finite ({sizes})"
    assert error <= TOLERANCE[sizes.dtype], f"largest relative error {error:.2e}, allowed {TOLERANCE[sizes.dtype]:.0e} ({sizes})"


def _agrees(subject: Subject, sizes: Sizes) -> None:
    parts = _draw(sizes)
    expected = reference(*parts)
    for hidden_first in (False, True):
        _close(_run(subject, sizes, parts, hidden_first), expected, sizes)


def _zero_weights(subject: Subject, sizes: Sizes) -> None:
    x, ids, weights, gate_up, down = _draw(sizes)
    weights[::2, 0] = 0  # as for experts that live on another rank
    _close(_run(subject, sizes, (x, ids, weights, gate_up, down)), reference(x, ids, weights, gate_up, down), sizes)


def _one_expert(subject: Subject, sizes: Sizes) -> None:
    x, ids, weights, gate_up, down = _draw(sizes)
    ids = torch.full_like(ids, sizes.numbers[1] - 1)
    _close(_run(subject, sizes, (x, ids, weights, gate_up, down)), reference(x, ids, weights, gate_up, down), sizes)


def _alone(subject: Subject, sizes: Sizes) -> None:
    parts = _draw(sizes)
    got = _run(subject, sizes, parts, skip=slice(1, None))
    _close(got[:1], reference(*parts)[:1], sizes)


def _capability(device: str) -> tuple[int, int] | None:
    return open_platform(device).compute_capability
