# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Products of low-rank deltas against float64 and `TorchDeltas`, over adapters in the batch, ranks,
parts, experts, scales, dtypes and strides.

Collected by `tests/gpu/test_lora.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
import triton
import triton.language as tl

from frame.adapters.deltas import LayerPages, RowPlan, TorchDeltas
from frame.adapters.triton_deltas import FixedDeltas, TiledDeltas, TritonDeltas
from frame.interfaces.adapter import PAGE_RANKS
from frame.kernels.elementwise.activation import silu_mul
from frame.kernels.lora.products import list_blocks, load_b
from frame.kernels.lora.row_tiles import COUNTERS, SORTED_ROWS, choose_block, group_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
# relative to the largest value; the interpreter truncates bfloat16
UNIT = {torch.float32: 2**-16, torch.float16: 2**-10, torch.bfloat16: 2**-7 if ON_GPU else 2**-6}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@dataclass
class Case:
    """A layer with adapters whose places have `counts` pages, and rows of them."""

    inputs: int = 40
    splits: tuple[int, ...] = (24, 8, 20)
    counts: tuple[int, ...] = (1, 2, 0, 4)
    places: list[int] = field(default_factory=lambda: [0, -1, 3, 1, 2, 3, 0])
    experts: int = 0
    scaled: tuple[int, ...] = ()  # places with an output scale
    dtype: torch.dtype = torch.float32
    gap: int = 0  # elements between rows of the output
    spread: int = 0  # elements between pages

    def __post_init__(self) -> None:
        pages, width, stacks = sum(self.counts) + 1, max(self.counts), max(1, self.experts)
        outputs = sum(self.splits)
        sizes = stacks * len(self.splits) * PAGE_RANKS * self.inputs, stacks * outputs * PAGE_RANKS
        pool = torch.full((pages, sum(sizes) + self.spread), torch.nan, device=DEVICE, dtype=self.dtype)
        pool[:, : sizes[0]] = torch.randn(pages, sizes[0]) * self.inputs**-0.5
        pool[:, sizes[0] : sum(sizes)] = torch.randn(pages, sizes[1]) * PAGE_RANKS**-0.5
        self.layer = LayerPages(
            pool[:, : sizes[0]].unflatten(1, (stacks * len(self.splits), PAGE_RANKS, self.inputs)),
            pool[:, sizes[0] : sum(sizes)].unflatten(1, (stacks, outputs, PAGE_RANKS)),
            self.splits,
            self._numbers(self.counts),
            torch.rand(len(self.counts), outputs, device=DEVICE) + 0.5,
            self._numbers([place in self.scaled for place in range(len(self.counts))]),
            self.experts,
        )
        pool[0] = torch.nan  # the page of no adapter
        order = (torch.randperm(pages - 1) + 1).tolist()
        self.place_pages = self._numbers([[order.pop() for _ in range(count)] + [0] * (width - count) for count in self.counts])

    def _numbers(self, numbers: object) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    def make_plan(self) -> RowPlan:
        if not self.experts:
            return RowPlan(self._numbers(self.places), self.place_pages)
        experts = torch.randint(self.experts, (len(self.places),), device=DEVICE)
        return RowPlan(self._numbers(self.places), self.place_pages, experts)

    def make_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, outputs = len(self.places), sum(self.splits)
        x = torch.randn(rows, self.inputs, device=DEVICE).to(self.dtype)
        return x, torch.randn(rows, outputs + self.gap, device=DEVICE).to(self.dtype)[:, :outputs]

    def compute(self, operations: TiledDeltas, x: torch.Tensor, out: torch.Tensor, plan: RowPlan, bias: torch.Tensor | None) -> None:
        plan = operations.plan_rows(plan, self.experts)
        operations.expand(out, operations.shrink(x, self.layer, plan), self.layer, plan, bias)

    def compute_reference(self, x: torch.Tensor, out: torch.Tensor, plan: RowPlan, bias: torch.Tensor | None) -> torch.Tensor:
        """In float64."""
        layer = replace(self.layer, a=self.layer.a.double(), b=self.layer.b.double())
        result = out.double()
        shrunk = TorchDeltas().shrink(x.double(), layer, plan)
        TorchDeltas().expand(result, shrunk, layer, plan, None if bias is None else bias.double())
        return result

    def compute_gated(
        self, operations: TritonDeltas, x: torch.Tensor, product: torch.Tensor, plan: RowPlan, bias: torch.Tensor | None
    ) -> torch.Tensor:
        plan = operations.plan_rows(plan)
        shrunk = operations.shrink(x, self.layer, plan)
        return operations.expand_gated(product, shrunk, self.layer, plan, bias)

    def check_gated(self, biased: bool = False) -> None:
        """Against two kernels: the same bits, but on a GPU sums of another order."""
        x, product = self.make_rows()
        plan, before = self.make_plan(), product.clone()
        bias = torch.randn(product.shape[1], device=DEVICE).to(self.dtype) if biased else None
        got = self.compute_gated(TritonDeltas(), x, product, plan, bias)
        assert torch.equal(product, before)
        expanded = product.clone()
        self.compute(TritonDeltas(), x, expanded, plan, bias)
        expected = silu_mul(expanded)
        if ON_GPU:
            assert (got.double() - expected.double()).abs().max() <= 4 * UNIT[self.dtype] * expected.abs().max().clamp_min(1)
            kept = [row for row, place in enumerate(self.places) if place < 0 or not self.counts[place]]
            got, expected = got[kept], expected[kept]
        assert torch.equal(got, expected)

    def check(self, biased: bool = False, operations: TiledDeltas | None = None) -> None:
        x, out = self.make_rows()
        whole = out if not self.gap else out._base
        plan, before = self.make_plan(), whole.clone()
        bias = torch.randn(out.shape[1], device=DEVICE).to(self.dtype) if biased else None
        expected = self.compute_reference(x, out, plan, bias)
        self.compute(operations or TritonDeltas(), x, out, plan, bias)
        error = (out.double() - expected).abs().max() / expected.abs().max().clamp_min(1)
        assert error <= 2 * UNIT[self.dtype], error
        kept = [row for row, place in enumerate(self.places) if place < 0 or not self.counts[place]]
        assert torch.equal(whole[kept], before[kept])
        assert torch.equal(whole[:, out.shape[1] :], before[:, out.shape[1] :])


def draw_places(rows: int, num_places: int) -> list[int]:
    return (torch.randint(num_places + 1, (rows,)) - 1).tolist()


def list_thresholds(experts: int, places: int = 4) -> list[int]:
    """Numbers of rows that use every block and every kernel of `group_rows`."""
    blocks = [count for count in range(2, 10_000) if choose_block(count, places, experts) != choose_block(count - 1, places, experts)]
    return [1, *blocks, *(size + 1 for size in SORTED_ROWS)]


ROWS = [1, 7, 70] + [300, 4096] * ON_GPU
TYPED_ROWS = [2, 20] + [300, 1100] * ON_GPU
SIZES = [(40, (24, 8, 20)), (33, (7,)), (272, (48, 48))]
REAL_SIZES = [(4096, (4096, 1024, 1024)), (14336, (4096,)), (4096, (14336, 14336))] * ON_GPU


@pytest.mark.parametrize(("inputs", "splits"), SIZES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_get_the_deltas_of_their_adapters(rows: int, inputs: int, splits: tuple[int, ...]) -> None:
    Case(inputs, splits, places=draw_places(rows, 4)).check()


@each_type
@pytest.mark.parametrize(("inputs", "splits"), [*SIZES[:1], *REAL_SIZES], ids=str)
@pytest.mark.parametrize("rows", TYPED_ROWS)
def test_dtypes(rows: int, inputs: int, splits: tuple[int, ...], dtype: torch.dtype) -> None:
    Case(inputs, splits, places=draw_places(rows, 4), dtype=dtype).check()


@each_type
@pytest.mark.parametrize("experts", [0, 2])
def test_tiles_of_64_rows(experts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.adapters.triton_deltas.choose_block", lambda *_: 64)
    Case(splits=(24, 8, 20) if not experts else (24,), experts=experts, places=draw_places(90, 4), scaled=(1,), dtype=dtype).check(True)


@pytest.mark.parametrize("splits", [(200, 40, 70), *[(128256,)] * ON_GPU], ids=str)
@pytest.mark.parametrize("rows", [1, 20])
def test_programs_of_several_blocks(rows: int, splits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an LM head."""
    monkeypatch.setattr("frame.kernels.lora.products._MAX_BLOCKS", 2)
    monkeypatch.setattr("frame.kernels.lora.products._PROGRAMS", 2 * rows)
    Case(splits=splits, places=draw_places(rows, 4), scaled=(1,)).check(True)


@each_type
def test_columns_of_embeddings(dtype: torch.dtype) -> None:
    """Also of ids of other ranks."""
    case = Case(splits=(24,), places=draw_places(30, 4), dtype=dtype)
    plan, ids = case.make_plan(), torch.randint(-3, case.inputs + 3, (30,), device=DEVICE)
    got = TritonDeltas().look_up(ids, case.layer, plan)
    expected = TorchDeltas().look_up(ids, case.layer, plan)
    for row, place in enumerate(case.places):
        ranks = PAGE_RANKS * case.counts[place] * (place >= 0)
        is_foreign = not 0 <= ids[row] < case.inputs
        assert torch.equal(got[row, :, :ranks], torch.zeros_like(got[row, :, :ranks]) if is_foreign else expected[row, :, :ranks])


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("place", [-1, 2, 3])
def test_rows_of_one_adapter(place: int, rows: int) -> None:
    """No adapter; one that leaves the layer alone; one with several pages."""
    Case(places=[place] * rows).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("biased", [False, True])
def test_output_scales(biased: bool, rows: int, dtype: torch.dtype) -> None:
    Case(places=[row % 5 - 1 for row in range(1, rows + 1)], scaled=(0, 3), dtype=dtype).check(biased)


@each_type
@pytest.mark.parametrize("inner", [24, 40] + [14336] * ON_GPU)
@pytest.mark.parametrize("rows", [1, 6, 20] + [300, 700] * ON_GPU)
def test_gated_outputs_have_the_bits_of_the_activation(rows: int, inner: int, dtype: torch.dtype) -> None:
    Case(40, (inner, inner), places=draw_places(rows, 4), scaled=(0, 3), dtype=dtype, gap=16).check_gated(biased=rows > 1)


@pytest.mark.parametrize("rows", [3, 30])
@pytest.mark.parametrize("place", [-1, 2, 3])
def test_gated_rows_of_one_adapter(place: int, rows: int) -> None:
    """No adapter; one that leaves the layer alone; one with several pages."""
    Case(40, (33, 33), places=[place] * rows).check_gated()


@each_type
@pytest.mark.parametrize("counts", [(1, 2, 0, 4), (1, 1, 0, 1), (5, 1, 0, 9)])
@pytest.mark.parametrize("rows", [70] + [600] * ON_GPU)
def test_gated_tiles_of_64_rows(rows: int, counts: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.adapters.triton_deltas.choose_block", lambda *_: 64)
    Case(40, (72, 72), counts, places=draw_places(rows, 4), scaled=(1,), dtype=dtype).check_gated(True)


@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("counts", [(1, 1), (6, 3), (3, 9)])
def test_ranks_of_several_rounds(counts: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rows > 64:
        monkeypatch.setattr("frame.adapters.triton_deltas.choose_block", lambda *_: 64)
    Case(counts=counts, places=draw_places(rows, 2), scaled=(0,)).check(True)


@pytest.mark.parametrize("pairs", [1, 16, 40] + [100, 2048] * ON_GPU)
def test_pairs_get_the_deltas_of_their_experts(pairs: int) -> None:
    Case(48, (16, 16), experts=3, places=draw_places(pairs, 4)).check()


@pytest.mark.parametrize("rows", [3, 20])
def test_strides(rows: int) -> None:
    """Rows of the output apart, and pages at odd addresses."""
    Case(places=draw_places(rows, 4), gap=5, spread=3).check()
    Case(places=draw_places(rows, 4), gap=16, spread=16, dtype=torch.float16).check()


@pytest.mark.parametrize("rows", [2, 20])
def test_pages_beyond_two_to_the_31st_element(rows: int) -> None:
    case = Case(counts=(1, 1), places=[row % 3 - 1 for row in range(rows)], dtype=torch.float16)
    x, out = case.make_rows()
    expected, plan = case.compute_reference(x, out, case.make_plan(), None), case.make_plan()
    pages, stride = 70_000, 32_776
    a, b = case.layer.a, case.layer.b
    pool = torch.empty(pages * stride, dtype=a.dtype, device=DEVICE)  # on a CPU, memory that is not written is not allocated
    far_a = pool.as_strided((pages, *a.shape[1:]), (stride, *a.stride()[1:]))
    far_b = pool.as_strided((pages, *b.shape[1:]), (stride, *b.stride()[1:]), a[0].numel())
    for place, page in enumerate((pages - 1, 1)):
        near = int(case.place_pages[place, 0])
        far_a[page], far_b[page], case.place_pages[place, 0] = a[near], b[near], page
    case.layer = replace(case.layer, a=far_a, b=far_b)
    case.compute(TritonDeltas(), x, out, plan, None)
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("experts", [0, 5])
@pytest.mark.parametrize("rows", [9, 64, 65, 512, 513, 2000])
def test_rows_of_a_key_share_tiles(rows: int, experts: int) -> None:
    places = torch.tensor(draw_places(rows, 6), dtype=torch.int32, device=DEVICE)
    of_rows = torch.randint(experts, (rows,), device=DEVICE) if experts else None
    block = max(8, choose_block(rows, 6, experts))
    keys, tiled, counters = (each.cpu() for each in group_rows(places, of_rows, 6, experts, block))
    assert len(counters) == COUNTERS * len(keys) and not counters.any()
    row_keys = (places if of_rows is None else torch.where(places < 0, -1, places * experts + of_rows)).tolist()
    tiles = [
        (key, [row for row in lanes if row < rows])
        for key, lanes in zip(keys.tolist(), tiled.view(-1, block).tolist(), strict=True)
        if lanes[0] < rows  # else unused, with the key -1
    ]
    assert sorted(row for _, lanes in tiles for row in lanes) == list(range(rows))
    assert all(max(row_keys[row], -1) == key for key, lanes in tiles for row in lanes)
    assert len(tiles) == sum(-(-count // block) for count in Counter(row_keys).values())
    assert [key for key, _ in tiles] + [-1] * (len(keys) - len(tiles)) == keys.tolist()


@pytest.mark.parametrize("experts", [0, 8, 128])
def test_warm_up_rows_use_every_block(experts: int) -> None:
    assert {choose_block(count, 4, experts) for count in list_thresholds(experts)} == ({1, 8, 64} if experts else {1, 8, 16, 32, 64})
    assert [choose_block(64, places, experts) for places in (1, 8, 32)] == ([8, 8, 8] if experts else [32, 16, 8])


@triton.jit
def _read_pages(b, numbers, out, last, stride, PAGES: tl.constexpr, OUTPUTS: tl.constexpr):
    number, column = tl.arange(0, PAGES), tl.arange(0, OUTPUTS)
    tile = load_b(b + tl.load(numbers + number) * stride, number, last, column, column < OUTPUTS - 1, PAGES, OUTPUTS)
    tl.store(out + column[:, None] * PAGES * 16 + tl.arange(0, PAGES * 16)[None, :], tile)


def test_pages_beside_each_other() -> None:
    """The ranks of the pages that an adapter has, and zeros for the others."""
    b, numbers = torch.randn(5, 16, PAGE_RANKS, device=DEVICE), torch.tensor([3, 1, 4, 0], dtype=torch.int32, device=DEVICE)
    out = b.new_full((16, 64), torch.nan)
    _read_pages[(1,)](b, numbers, out, 3, b.stride(0), PAGES=4, OUTPUTS=16)
    expected = torch.cat([b[3], b[1], b[4], torch.zeros_like(b[0])], 1)
    expected[15] = 0
    assert torch.equal(out, expected)


def test_blocks_of_outputs_lie_in_one_part() -> None:
    assert list_blocks((32, 16), 32) == ([(0, 2, 0), (2, 3, 1)], 16)
    assert list_blocks((5, 40), 32) == ([(0, 5, 0), (5, 45, 1), (37, 45, 1)], 1)
    with pytest.raises(TypeError, match="plan_rows"):
        Case().compute(UnplannedDeltas(), *Case().make_rows(), Case().make_plan(), None)


@each_type
def test_bits_of_a_row_depend_on_that_row_alone(dtype: torch.dtype) -> None:
    """Among rows of other adapters and ranks, and in other places of a tile."""
    case, operations = Case(272, (48, 24), places=draw_places(70, 4), scaled=(1,), dtype=dtype), FixedDeltas()
    operations.prove(case.layer)
    (x, out), places = case.make_rows(), case.places
    together = out.clone()
    case.compute(operations, x, together, case.make_plan(), None)
    for rows in (torch.arange(0, 70, 9), torch.arange(69, -1, -1), torch.tensor([5])):
        rows, some = rows.to(DEVICE), out[rows]
        case.places = [places[row] for row in rows.tolist()]
        case.compute(operations, x[rows], some, case.make_plan(), None)
        assert torch.equal(some, together[rows])
    case.places = places
    case.check(operations=operations)


class PlacedDeltas(FixedDeltas):
    """Whose results depend on the number of rows."""

    def expand(self, out: torch.Tensor, *others: object) -> None:
        super().expand(out, *others)  # type: ignore[arg-type]
        out += len(out)


def test_a_product_that_depends_on_other_rows_is_refused() -> None:
    with pytest.raises(RuntimeError, match="depend on a row's place"):
        PlacedDeltas().prove(Case().layer)


class UnplannedDeltas(TritonDeltas):
    def plan_rows(self, plan: RowPlan, num_experts: int = 0) -> RowPlan:  # type: ignore[override]
        return plan
