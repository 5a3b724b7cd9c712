"""What every attention backend must satisfy, checked against dense float64 arithmetic.

Cases are drawn within the capabilities that the backend states. Pages are shuffled, everything that
no row owns is NaN, uninitialised memory is NaN, and one row's result must not change when all other
rows turn to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec
from frame.core.interfaces.batch import SparseKeys, TreeMask
from frame.core.interfaces.media import MediaSpans
from frame.entrypoints.tools.bench.paged_batches import (
    Case,
    PlainKVCache,
    build_context,
    forward_batch,
    planned,
    quantize_rows,
    requirements,
    widened,
)
from frame.plugins.devices import capture_graph, open_platform
from frame.testing.attention.calls import call_checks
from frame.testing.attention.cases import Changes, cases, replays, select_positions, with_pages_for
from frame.testing.attention.invariance import invariance_checks
from frame.testing.attention.layers import layer_checks
from frame.testing.attention.reference import (
    TOLERANCE,
    Inputs,
    Placed,
    fields_of,
    make_ends,
    make_inputs,
    make_tree_mask,
    no_waiting,
    poisoned_memory,
    reference,
)
from frame.testing.attention.steps import step_checks
from frame.testing.conformance import Check, Subject
from frame.testing.tensors import require_near, unchanged


def place(backend: AttentionBackend, case: Case, inputs: Inputs, only: int | None = None) -> Placed:
    """The case's tensors on its device, without a plan. With `only`, all other rows' queries and
    cache are NaN."""

    def poison(row: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if only in (None, row) else torch.full_like(tensor, torch.nan)

    device, rows, pages = case.device, case.rows, inputs.pages
    parts, factors = [], []
    last = 0 if only is None else only  # what it shares with others stays its own
    order = [*(row for row in range(len(pages.places)) if row != last), last]
    for index, shape in enumerate(inputs.shapes):
        part = torch.full((pages.num_pages * case.page_size, *shape), torch.nan, dtype=torch.float64)
        for row in order:
            part[torch.from_numpy(pages.places[row])] = poison(row, inputs.cached[row][index] / case.kv_scales[index])
        part = part.view(pages.num_pages, case.page_size, *shape)
        if case.kv_dtype == torch.int8:
            part, factor = quantize_rows(part)
            factors.append(factor.to(device))
        parts.append(part.to(dtype=case.kv_dtype or case.dtype).to(device))
    new = [tuple(poison(row, part[prefix:]) for part in inputs.cached[row]) for row, prefix in enumerate(rows.prefixes)]
    q = torch.cat([poison(row, query) for row, query in enumerate(inputs.queries)]).to(device=device, dtype=case.dtype)
    step_kv = [torch.cat(row_parts).to(device=device, dtype=case.dtype) for row_parts in zip(*new, strict=True)]
    kv = PlainKVCache(case.page_size, parts, factors)
    batch = forward_batch(rows, pages, kv, device)
    if case.selected:
        batch.extensions[SparseKeys] = SparseKeys(_select_slots(case, inputs).to(device))
    if case.trees:
        batch.extensions[TreeMask] = make_tree_mask(case)
    if case.spans:
        batch.extensions[MediaSpans] = MediaSpans(torch.from_numpy(np.concatenate(make_ends(case))).to(device))
    if backend.capabilities.stores_kv:  # the backend has to write this step's part itself
        for part in parts:
            part.view(-1, *part.shape[2:])[batch.kv_slots] = torch.nan
    return Placed.of(case, inputs, q, step_kv, batch)


def _select_slots(case: Case, inputs: Inputs) -> torch.Tensor:
    """int64 [tokens, selected], -1 where a token sees fewer keys."""
    rows, places = case.rows, inputs.pages.places
    at = [(row, position) for row, prefix in enumerate(rows.prefixes) for position in range(prefix, prefix + int(rows.queries[row]))]
    slots = torch.full((len(at), case.selected), -1)
    for token, (row, position) in enumerate(at):
        seen = places[row][select_positions(case, position)]
        slots[token, : len(seen)] = torch.from_numpy(seen)
    return slots


def compute(backend: AttentionBackend, case: Case, inputs: Inputs, only: int | None = None) -> torch.Tensor:
    """The backend's result, float64 on the host. With `only`, all other rows' queries and cache are
    NaN."""
    placed = place(backend, case, inputs, only).spread()
    parts = () if backend.capabilities.stores_kv else placed.batch.kv.layer(0)
    cache = {f"part {index} of the cache": part for index, part in enumerate(parts)}
    with unchanged({**placed.read_only(), **cache}, "the backend"), poisoned_memory(), no_waiting(case.device):
        batch = planned(backend, placed.batch)
        out = placed.run(backend, inputs.spec, batch)
    expected = (placed.q.shape[0], case.heads, case.v_head_dim)
    assert tuple(out.shape) == expected, f"the result's shape is {tuple(out.shape)}, not {expected}"
    assert out.dtype == case.dtype, f"the result's dtype is {out.dtype}, not {case.dtype}"
    return out.double().cpu()


def check_replays(make: Callable[[Case], AttentionBackend], case: Case, changes: Changes) -> None:
    """Captures the case's decodes in a CUDA graph, then replays it for other lengths, pages, slots
    and groups of as many rows."""
    cases = [case, *(replace(case, rows=rows, groups=groups, seed=case.seed + 1 + i) for i, (rows, groups) in enumerate(changes))]
    all_inputs = [make_inputs(each) for each in cases]
    num_pages = max(inputs.pages.num_pages for inputs in all_inputs)
    columns = max(inputs.pages.table.shape[1] for inputs in all_inputs)
    for inputs in all_inputs:
        inputs.pages = widened(inputs.pages, num_pages, columns)
    spec, backend = all_inputs[0].spec, make(case)
    placed = [replace_layer(place(backend, each, inputs), spec) for each, inputs in zip(cases, all_inputs, strict=True)]
    first = placed[0]
    with poisoned_memory():
        first.run(backend, spec, planned(backend, first.batch))  # what is made once is made outside of the capture
        plan = backend.capture_plan(first.batch)
        captured = replace(first.batch, plan=plan)
        outputs: list[torch.Tensor] = []
        graph = capture_graph(open_platform(case.device), lambda: outputs.append(first.run(backend, spec, captured)))
        out = outputs[0]
    for each, inputs, source in zip(cases, all_inputs, placed, strict=True):
        for target, tensor in zip(_tensors(first), _tensors(source), strict=True):
            target.view(torch.uint8).copy_(tensor.view(torch.uint8))
        with no_waiting(case.device):
            backend.replay_plan(plan, replace(captured, host=source.batch.host))
            graph.replay()
            graph.replay()  # nothing is left over from a replay
        _compare(out.double().cpu(), reference(each, inputs), each, "replayed from a graph")


def replace_layer(placed: Placed, spec: AttentionSpec) -> Placed:
    """With the captured layer's facts: one layer's spec is one object."""
    if placed.layer is not None:
        placed.layer.spec = spec
    return placed


def _tensors(placed: Placed) -> list[torch.Tensor]:
    """Everything of a placed case that a captured graph reads."""
    batch, weight = placed.batch, [placed.layer.weight] if placed.layer else []
    tensors = [value for value in fields_of(batch).values() if isinstance(value, torch.Tensor)]
    return [placed.q, *placed.step_kv, *weight, *tensors, *batch.kv.layer(0), *batch.kv.scales(0)]


def check_case(make: Callable[[Case], AttentionBackend], case: Case) -> None:
    """Raises AssertionError unless the backend agrees with the reference, and its rows do not touch
    each other."""
    inputs = make_inputs(case)
    backend = make(case)
    expected = reference(case, inputs)
    _compare(compute(backend, case, inputs), expected, case, "against float64")
    starts = case.rows.starts
    decodes = case.rows.num_decodes
    for row in {max(0, decodes - 1), min(decodes, len(starts) - 2)}:  # the last decode, the first extend
        part = slice(int(starts[row]), int(starts[row + 1]))
        alone = compute(backend, case, inputs, only=row)[part]
        _compare(alone, expected[part], case, f"row {row} while all others are NaN")


def _compare(got: torch.Tensor, expected: torch.Tensor, case: Case, what: str) -> None:
    tolerance = TOLERANCE[case.dtype] * max(1.0, case.scores / 4)  # a score's rounding error grows with the score
    require_near(got, expected, f"{what} ({case})", tolerance, is_relative=False)


def suite(subject: Subject) -> Iterator[Check]:
    """`attention/2`: every case that the stated capabilities cover."""
    capabilities, device = subject.record.capabilities, subject.setting.device
    named_cases = list(cases(device, subject.setting.thorough, capabilities))
    if not named_cases:
        return  # the plugin does not run here: nothing can be said

    def make(case: Case, deterministic: bool = False) -> AttentionBackend:
        rows = max(64, len(case.rows.queries))
        context = build_context(device, case.dtype, case.page_size, rows=rows, deterministic=deterministic)
        backend: AttentionBackend = subject.target(context, subject.options)
        return backend

    yield Check("record_states_the_capabilities_of_the_class", partial(_same_capabilities, subject))
    for name, case in named_cases:
        yield Check(name, partial(check_case, make, case))
    yield from step_checks(make, subject)
    yield from call_checks(make, place, subject)
    yield from invariance_checks(partial(make, deterministic=True), place, subject)
    yield from layer_checks(make, place, subject)
    if device.startswith("cuda"):
        for name, case, changes in replays():
            placed = replace(with_pages_for(case, capabilities), device=device)
            if not capabilities.unsupported(requirements(placed, graphs=True)):
                yield Check(f"replayed-{name}", partial(check_replays, make, placed, changes))


def _same_capabilities(subject: Subject) -> None:
    stated, real = subject.record.capabilities, getattr(subject.target, "capabilities", None)
    assert isinstance(stated, AttentionCapabilities), "the record states no AttentionCapabilities"
    assert stated == real, f"the record states {stated}, the class {real}"
