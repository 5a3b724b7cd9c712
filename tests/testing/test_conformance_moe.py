"""The MoE suite notices what it is there for: each broken runner here breaks one law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.moe import DispatchOutput, MoERunner
from tests.testing.failures import failures


class Loop(MoERunner):
    """The definition, token by token; the broken ones below differ in one thing each."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        out = torch.zeros_like(tokens.x)
        for token, (ids, weights) in enumerate(zip(tokens.ids.tolist(), tokens.weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                gate, up = F.linear(tokens.x[token], experts.gate_up[expert]).chunk(2)
                out[token] += (F.linear(self.activate(gate, up), experts.down[expert]) * weight).to(out.dtype)
        return out


class SwappedHalves(Loop):
    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(up) * gate


class InPlace(Loop):
    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        return tokens.x.copy_(super().run(tokens, experts))


class Unweighted(Loop):
    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        return super().run(DispatchOutput(tokens.x, tokens.ids, torch.ones_like(tokens.weights)), experts)


class ContiguousOnly(Loop):
    """Takes the memory of `down` for its shape."""

    def run(self, tokens: DispatchOutput, experts: Any) -> torch.Tensor:
        flat = torch.as_strided(experts.down, experts.down.shape, torch.empty(experts.down.shape, device="meta").stride())
        holder = nn.Module()
        holder.gate_up, holder.down = experts.gate_up, nn.Parameter(flat, requires_grad=False)
        return super().run(tokens, holder)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (SwappedHalves, "relative error"),
        (InPlace, "changed what it was given"),
        (Unweighted, "relative error"),
        (ContiguousOnly, "relative error"),
    ],
)
def test_a_broken_moe_runner_is_caught(target: type, sentence: str) -> None:
    assert any(sentence in text for text in failures("moe_runner", target).values())


def test_the_plain_definition_passes() -> None:
    assert failures("moe_runner", Loop) == {}
