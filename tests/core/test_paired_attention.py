"""A pair of attention backends: the conformance cases hold for both together, each sees its own rows alone, graphs are the decodes' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from frame.attention_backends import TORCH_NATIVE
from frame.attention_backends.torch_native.backend import TorchNativeBackend
from frame.core.interfaces.attention import AttentionBackend
from frame.core.interfaces.batch import AttentionOut
from frame.core.paired_attention import PairedAttention
from frame.testing import conformance_attention as suite
from frame.testing.attention_batch import PlainKVCache, Rows, build_context, forward_batch, lay_out, planned

CASES = dict(suite.cases("cpu", False, TORCH_NATIVE))


def pair(case: suite.Case) -> PairedAttention:
    context = build_context(case.device, case.dtype, case.page_size)
    return PairedAttention(TorchNativeBackend(context), TorchNativeBackend(context))


@pytest.mark.parametrize("name", [name for name in CASES if "mixed" in name or "decodes" in name or "extends" in name])
def test_a_pair_computes_what_one_backend_does(name: str) -> None:
    suite.check_case(pair, CASES[name])


class Seen(AttentionBackend):
    """Notes the batches that it is given."""

    capabilities = TORCH_NATIVE

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.planned: list[Any] = []
        self.replayed: list[Any] = []

    def plan(self, batch: Any) -> str:
        self.planned.append(batch)
        return "plan"

    def capture_plan(self, batch: Any) -> str:
        return "captured"

    def replay_plan(self, plan: Any, batch: Any) -> None:
        self.replayed.append((plan, batch))

    def run(self, spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
        assert batch.plan in ("plan", "captured")
        assert q.shape[0] == k.shape[0] == v.shape[0] == batch.num_tokens
        return q


def batch_of(rows: Rows) -> Any:
    pages = lay_out(rows, 4, np.random.default_rng(0))
    return forward_batch(rows, pages, PlainKVCache(4, []), "cpu")


def seen_pair() -> tuple[PairedAttention, Seen, Seen]:
    context = build_context("cpu", torch.float32, 4)
    extends, decodes = Seen(context), Seen(context)
    return PairedAttention(extends, decodes), extends, decodes


def test_each_backend_sees_its_own_rows_as_if_there_were_no_others() -> None:
    both, extends, decodes = seen_pair()
    batch = planned(both, batch_of(Rows.of([5, 9], [(3, 6), (0, 2)])))
    (own,), (others,) = decodes.planned, extends.planned
    assert (own.num_decodes, own.num_rows, own.num_tokens) == (2, 2, 2)
    assert (others.num_decodes, others.num_rows, others.num_tokens) == (0, 2, 8)
    assert own.query_starts.tolist() == [0, 1, 2]
    assert others.query_starts.tolist() == [0, 6, 8]
    assert others.host.seq_lens.tolist() == others.seq_lens.tolist() == [9, 2]
    assert others.kv_slots.tolist() == batch.kv_slots.tolist()[2:]
    q = torch.randn(10, 2, 8)
    assert torch.equal(both.run(None, q, q, q, batch), q)  # type: ignore[arg-type]


def test_steps_of_one_kind_are_handed_over_whole() -> None:
    both, extends, decodes = seen_pair()
    for rows in (Rows.of([5, 9]), Rows.of([], [(0, 4)])):
        batch = batch_of(rows)
        q = torch.randn(batch.num_tokens, 2, 8)
        assert both.run(None, q, q, q, planned(both, batch)) is q  # type: ignore[arg-type]
    assert (len(decodes.planned), len(extends.planned)) == (1, 1)


def test_graphs_are_the_decode_backends() -> None:
    both, extends, decodes = seen_pair()
    batch, other = batch_of(Rows.of([5, 9])), batch_of(Rows.of([7, 2]))
    plan = both.capture_plan(batch)
    captured = replace(batch, plan=plan)
    q = torch.randn(2, 2, 8)
    assert both.run(None, q, q, q, captured) is q  # type: ignore[arg-type]
    both.replay_plan(plan, other)
    assert decodes.replayed == [("captured", other)]
    assert extends.planned == extends.replayed == []


@pytest.mark.parametrize("width", [8, 6])
def test_results_that_went_to_the_batches_own_place_are_not_joined_by_a_copy(width: int) -> None:
    class Writes(Seen):
        def run(self, spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
            return AttentionOut.of(batch, q, 2, 8).copy_(q)

    context = build_context("cpu", torch.float32, 4)
    both = PairedAttention(Writes(context), Writes(context))
    own = torch.zeros(10, 2, width)
    batch = replace(batch_of(Rows.of([5, 9], [(3, 6), (0, 2)])), extensions={AttentionOut: AttentionOut(own)})
    batch = planned(both, batch)
    q = torch.randn(10, 2, 8)
    found = both.run(None, q, q, q, batch)  # type: ignore[arg-type]
    assert torch.equal(found, q)
    assert (found.data_ptr() == own.data_ptr()) == (width == 8)
