"""`torch_native`: the conformance suite, grouping of rows, and the code paths of large steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frame.attention_backends import TORCH_NATIVE
from frame.attention_backends.torch_native import backend as native
from frame.attention_backends.torch_native import plan as planning
from frame.attention_backends.torch_native.backend import TorchNativeBackend
from frame.core.interfaces.attention import AttentionRequirements, AttentionSpec
from frame.core.interfaces.batch import TreeMask
from frame.entrypoints.tools.bench.paged_batches import (
    Case,
    PlainKVCache,
    RandomProjections,
    Rows,
    build_context,
    forward_batch,
    lay_out,
    planned,
)
from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.attention.reference import make_inputs
from frame.testing.attention.suite import check_case

SUBJECT = conformance.find(load_registry(installed=False), "attention_backend:torch_native", conformance.Setting())
CHECKS = conformance.checks("attention_backend", SUBJECT)
LATENT = {"rank": 32, "rope": 16, "head_dim": 40, "v_head_dim": 24}


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_conformance(check: conformance.Check) -> None:
    check.run()


def make(case: Case) -> TorchNativeBackend:
    return TorchNativeBackend(build_context(case.device, case.dtype, case.page_size))


def groups_of(rows: Rows, page_size: int = 4, window: int | None = None, token_bytes: int = 1024, shuffled: bool = True) -> planning.Groups:
    pages = lay_out(rows, page_size, np.random.default_rng(0), shuffled)
    batch = forward_batch(rows, pages, PlainKVCache(page_size, []), "cpu")
    return planning.Grouping(batch, window, torch.float32, token_bytes).make_groups(rows.num_decodes)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    st.integers(1, 100_000),
    st.integers(0, 10_000),
    st.sampled_from((0.5, 0.75, 1.0)),
)
def test_runs_hold_every_row_once_and_bound_the_padding(lengths: list[int], budget: int, spare: int, fill: float) -> None:
    costs = np.sort(np.array(lengths))[::-1]
    split_runs = list(planning.split_runs(costs, budget, spare, fill))
    assert [row for start, stop in split_runs for row in range(start, stop)] == list(range(len(costs)))
    for start, stop in split_runs:
        top, run = int(costs[start]), costs[start:stop]
        assert len(run) == 1 or len(run) * top <= budget
        assert run.min() >= fill * top or (top - run).sum() <= spare


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 200), max_size=12),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=8),
    st.sampled_from((None, 1, 7, 50)),
    st.sampled_from((1, 3, 16)),
)
def test_every_token_gets_its_result_once(decodes: list[int], extends: list[tuple[int, int]], window: int | None, page_size: int) -> None:
    if not decodes and not extends:
        return
    rows = Rows.of(decodes, extends)
    found = groups_of(rows, page_size, window)
    tokens = np.arange(int(rows.starts[-1]))
    written = np.concatenate([tokens[_numpy(group.targets)] for group in (*found.decodes, *found.extends)])
    assert sorted(written) == list(tokens)
    assert all(group.query_len == 1 for group in found.decodes)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_token_of_a_tree_sees_its_own_branch(monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    """The tokens of a branch have the results that they have in a row without other branches."""
    if is_large:
        monkeypatch.setattr(planning, "MASK_CELLS", 8)
    numbers, branch = np.random.default_rng(0), [0, 2, 3, 5]
    sees = np.tril(np.ones((2, 6, 6), bool))
    sees[0, 5] = sees[0, 3] = False
    sees[0, 3, [0, 2, 3]] = sees[0, 5, branch] = sees[:, 2, 1] = True
    sees[0, 2, 1] = False
    spec = AttentionSpec(layer=0, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, scale=0.3)

    def attend(rows: Rows, caches: list[torch.Tensor], q: torch.Tensor, mask: TreeMask | None = None) -> torch.Tensor:
        pages = lay_out(rows, 4, np.random.default_rng(1))
        kv = PlainKVCache(4, [torch.zeros(pages.num_pages, 4, 2, 8) for _ in range(2)])
        for place, cached in zip(pages.places, caches, strict=True):
            kv.store(spec, torch.from_numpy(place), cached[:, 0], cached[:, 1])
        batch = forward_batch(rows, pages, kv, "cpu")
        if mask is not None:
            batch.extensions[TreeMask] = mask
        backend = TorchNativeBackend(build_context("cpu", torch.float32, 4))
        own = torch.zeros(len(q), 2, 8)  # all rows have a prefix, so this step's own keys are read from the cache
        return backend.run(spec, q, own, own, planned(backend, batch))

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(numbers.standard_normal(shape)).float()

    cached, q = [draw(20, 2, 2, 8), draw(9 + 6, 2, 2, 8), draw(7 + 4, 2, 2, 8)], draw(1 + 6 + 4, 4, 8)
    words = [-1 - sum(1 << (node - other) for other in range(node) if not sees[0, node, other]) for node in range(6)]
    bits = torch.tensor([-1, *words, *[-1] * 4], dtype=torch.int32)
    found = attend(Rows.of([20], [(9, 6), (7, 4)]), cached, q, TreeMask(np.array([1]), bits))
    plain = attend(Rows.of([20], [(9, 6), (7, 4)]), cached, q)
    assert torch.equal(found[[0, 1, 2, 7, 8, 9, 10]], plain[[0, 1, 2, 7, 8, 9, 10]])
    tokens = [*range(9), *(9 + node for node in branch)]
    alone = attend(Rows.of([], [(9, 4)]), [cached[1][tokens]], q[[1 + node for node in branch]])
    torch.testing.assert_close(found[[1 + node for node in branch]], alone)
    assert not torch.allclose(found[4], plain[4])


def test_similar_decodes_share_one_call() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(64, 129, 32)]
    assert [group.rows for group in groups_of(Rows.of(lengths), token_bytes=192).decodes] == [32]


def test_a_very_long_row_is_computed_alone() -> None:
    found = groups_of(Rows.of([20] * 30 + [20_000]), token_bytes=1024).decodes
    assert sorted(group.rows for group in found) == [1, 30]


def test_a_long_row_in_contiguous_pages_is_sliced() -> None:
    rows = Rows.of([4000])
    (group,) = groups_of(rows, page_size=16, shuffled=False).decodes
    assert isinstance(group.keys, slice)
    assert group.keys.stop - group.keys.start == 4000
    (group,) = groups_of(rows, page_size=16, shuffled=False, window=1000).decodes
    assert isinstance(group.keys, slice)
    assert (group.keys.start, group.keys.stop) == (3000, 4000)
    (group,) = groups_of(rows, page_size=16, shuffled=True).decodes
    assert isinstance(group.keys, torch.Tensor)


def test_fresh_prompts_do_not_read_the_cache() -> None:
    found = groups_of(Rows.of([], [(0, 30), (0, 30), (5, 30), (0, 30)])).extends
    assert sorted((group.rows, group.from_step) for group in found) == [(1, False), (3, True)]


@pytest.mark.parametrize("kind", [{}, LATENT, {"window": 30}, {"window": 30, **LATENT}, {"soft_cap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_extends_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch, kind: dict[str, object], dtype: torch.dtype) -> None:
    monkeypatch.setattr(native, "BLOCK_CELLS", 2000)
    monkeypatch.setattr(planning, "MASK_CELLS", 1)  # no row shares a mask with another one
    check_case(make, Case(Rows.of([40], [(0, 150), (90, 77), (90, 77)]), dtype=dtype, **kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_both_forms_of_latent_attention_agree(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Expanded keys that do not fit stay absorbed."""
    calls: list[str] = []
    original = TorchNativeBackend._expanded
    monkeypatch.setattr(native, "EXPANDED_BYTES", limit)
    monkeypatch.setattr(TorchNativeBackend, "_expanded", lambda *arguments: (calls.append("expanded"), original(*arguments))[1])
    check_case(make, Case(Rows.of([], [(0, 30), (64, 40)]), **LATENT))
    assert bool(calls) == bool(limit)


