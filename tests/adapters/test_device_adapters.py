"""Rows find the adapter of their slot, and loads fill the pages that places name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from frame.adapters.adapter_pool import AdapterSizes
from frame.adapters.builder import plan_sizes
from frame.adapters.pooled_layers import PooledLayer
from frame.core.interfaces.batch import AdapterLoad
from tests.adapters.harness import make_adapters, make_batch, make_reader, write_adapter


def _forward_batch(slots: list[int], positions: list[int], lengths: list[int] | None = None) -> Any:
    lengths = lengths or [1] * len(slots)
    return SimpleNamespace(
        request_slots=torch.tensor(slots), positions=torch.tensor(positions), query_lens=torch.tensor(lengths, dtype=torch.int32),
        num_tokens=sum(lengths), num_rows=len(slots),
    )  # fmt: skip


def test_the_pool_has_pages_for_the_largest_adapters() -> None:
    assert plan_sizes(8, 40, None) == AdapterSizes(places=8, pages=24, max_pages=3)
    assert plan_sizes(8, 16, 5).pages == 5


def test_tokens_find_the_adapter_of_their_slot_from_its_first_position_on() -> None:
    adapters = make_adapters(AdapterSizes(2, 2, 1), {"q": (4, [4])})
    adapters.begin_step(make_batch([0, 1, 2], [(0, 1, 0), (1, 0, 6), (2, -1, 0)]))
    assert adapters.is_active
    batch = _forward_batch([0, 1, 2], [5, 6, 7, 5, 6, 7, 5], [3, 3, 1])
    adapters.place_tokens(batch, 9)
    adapters.plan_tokens(9)
    assert adapters._rows.plan is not None
    assert adapters._rows.plan.places.tolist() == [1, 1, 1, -1, 0, 0, -1, -1, -1]
    with adapters.select_rows(torch.tensor([4, 6])):
        assert adapters._rows.plan.places.tolist() == [0, -1]
        with adapters.select_pairs(torch.tensor([1, 0, 0]), torch.tensor([2, 0, 1])):
            assert adapters._rows.pairs is not None
            assert adapters._rows.pairs.places.tolist() == [-1, 0, 0]
    with adapters.select_rows(None):
        assert not adapters.is_active
    assert adapters._rows.plan.places.tolist()[:3] == [1, 1, 1]
    adapters.end_step()
    assert not adapters.is_active


def test_a_step_without_adapters_is_inactive() -> None:
    adapters = make_adapters(AdapterSizes(2, 2, 1), {"q": (4, [4])})
    adapters.begin_step(make_batch([0, 1], [(0, 1, 0), (1, -1, 0)]))
    adapters.begin_step(make_batch([1]))
    assert not adapters.is_active
    released = make_batch([2], [(2, -1, 0)])
    released.released.append(0)
    adapters.begin_step(released)
    adapters.begin_step(make_batch([0]))
    assert not adapters.is_active, "the slot was released"


def test_an_adapter_is_applied_from_the_pages_that_its_place_names(tmp_path: Path) -> None:
    adapters = make_adapters(AdapterSizes(2, 3, 2), {"k+v": (6, [3, 5]), "o": (5, [4])})
    tensors = {"v.a": torch.randn(20, 6), "v.b": torch.randn(5, 20)}
    adapters.host["x"] = make_reader(adapters).read(write_adapter(tmp_path, tensors, '{"rank": 20, "scale": 0.5}'))
    adapters.begin_step(make_batch([0, 1], [(0, 1, 0), (1, -1, 0)], [AdapterLoad(1, "x", [2, 0])]))
    batch = _forward_batch([0, 1], [3, 3])
    adapters.place_tokens(batch, 2)
    adapters.plan_tokens(2)
    merged, other = adapters.pool.layers
    x, out = torch.randn(2, 6), torch.zeros(2, 8)
    merged.expand(out, merged.shrink(x))
    torch.testing.assert_close(out[0, 3:], 0.5 * tensors["v.b"] @ tensors["v.a"] @ x[0])
    assert not out[0, :3].any()
    assert not out[1].any()
    untouched = -torch.zeros(2, 4)
    other.expand(untouched, other.shrink(torch.randn(2, 5)))
    assert torch.signbit(untouched).all(), "adding 0 would change -0"


def test_norms_become_factors_of_whole_rows(tmp_path: Path) -> None:
    adapters = make_adapters(AdapterSizes(1, 1, 1), {"q": (6, [4])})
    (layer,) = adapters.pool.layers
    base, bias = torch.randn(4, 6), torch.randn(4)
    layer.gemm = lambda x: x @ base.t()
    tensors = {"q.a": torch.randn(4, 6), "q.b": torch.randn(4, 4), "q.norm": torch.rand(4) + 1}
    adapters.host["x"] = make_reader(adapters).read(write_adapter(tmp_path, tensors))
    adapters.begin_step(make_batch([0], [(0, 0, 0)], [AdapterLoad(0, "x", [0])]))
    adapters.place_tokens(_forward_batch([0], [3]), 1)
    adapters.plan_tokens(1)
    x = torch.randn(1, 6)
    merged = base + tensors["q.b"] @ tensors["q.a"]
    merged *= (tensors["q.norm"] / merged.norm(dim=1))[:, None]
    out = layer.expand(x @ base.t() + bias, layer.shrink(x), bias)
    torch.testing.assert_close(out, x @ merged.t() + bias, rtol=1e-4, atol=1e-4)


def test_an_embedding_looks_its_rows_up(tmp_path: Path) -> None:
    adapters = make_adapters(AdapterSizes(1, 1, 1), {"embed": (9, [4])}, lookup="embed")
    tensors = {"embed.a": torch.randn(3, 4), "embed.b": torch.randn(9, 3)}
    adapters.host["x"] = make_reader(adapters).read(write_adapter(tmp_path, tensors))
    adapters.begin_step(make_batch([0, 1, 2], [(0, 0, 0), (1, -1, 0), (2, 0, 0)], [AdapterLoad(0, "x", [0])]))
    adapters.place_tokens(_forward_batch([0, 1, 2], [3, 3, 3]), 3)
    adapters.plan_tokens(3)
    layer: PooledLayer = adapters.pool.layers[0]
    out = layer.expand(torch.zeros(3, 4), layer.look_up(torch.tensor([7, 7, -2])))
    torch.testing.assert_close(out[0], tensors["embed.b"][7] @ tensors["embed.a"])
    assert not out[1:].any(), "one row has no adapter, the other an id of another rank"


def test_pages_are_written_where_steps_in_flight_do_not_read() -> None:
    adapters = make_adapters(AdapterSizes(2, 2, 1), {"q": (4, [4])})
    adapters.pool.await_copies(np.array([0, -1]))  # without streams every copy has ended
    assert adapters.pool.num_bytes == 2 * adapters.pool.page_elements * 4 + 4 * 2 * 4
