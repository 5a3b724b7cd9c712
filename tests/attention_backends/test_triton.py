"""`triton`: the conformance suite under the interpreter, host-side plans, and its capabilities on a
CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from frame.core.interfaces.attention import AttentionRequirements
from frame.entrypoints.tools.bench.paged_batches import PlainKVCache, Rows, build_context, forward_batch, lay_out
from frame.plugins.loader import load_registry
from tests.interpreter import needs_triton, run_interpreted

pytestmark = needs_triton

CPU = AttentionRequirements("cpu", None, "mha", 64, 64, None, "float32", "float32", 16)


# Two thirds of the suite's time here: times of an interpreter, forms of what other checks do mixed,
# and prompts of 1,100 tokens, of which the kernels see no more than tiles.
COSTLY = (
    "grows_with_keys or batch_invariant-mha-window or batch_invariant-mha-long or steps-mha-pages-of-1"
    " or (mha-long-extends and not mha-long-extends-window)"
)
# Half of the rest's time: more rows, longer ones, other page sizes, and pairs of features. Another
# case has each feature: kind, window, soft cap, sinks, shared prefixes, trees, spans, selected keys
# and stored type.
REPEATED = (
    "pages-of-1 or pages-in-order or one-row or many-rows or mha-long or large-scores-extends or large-products or large-scores-sinks"
    " or window-of-one or sinks-decodes-window or seven-heads or as-many-keys or wide-values or mla-large-scores"
    " or shared-prefix-eight or shared-prefix-soft-cap or mha-shared-prefix-float or mha-fp8-mixed or mla-fp8-decodes or mla-int8-decodes"
    " or int8-odd-widths or int8-prompts or chunks-decodes or selected-keys-decodes or selected-keys-extends or selected-keys-pages"
    " or spans-long-rows or latent-heads-32-extends or steps-mha or batch_invariant-mha-mixed or batch_invariant-mla-selected"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(f"not ({COSTLY} or {REPEATED})", id="few"),
        pytest.param(f"({REPEATED}) and not ({COSTLY})", id="most", marks=pytest.mark.exhaustive),
        pytest.param("", id="all", marks=pytest.mark.soak),
    ],
)
def test_conformance_under_the_interpreter(chosen: str, tmp_path: Path) -> None:
    verdict_file = tmp_path / "verdict.json"
    run_interpreted("--frame-conformance=attention_backend:triton", f"--frame-conformance-json={verdict_file}", "-k", chosen)
    (verdict,) = json.loads(verdict_file.read_text())
    assert verdict["passed"]
    assert verdict["counts"]["passed"] >= 30


def test_runs_on_a_cpu_only_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    record = load_registry(installed=False).get("attention_backend", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert [reason.sentence for reason in record.capabilities.unsupported(CPU)] == ["runs on cuda, not on cpu"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert record.capabilities.unsupported(CPU) == []


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
def test_refuses_a_cpu_without_the_interpreter() -> None:
    from frame.attention_backends.triton.backend import TritonBackend

    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        TritonBackend(build_context("cpu", torch.float32, 16))


def plan_of(rows: Rows):  # type: ignore[no-untyped-def]
    from frame.attention_backends.triton.plan import StepPlan
    from frame.attention_backends.triton.shared_prefixes import SharedPrefixes

    pages = lay_out(rows, 4, np.random.default_rng(0))
    return StepPlan(forward_batch(rows, pages, PlainKVCache(4, []), "cpu"), SharedPrefixes(torch.device("cpu"), 64)), pages


def test_tiles_hold_every_query_once_and_start_with_the_longest() -> None:
    plan, _ = plan_of(Rows.of([3, 4], [(0, 40), (100, 17), (5, 1)]))
    rows, starts = plan.get_tiles(16).numpy()
    assert sorted(zip(rows.tolist(), starts.tolist(), strict=True)) == [(0, 0), (0, 16), (0, 32), (1, 0), (1, 16), (2, 0)]
    assert (rows[0], starts[0]) == (1, 16)


def test_keys_of_extends_are_ordered_by_row() -> None:
    plan, pages = plan_of(Rows.of([9], [(6, 3), (0, 5)]))
    assert plan.key_starts.tolist() == [0, 9]
    assert plan.key_places.tolist() == [*pages.places[1], *pages.places[2]]


@pytest.mark.parametrize("spans", [False, True])
def test_every_tile_is_compiled_at_the_first_launch(spans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later step waits for no compiler, however many tokens its rows have."""
    from frame.attention_backends.triton import extend_launch
    from frame.attention_backends.triton.operands import Operands
    from frame.attention_backends.triton.tile_sizes import DeviceLimits
    from frame.core.interfaces.attention import AttentionSpec

    compiled: list[tuple[int, int]] = []

    class Launch:
        def __init__(self, _: object, example: tuple[object, ...], constants: dict[str, int], *__: object) -> None:
            compiled.append((constants["MASK"], constants["BLOCK_QUERIES"]))

        def __call__(self, *_: object) -> None: ...

    monkeypatch.setattr(extend_launch, "PreparedLaunch", Launch)
    launcher = extend_launch.ExtendLauncher(torch.device("cpu"), DeviceLimits(processors=2, shared_memory=227 << 10))
    spec = AttentionSpec(layer=0, num_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, scale=1.0, spans=spans)
    cache = torch.zeros(1024, 2, 128, dtype=torch.bfloat16)
    cached = Operands(torch.zeros(1, 8, 128, dtype=torch.bfloat16), None, cache, None, cache, page_size=4)
    counts = []
    for length in (40, 1, 4, 5, 8, 9, 16, 17, 100):
        rows = Rows.of([], [(6, length)])
        batch = forward_batch(rows, lay_out(rows, 4, np.random.default_rng(0)), PlainKVCache(4, []), "cpu")
        queries, ragged = (torch.zeros(length, heads, 128, dtype=torch.bfloat16) for heads in (8, 2))
        now = Operands(queries, None, ragged, None, ragged, page_size=0)
        launcher.run(spec, cached._replace(q1=queries), now, torch.zeros_like(queries), batch, plan_of(rows)[0])
        counts.append(len(compiled))
    assert set(counts) == {8 if spans else 4}, "later steps compile"
    assert len({queries for _, queries in compiled}) == 4


@pytest.mark.parametrize(
    ("width", "parts"), [(64, (64, 0)), (192, (128, 64)), (576, (512, 64)), (80, (64, 16)), (24, (24, 0)), (96, (64, 32))]
)
def test_widths_are_split_into_powers_of_two(width: int, parts: tuple[int, int]) -> None:
    from frame.attention_backends.triton.tile_sizes import split_width

    assert split_width(width) == parts


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("columns", [(64, 0, 64), (128, 0, 128), (256, 0, 256), (512, 64, 0), (128, 64, 128)])
def test_tiles_fit_the_shared_memory(columns: tuple[int, int, int], itemsize: int, shared_memory: int) -> None:
    from frame.attention_backends.triton.tile_sizes import choose_tile

    tile = choose_tile(16, columns, itemsize, shared_memory)
    needed = 16 * (columns[0] + columns[1]) * itemsize + tile.stages * tile.keys * sum(columns) * itemsize
    assert needed <= shared_memory