def test_windows_are_planned_from_the_second_step_on() -> None:
    case = Case(Rows.of([50, 60]), window=10)
    backend = make(case)
    check_case(lambda _: backend, case)
    pages = lay_out(case.rows, case.page_size, np.random.default_rng(0))
    cache = PlainKVCache(case.page_size, [torch.zeros(pages.num_pages, case.page_size, 2, 32)] * 2)
    plan = backend.plan(forward_batch(case.rows, pages, cache, "cpu"))
    assert set(plan._by_view) == {(10, True, False, True)}


def _numpy(places: slice | torch.Tensor) -> slice | np.ndarray:
    return places if isinstance(places, slice) else places.numpy()


@pytest.mark.parametrize("latent", [{}, LATENT], ids=["mha", "mla"])
def test_an_fp8_cache_reads_as_its_values_times_the_scales(latent: dict[str, int]) -> None:
    """The result over an fp8 cache equals that over a float32 cache with the same values, for new
    and cached tokens."""
    case = Case(Rows.of([5, 70], [(0, 21), (0, 9), (34, 9)]), page_size=4, **latent)  # type: ignore[arg-type]
    inputs = make_inputs(case)
    spec = replace(inputs.spec, k_scale=0.02, v_scale=0.5)
    scales = (spec.k_scale, spec.v_scale)
    slots = torch.from_numpy(np.concatenate(inputs.pages.places))
    outs = []
    for dtype in (torch.float8_e4m3fn, torch.float32):
        cache = PlainKVCache(4, [torch.zeros(inputs.pages.num_pages, 4, *shape).to(dtype) for shape in inputs.shapes])
        values = [torch.cat(parts).float() for parts in zip(*inputs.cached, strict=True)]
        if dtype == torch.float32:
            pairs = zip(values, scales, strict=False)  # a latent has one scale
            values = [(value / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for value, scale in pairs]
        cache.store(spec, slots, *values)
        backend = make(case)
        batch = planned(backend, forward_batch(case.rows, inputs.pages, cache, "cpu"))
        q = torch.cat(inputs.queries).float()
        starts, prefixes, lengths = np.cumsum([0, *case.rows.lengths]), case.rows.prefixes, case.rows.lengths
        new = np.concatenate([np.arange(s + p, s + n) for s, p, n in zip(starts[:-1], prefixes, lengths, strict=True)])
        own = [value[torch.from_numpy(new)] for value in values]
        if inputs.weight is None:
            outs.append(backend.run(spec, q, own[0], own[1], batch))
        else:
            layer = RandomProjections(spec, case.rank, case.head_dim - case.rope, case.rope, inputs.weight.float())
            nope = layer.qk_nope_head_dim
            outs.append(backend.run_mla(layer, q[..., :nope], q[..., nope:], own[0], batch))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 21])
def test_spans_of_large_rows_are_masked_block_by_block(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(planning, "MASK_CELLS", 64)
    monkeypatch.setattr(native, "BLOCK_QUERIES", 16)
    rows = Rows.of([30], [(0, 70), (45, 33)])
    check_case(make, Case(rows, spans=True, window=window))
    check_case(make, Case(rows, spans=True, window=window, soft_cap=2.0))


def test_only_products_of_a_cpu_are_batch_invariant() -> None:
    needed = AttentionRequirements("cpu", None, "mha", 64, 64, None, "bfloat16", "bfloat16", 16, deterministic=True)
    assert TORCH_NATIVE.unsupported(needed) == []
    (reason,) = TORCH_NATIVE.unsupported(replace(needed, device="cuda", compute_capability=(9, 0)))
    assert "other rows of a batch" in str(reason)
    assert TORCH_NATIVE.unsupported(replace(needed, device="cuda", compute_capability=(9, 0), deterministic=False)) == []
