"""Deltas take the way of the weights that they change: divided, transposed, stacked and renamed."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from frame.adapters.checkpoint_names import PlacedDelta, place_delta, place_experts
from frame.interfaces.adapter import LowRankDelta
from frame.models.layers.parameter import Range
from frame.models.layers.weights.fused_tensors import split_experts, split_layers, split_stacked_experts

EXPERTS, HIDDEN, INNER, RANK = 3, 8, 6, 2


def _merge(delta: LowRankDelta, placed: PlacedDelta) -> torch.Tensor:
    a, b = placed.cut(delta, Range.whole(len(placed.outputs)), Range.whole(len(placed.inputs)))
    return b @ a


def test_a_fused_layer_is_divided() -> None:
    fused = {"qkv_proj": {"q_proj": 4, "k_proj": 2, "v_proj": 2}}
    delta = LowRankDelta(torch.randn(RANK, 5), torch.randn(8, RANK))
    placed = list(place_delta("model.layers.0.qkv_proj", (8, 5), lambda tensors: split_layers(tensors, fused)))
    assert [each.name for each in placed] == [f"model.layers.0.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(torch.cat([_merge(delta, each) for each in placed]), delta.b @ delta.a)


def test_ranges_are_cut() -> None:
    delta = LowRankDelta(torch.randn(RANK, 6), torch.randn(8, RANK))
    (placed,) = place_delta("layer", (8, 6), lambda tensors: tensors)
    a, b = placed.cut(delta, Range(8, 2, 4), Range(6, 3, 3))
    torch.testing.assert_close(b @ a, (delta.b @ delta.a)[2:6, 3:6])


def _split(tensors: Iterable[tuple[str, Any]], *, interleaved: bool) -> Iterable[tuple[str, Any]]:
    for name, tensor in tensors:
        prefix, _, last = name.rpartition(".")
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        yield from split_experts(prefix, tensor, names, interleaved=interleaved and len(names) > 1)


STORED: dict[str, tuple[Callable[..., Any], bool]] = {
    "[experts, outputs, inputs]": (split_stacked_experts, False),
    "[experts, inputs, outputs]": (lambda tensors: _split(tensors, interleaved=False), False),
    "[experts, inputs, outputs], interleaved": (lambda tensors: _split(tensors, interleaved=True), True),
    "one by one": (lambda tensors: tensors, False),
}


@pytest.mark.parametrize("hidden", [HIDDEN, INNER, 2 * INNER])
@pytest.mark.parametrize("stored", STORED)
def test_stacked_experts(stored: str, hidden: int) -> None:
    rename, interleaved = STORED[stored]
    prefix = "model.layers.1.mlp.experts"
    sizes = {"gate_proj": (INNER, hidden), "up_proj": (INNER, hidden), "down_proj": (hidden, INNER)}
    stacks = [
        [f"{prefix}.{expert}.{name}" for expert in range(EXPERTS) for name in names] for names in (("gate_proj", "up_proj"), ("down_proj",))
    ]

    def find_size(name: str) -> tuple[int, int] | None:
        return sizes[name.rpartition(".")[2]] if name.startswith(f"{prefix}.") and name.rpartition(".")[2] in sizes else None

    for last, shape in (("gate_up_proj", (EXPERTS, 2 * INNER, hidden)), ("down_proj", (EXPERTS, hidden, INNER))):
        delta = LowRankDelta(torch.randn(EXPERTS, RANK, shape[2]), torch.randn(EXPERTS, shape[1], RANK))
        whole = delta.b @ delta.a
        named = {each.name: _merge(delta, each) for each in place_experts(f"{prefix}.{last}", shape, rename, find_size, stacks)}
        for expert in range(EXPERTS):
            if last == "down_proj":
                expected = {"down_proj": whole[expert]}
            elif interleaved:
                expected = {"gate_proj": whole[expert, ::2], "up_proj": whole[expert, 1::2]}
            else:
                expected = {"gate_proj": whole[expert, :INNER], "up_proj": whole[expert, INNER:]}
            for name, value in expected.items():
                torch.testing.assert_close(named.pop(f"{prefix}.{expert}.{name}"), value)
        assert not named
