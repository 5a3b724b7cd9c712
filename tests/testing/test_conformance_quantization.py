"""The quantization suite notices what it is there for: each broken method here breaks one law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.testing.failures import failures


class Half:
    """A quantization method over plain weights, to be broken."""

    def __init__(self, checkpoint_config: Any = None, options: Any = None) -> None:
        return None

    def linear(self, prefix: str, kind: str = "linear") -> Any:
        return self

    experts = linear

    def create_weights(self, layer: nn.Module, *arguments: Any) -> None:
        if len(arguments) == 3:
            inputs, outputs, dtype = arguments
            layer.weight = nn.Parameter(torch.empty(sum(outputs), inputs, dtype=dtype), requires_grad=False)
        else:
            experts, hidden, inner, dtype = arguments
            layer.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden, dtype=dtype), requires_grad=False)
            layer.down = nn.Parameter(torch.empty(experts, hidden, inner, dtype=dtype), requires_grad=False)

    def process_weights(self, layer: nn.Module) -> None:
        return None

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


class FinishesTwice(Half):
    def process_weights(self, layer: Any) -> None:
        if hasattr(layer, "weight"):
            layer.weight.data.mul_(2)


class ForgetsTheBias(Half):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(layer, x)


class ScalesByTheBatch(Half):
    """One activation scale for all rows: a row depends on the others."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scale = x.abs().amax()
        return super().apply(layer, x / scale, bias) * scale


class WrongForManyRows(Half):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = super().apply(layer, x, bias)
        return out * 1.2 if x.shape[0] == 300 else out


@pytest.mark.parametrize(
    ("target", "check"),
    [
        (FinishesTwice, "finish_again"),
        (ForgetsTheBias, "bias"),
        (ScalesByTheBatch, "a_row_stands_alone"),
        (WrongForManyRows, "apply_is_one_matrix"),
    ],
)
def test_a_broken_quantization_method_is_caught(target: type, check: str) -> None:
    assert any(name.startswith(check) for name in failures("quantization_method", target))


def test_plain_weights_pass() -> None:
    assert failures("quantization_method", Half) == {}
