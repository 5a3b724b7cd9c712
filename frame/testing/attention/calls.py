"""Checks of attention backends over several calls and for large caches: results that are kept,
other steps at the addresses of one, other pages of the same rows, KV slots above 65,536, and time.

One case of decodes within the capabilities is checked. Must not know a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend
from frame.entrypoints.tools.bench.paged_batches import DTYPES, Case, Pages, Rows, planned, requirements
from frame.testing.attention.cases import DECODES, LATENT, MIXED, with_pages_for
from frame.testing.attention.reference import TOLERANCE, Inputs, Placed, make_inputs, reference
from frame.testing.conformance import Check, Subject
from frame.testing.generators import require_bounded, require_growth, require_no_waiting
from frame.testing.tensors import require_near
from frame.testing.torch_calls import unchanged_torch

Place = Callable[[AttentionBackend, Case, Inputs], Placed]
Make = Callable[[Case], AttentionBackend]
MANY_SLOTS = 70_000  # more than 16 bits count
FEW_KEYS, MANY_KEYS, MAX_GROWTH = 1000, 8000, 40.0  # of a decode; eight times the keys leave the caches of a processor
FEW_SECONDS = 1e-2  # for which any growth is allowed
LATE = Rows.of([], [(2100, 14)])  # tokens whose positions 16 bits of floats do not tell apart


def call_checks(make: Make, place: Place, subject: Subject) -> Iterator[Check]:
    """The checks for the first case that the capabilities cover."""
    capabilities, device = subject.record.capabilities, subject.setting.device
    for name in getattr(capabilities, "dtypes", DTYPES):
        late = replace(with_pages_for(Case(LATE, heads=2, kv_heads=1, head_dim=64, v_head_dim=64), capabilities), dtype=DTYPES[name])
        if not capabilities.unsupported(replace(requirements(replace(late, device=device)), phases=("extend",))):
            yield Check(f"positions_above_2048-{name}", partial(_tells_positions_apart, make, place, replace(late, device=device)))
    sinks = replace(with_pages_for(Case(DECODES, page_size=1, head_dim=64, v_head_dim=64, sinks=True), capabilities), device=device)
    served = getattr(capabilities, "dtypes", DTYPES)
    if (name := next((name for name in ("float32", "bfloat16") if name in served), None)) is not None:
        sinks = replace(sinks, dtype=DTYPES[name])
        if not capabilities.unsupported(replace(requirements(sinks), phases=("decode",))):
            yield Check("follows_its_weights", partial(_follows_its_weights, make, place, sinks))
    for case in (Case(DECODES, page_size=1, head_dim=64, v_head_dim=64), Case(DECODES, page_size=1, **LATENT)):
        for name in getattr(capabilities, "dtypes", DTYPES):
            placed = replace(with_pages_for(case, capabilities), dtype=DTYPES[name], device=device)
            if not capabilities.unsupported(replace(requirements(placed), phases=("decode",))):
                functions = [_keeps_results, _keeps_no_steps, _fills_its_pages, _leaves_the_process, _has_many_slots, _grows_with_keys]
                functions.append(_follows_its_pages)
                for function in (*functions, *((_waits_for_nothing,) if device == "cpu" else ())):
                    yield Check(f"{function.__name__.strip('_')}-{name}", partial(function, make, place, placed))
                return


def _compare(got: torch.Tensor, case: Case, inputs: Inputs, what: str) -> None:
    require_near(got.double().cpu(), reference(case, inputs), what, TOLERANCE[case.dtype], is_relative=False)


def _keeps_results(make: Make, place: Place, case: Case) -> None:
    """A result stays as it is, and steps with other queries and another cache at the same addresses
    have results of their own."""
    inputs, backend = make_inputs(case), make(case)
    placed = place(backend, case, inputs).spread()
    first = placed.run(backend, inputs.spec, planned(backend, placed.batch))
    before = first.clone()
    others = make_inputs(replace(case, seed=case.seed + 1))
    for what, changed in (
        ("other queries", replace(inputs, queries=others.queries)),
        ("another cache", replace(inputs, queries=others.queries, cached=others.cached)),
    ):
        source = place(backend, case, changed).spread()
        pairs = zip(
            (placed.q, *placed.step_kv, *placed.batch.kv.layer(0)), (source.q, *source.step_kv, *source.batch.kv.layer(0)), strict=True
        )
        for target, values in pairs:
            target.copy_(values)
        result = placed.run(backend, inputs.spec, planned(backend, placed.batch))
        _compare(result, case, changed, f"a step with {what} at the same addresses")
        assert torch.equal(first, before), "a result changes with the next call; return memory of its own"


def _keeps_no_steps(make: Make, place: Place, case: Case) -> None:
    inputs, backend = make_inputs(case), make(case)
    placed = place(backend, case, inputs).spread()
    require_bounded(
        backend, lambda _: placed.run(backend, inputs.spec, planned(backend, placed.batch)), 16, "steps of the same rows", slack=4
    )


def _fills_its_pages(make: Make, place: Place, case: Case) -> None:
    """Rows at the limit of the context: they have all pages of the table's width, to the last
    slot."""
    length = max(6, -(-48 // case.page_size)) * case.page_size
    case = replace(case, rows=Rows.of([length, 3, length - 1]))
    inputs, backend = make_inputs(case), make(case)
    old = inputs.pages
    inputs.pages = replace(old, table=np.ascontiguousarray(old.table[:, : length // case.page_size]))
    placed = place(backend, case, inputs).spread()
    result = placed.run(backend, inputs.spec, planned(backend, placed.batch))
    _compare(result, case, inputs, f"a row of {length} tokens, which fills its pages")


def _leaves_the_process(make: Make, place: Place, case: Case) -> None:
    """Making a backend of each dtype and a step changes no default of torch."""
    with unchanged_torch("the backend changes"):
        for name in make(case).capabilities.dtypes:
            _prepare(make, place, replace(case, dtype=DTYPES[name]), Rows.of([7, 3]))()


def _follows_its_weights(make: Make, place: Place, case: Case) -> None:
    """An update writes new sinks to the memory of the old ones, between two steps."""
    inputs, backend = make_inputs(case), make(case)
    placed = place(backend, case, inputs).spread()
    sinks = inputs.spec.sinks
    assert sinks is not None
    for what in ("before an update of the sinks", "after it"):
        _compare(placed.run(backend, inputs.spec, planned(backend, placed.batch)), case, inputs, what)
        sinks += 3.0


def _follows_its_pages(make: Make, place: Place, case: Case) -> None:
    """Steps with equal slots and lengths have the results of their own pages, in a batch of their
    own and in the memory of an earlier one."""
    backend = make(case)
    for rows in (case.rows, MIXED) if {"extend", "mixed"} <= {*backend.capabilities.phases} else (case.rows,):
        case = replace(case, rows=rows)
        inputs = make_inputs(case)
        moved = replace(make_inputs(replace(case, seed=case.seed + 1)), spec=inputs.spec, weight=inputs.weight, pages=_move(inputs.pages))
        first, second = (place(backend, case, each).spread() for each in (inputs, moved))
        for what, placed, expected in (
            ("a step", first, inputs),
            ("a step of the same slots and lengths on other pages", second, moved),
            ("a step on the pages of the one before the last", first, inputs),
        ):
            _compare(placed.run(backend, inputs.spec, planned(backend, placed.batch)), case, expected, what)
        first.batch.host.page_table[:] = second.batch.host.page_table
        pairs = zip(_tensors_of_step(first), _tensors_of_step(second), strict=True)
        for target, values in pairs:
            target.copy_(values)
        result = first.run(backend, inputs.spec, planned(backend, first.batch))
        _compare(result, case, moved, "a step whose page table was changed in place")


def _move(pages: Pages) -> Pages:
    """Each row has the pages that follow its own, which mostly were another row's."""
    size, count, table = pages.page_size, pages.num_pages, pages.table.copy()
    table[table < count] = (table[table < count] + 1) % count
    return Pages(size, count, table, pages.slots, [(each + size) % (count * size) for each in pages.places])


