"""Deltas of adapters that the expert kernels add, against float64.

Collected by `tests/gpu/test_lora.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from frame.adapters.deltas import LayerPages, RowPlan
from frame.adapters.triton_deltas import TritonDeltas
from frame.core.interfaces.adapter_layers import PairDelta, SortedPairs
from frame.core.interfaces.moe import DispatchOutput, SupportsPairDeltas
from frame.interfaces.adapter import PAGE_RANKS
from frame.plugins.moe_runners.triton import Triton
from frame.testing.moe.runner import PlainExperts
from tests.kernels.moe import CONTEXT, DEVICE, drawn, squared_relu, with_form

COUNTS = (1, 0, 3)  # pages of each place
PLACE_PAGES = [[4, 0, 0], [0, 0, 0], [2, 5, 1]]
UNIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Deltas:
    """The deltas of one layer of experts whose pages are random."""

    def __init__(self, experts: int, inputs: int, splits: tuple[int, ...], dtype: torch.dtype) -> None:
        stacks, outputs = experts * len(splits), sum(splits)
        a_size, b_size = stacks * PAGE_RANKS * inputs, experts * outputs * PAGE_RANKS
        pool = torch.full((6, a_size + b_size + 32), torch.nan, dtype=dtype, device=DEVICE)
        pool[:, :a_size] = torch.randn(6, a_size) * inputs**-0.5
        pool[:, a_size : a_size + b_size] = torch.randn(6, b_size) * PAGE_RANKS**-0.5
        self.counts = torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)
        self.place_pages = torch.tensor(PLACE_PAGES, dtype=torch.int32, device=DEVICE)
        self.pages = LayerPages(
            pool[:, :a_size].unflatten(1, (stacks, PAGE_RANKS, inputs)),
            pool[:, a_size : a_size + b_size].unflatten(1, (experts, outputs, PAGE_RANKS)),
            splits, self.counts, torch.ones(3, 0, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE), experts,
        )  # fmt: skip

    def shrink(self, places: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, order: SortedPairs | None) -> PairDelta:
        shrunk = TritonDeltas().shrink_pairs(x, self.pages, RowPlan(places, self.place_pages), ids, order)
        return PairDelta(shrunk, self.pages.b, places, self.place_pages, self.counts)

    def expected(self, place: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        """float64 [outputs] of one pair."""
        splits = self.pages.splits
        total = torch.zeros(sum(splits), dtype=torch.float64, device=DEVICE)
        for page in PLACE_PAGES[place][: COUNTS[place]] if place >= 0 else ():
            a = self.pages.a[page, expert * len(splits) : (expert + 1) * len(splits)].double() @ x.double()
            b = self.pages.b[page, expert].double().split(splits)
            total += torch.cat([part @ inner for part, inner in zip(b, a, strict=True)])
        return total


EXPERTS = 24


@pytest.mark.parametrize(
    ("tokens", "top", "form", "dtype"),
    [
        (1, 8, "", torch.float32),
        (1, 2, "", torch.bfloat16),
        (1, 2, "", torch.float16),
        (2, 3, "clamped", torch.float32),
        (3, 2, "ungated", torch.float32),
    ],
)
def test_vectors_add_deltas(tokens: int, top: int, form: str, dtype: torch.dtype) -> None:
    check(tokens, top, EXPERTS, (24, 12), form, dtype)


@pytest.mark.parametrize(
    ("tokens", "experts", "form", "dtype"),
    [  # tiles of 16, 32, 64 and 128 rows
        (9, EXPERTS, "", torch.float32),
        (9, EXPERTS, "", torch.bfloat16),
        (17, 3, "ungated", torch.float32),
        (40, 3, "", torch.float16),
        (49, 2, "clamped", torch.float32),
        (90, 3, "", torch.float32),
    ],
)
def test_tiles_add_deltas(tokens: int, experts: int, form: str, dtype: torch.dtype) -> None:
    check(tokens, 2, experts, (24, 12), form, dtype)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="sizes for a GPU")
@pytest.mark.parametrize("tokens", [1, 4, 64, 300, 1200])
def test_deltas_of_many_experts(tokens: int) -> None:
    check(tokens, 8, 64, (512, 256), "", torch.bfloat16)


def test_tiles_of_one_expert_add_deltas() -> None:
    """As many rows of the order as tokens."""
    check(128, 1, 1, (24, 12), "", torch.float32)


def check(tokens: int, top: int, experts: int, sizes: tuple[int, int], form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens * top)
    hidden, inner = sizes
    x, ids, weights, first, second = drawn(tokens, (experts, top, hidden, inner), dtype)
    module = with_form(form, first, second) if form else PlainExperts(first, second, hidden_first=False)
    splits = (inner,) if form == "ungated" else (inner, inner)
    gate_up, down = Deltas(experts, hidden, splits, dtype), Deltas(experts, inner, (hidden,), dtype)
    places = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=DEVICE).repeat(-(-tokens // 4))[:tokens]
    runner, tokens_in = Triton(CONTEXT), DispatchOutput(x, ids, weights)
    assert isinstance(runner, SupportsPairDeltas)
    out = runner.run_with_deltas(
        tokens_in,
        module,
        lambda x, ids, order: gate_up.shrink(places, x, ids, order),
        lambda x, ids, order: down.shrink(places, x, ids, order),
    )
    assert out is not None
    plain = runner.run_with_deltas(tokens_in, module, lambda x, ids, order: None, lambda x, ids, order: None)
    assert plain is not None
    torch.testing.assert_close(plain, runner.run(tokens_in, module))
    for token in range(0, tokens, max(1, tokens // 50)):
        place = int(places[token])
        expected = torch.zeros(hidden, dtype=torch.float64, device=DEVICE)
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            gates = module.gate_up[expert].double() @ x[token].double() + gate_up.expected(place, expert, x[token])
            if form == "clamped":
                gates += read_bias(module, "gate_up")[expert].double()
            values = compute_activation(module, gates)
            row = second[expert].double() @ values + down.expected(place, expert, values)
            if form == "clamped":
                row += read_bias(module, "down")[expert].double()
            expected += weight * row
        assert (out[token].double() - expected).norm() < UNIT[dtype] * expected.norm(), token


def compute_activation(module: PlainExperts, gates: torch.Tensor) -> torch.Tensor:
    if not getattr(module, "gated", True):
        assert module.activation is squared_relu
        return gates.relu() ** 2
    gate, up = gates.chunk(2)
    return torch.nn.functional.silu(gate) * up if module.activation is None else module.activation(gate, up)


def read_bias(module: PlainExperts, name: str) -> torch.Tensor:
    bias = getattr(module, f"{name}_bias")
    assert isinstance(bias, torch.Tensor)
    return bias


def refuse(x: torch.Tensor, ids: torch.Tensor, order: SortedPairs | None) -> PairDelta | None:
    raise AssertionError("nothing is computed")


def test_experts_whose_activation_pytorch_computes_have_no_such_kernel() -> None:
    x, ids, weights, first, second = drawn(9, (24, 8, 72, 40), torch.float32)
    module = PlainExperts(first, second, hidden_first=False)
    module.activation = lambda gate, up: gate.tanh() * up
    assert Triton(CONTEXT).run_with_deltas(DispatchOutput(x, ids, weights), module, refuse, refuse) is None