def _tensors_of_step(placed: Placed) -> list[torch.Tensor]:
    return [placed.q, *placed.step_kv, *placed.batch.kv.layer(0), placed.batch.kv_slots, placed.batch.page_table]


def _tells_positions_apart(make: Make, place: Place, case: Case) -> None:
    """Each token of a chunk attends to those up to its own, far from the start. The keys after it
    are large, so that each shows."""
    inputs, backend = make_inputs(case), make(case)
    keys, values = inputs.cached[0]
    values = values.clone()
    values[-int(case.rows.queries[0]) :] *= 2 ** torch.arange(int(case.rows.queries[0])).div(2, rounding_mode="floor").view(-1, 1, 1)
    inputs = replace(inputs, cached=[(keys, values)])
    placed = place(backend, case, inputs).spread()
    result = placed.run(backend, inputs.spec, planned(backend, placed.batch)).double().cpu()
    expected = reference(case, inputs)
    require_near(result, expected, "a chunk after 2,100 tokens", 2 * TOLERANCE[case.dtype], is_relative=True)


def _has_many_slots(make: Make, place: Place, case: Case) -> None:
    """The rows' pages are behind 70,000 KV slots of others."""
    inputs, backend = make_inputs(case), make(case)
    moved = -(-MANY_SLOTS // case.page_size)
    old = inputs.pages
    table = old.table.copy()
    table[table < old.num_pages] += moved
    places = [each + moved * case.page_size for each in old.places]
    inputs.pages = Pages(case.page_size, old.num_pages + moved, table, old.slots, places)
    placed = place(backend, case, inputs).spread()
    result = placed.run(backend, inputs.spec, planned(backend, placed.batch))
    _compare(result, case, inputs, f"rows in KV slots above {MANY_SLOTS}")


def _prepare(make: Make, place: Place, case: Case, rows: Rows) -> Callable[[], torch.Tensor]:
    case = replace(case, rows=rows)
    inputs, backend = make_inputs(case), make(case)
    placed = place(backend, case, inputs).spread()
    return lambda: placed.run(backend, inputs.spec, planned(backend, placed.batch))


def _grows_with_keys(make: Make, place: Place, case: Case) -> None:
    require_growth(
        lambda keys: _prepare(make, place, case, Rows.of([keys])), FEW_KEYS, MANY_KEYS, "a decode, whose size is its keys",
        MAX_GROWTH, FEW_SECONDS,
    )  # fmt: skip


def _waits_for_nothing(make: Make, place: Place, case: Case) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for one another
    try:
        require_no_waiting(_prepare(make, place, case, Rows.of([7, 3])), "a step of two decodes")
    finally:
        torch.set_num_threads(threads)
