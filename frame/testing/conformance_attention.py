"""What every attention backend must satisfy, checked against dense float64 arithmetic.

Cases are drawn within the capabilities that the backend states. Pages are shuffled, everything that
no row owns is NaN, uninitialised memory is NaN, and one row's result must not change when all other
rows turn to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec
from frame.core.interfaces.batch import ForwardBatch
from frame.testing.attention_cases import (
    Case,
    Changes,
    Pages,
    PlainKVCache,
    RandomProjections,
    Rows,
    build_context,
    cases,
    forward_batch,
    lay_out,
    planned,
    replays,
    requirements,
    shared_with,
    widened,
    with_pages_for,
)
from frame.testing.conformance import Check, Subject

deterministic: Any = torch.utils.deterministic  # a module with a property, which no type stub knows
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # absolute, for values of variance 1


@dataclass
class Inputs:
    """A case's tensors, in float64 on the host; rows in step order. `layer` is set for latent
    attention only."""

    spec: AttentionSpec
    pages: Pages
    queries: list[torch.Tensor]  # [query_len, heads, head_dim]
    cached: list[tuple[torch.Tensor, ...]]  # each [length, …]: (k, v) or (latent,)
    weight: torch.Tensor | None = None
    shapes: tuple[tuple[int, ...], ...] = field(default=())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that PyTorch hands out uninitialised is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Inside, a PyTorch call that makes the host wait for a GPU raises."""
    if not device.startswith("cuda"):
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_inputs(case: Case) -> Inputs:
    """Random tensors of the case, rounded to its dtype so that reference and backend start from the
    same numbers."""
    rng = np.random.default_rng(case.seed)
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).double()

    if case.rank:
        shapes: tuple[tuple[int, ...], ...] = ((case.rank + case.rope,),)
    else:
        shapes = ((case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim))
    spec = AttentionSpec(
        layer=0,
        num_heads=case.heads,
        num_kv_heads=1 if case.rank else case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        scale=1.3 / case.head_dim**0.5,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
        sinks=normal(case.heads).float().to(case.device) if case.sinks else None,
        causal=case.causal,
        k_scale=case.kv_scales[0],
        v_scale=case.kv_scales[1],
    )
    stored = case.kv_dtype or case.dtype
    scaled = list(zip(shapes, case.kv_scales, strict=False))  # a latent has one scale
    cached = [tuple(normal(int(n), *shape, dtype=stored) * scale for shape, scale in scaled) for n in case.rows.lengths]
    for row, parts in enumerate(cached):
        leader, pages = shared_with(case.groups, row)
        for part, shared in zip(parts, cached[leader], strict=True):
            part[: pages * case.page_size] = shared[: pages * case.page_size]
    return Inputs(
        spec=spec,
        pages=lay_out(case.rows, case.page_size, rng, case.shuffled, groups=case.groups),
        queries=[normal(length, case.heads, case.head_dim) for length in case.rows.queries],
        cached=cached,
        weight=normal(case.heads, case.head_dim - case.rope + case.v_head_dim, case.rank, scale=case.rank**-0.5) if case.rank else None,
        shapes=shapes,
    )


def reference(case: Case, inputs: Inputs) -> torch.Tensor:
    """Dense attention in float64, row by row -> [tokens, heads, v_head_dim]."""
    spec, outs = inputs.spec, []
    for q, cached, prefix in zip(inputs.queries, inputs.cached, case.rows.prefixes, strict=True):
        q = q.to(case.device)
        k, v = _keys_and_values(case, inputs, tuple(part.to(case.device) for part in cached))
        length, queries = k.shape[0], q.shape[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        at = torch.arange(prefix, prefix + queries, device=case.device)[:, None]
        keys = torch.arange(length, device=case.device)[None]
        hidden = keys > (at if case.causal else length)
        if spec.sliding_window is not None:
            hidden |= keys <= at - spec.sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks.double()[:, None, None].expand(-1, queries, 1)
            weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).cpu())
    return torch.cat(outs)


def _keys_and_values(case: Case, inputs: Inputs, cached: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    if inputs.weight is None:
        k, v = cached
        group = case.heads // case.kv_heads
        return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    (latent,) = cached
    both = torch.einsum("nr,hdr->nhd", latent[:, : case.rank], inputs.weight.to(case.device))
    nope = case.head_dim - case.rope
    rope = latent[:, None, case.rank :].expand(-1, case.heads, -1)
    return torch.cat((both[..., :nope], rope), dim=-1), both[..., nope:]


@dataclass
class Placed:
    """A case on its device: what `run` is called with."""

    q: torch.Tensor
    own: list[torch.Tensor]  # this step's keys and values, or its latents
    batch: ForwardBatch
    layer: RandomProjections | None

    def run(self, backend: AttentionBackend, spec: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        if self.layer is None:
            return backend.run(spec, self.q, self.own[0], self.own[1], batch)
        nope = self.layer.qk_nope_head_dim
        return backend.run_mla(self.layer, self.q[..., :nope], self.q[..., nope:], self.own[0], batch)


def place(backend: AttentionBackend, case: Case, inputs: Inputs, only: int | None = None) -> Placed:
    """The case's tensors on its device, without a plan. With `only`, all other rows' queries and
    cache are NaN."""

    def poison(row: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if only in (None, row) else torch.full_like(tensor, torch.nan)

    device, rows, pages = case.device, case.rows, inputs.pages
    parts = []
    last = 0 if only is None else only  # what it shares with others stays its own
    order = [*(row for row in range(len(pages.places)) if row != last), last]
    for index, shape in enumerate(inputs.shapes):
        part = torch.full((pages.num_pages * case.page_size, *shape), torch.nan, dtype=torch.float64)
        for row in order:
            part[torch.from_numpy(pages.places[row])] = poison(row, inputs.cached[row][index] / case.kv_scales[index])
        parts.append(part.view(pages.num_pages, case.page_size, *shape).to(dtype=case.kv_dtype or case.dtype).to(device))
    new = [tuple(poison(row, part[prefix:]) for part in inputs.cached[row]) for row, prefix in enumerate(rows.prefixes)]
    q = torch.cat([poison(row, query) for row, query in enumerate(inputs.queries)]).to(device=device, dtype=case.dtype)
    own = [torch.cat(row_parts).to(device=device, dtype=case.dtype) for row_parts in zip(*new, strict=True)]
    kv = PlainKVCache(case.page_size, parts)
    batch = forward_batch(rows, pages, kv, device)
    if backend.capabilities.stores_kv:  # the backend has to write this step's part itself
        for part in parts:
            part.view(-1, *part.shape[2:])[batch.kv_slots] = torch.nan
    layer = None
    if inputs.weight is not None:
        weight = inputs.weight.to(device=device, dtype=case.dtype)
        layer = RandomProjections(inputs.spec, case.rank, case.head_dim - case.rope, case.rope, weight)
    return Placed(q, own, batch, layer)


def compute(backend: AttentionBackend, case: Case, inputs: Inputs, only: int | None = None) -> torch.Tensor:
    """The backend's result, float64 on the host. With `only`, all other rows' queries and cache are
    NaN."""
    placed = place(backend, case, inputs, only)
    with poisoned_memory(), no_waiting(case.device):
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
    found = [make_inputs(each) for each in cases]
    num_pages = max(inputs.pages.num_pages for inputs in found)
    columns = max(inputs.pages.table.shape[1] for inputs in found)
    for inputs in found:
        inputs.pages = widened(inputs.pages, num_pages, columns)
    spec, backend = found[0].spec, make(case)
    placed = [replace_layer(place(backend, each, inputs), spec) for each, inputs in zip(cases, found, strict=True)]
    first = placed[0]
    with poisoned_memory():
        first.run(backend, spec, planned(backend, first.batch))  # what is made once is made outside of the capture
        plan = backend.capture_plan(first.batch)
        captured = replace(first.batch, plan=plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = first.run(backend, spec, captured)
    for each, inputs, source in zip(cases, found, placed, strict=True):
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
    fields = [getattr(batch, field.name) for field in dataclass_fields(batch)]
    return [placed.q, *placed.own, *weight, *(value for value in fields if isinstance(value, torch.Tensor)), *batch.kv.layer(0)]


def check_case(make: Callable[[Case], AttentionBackend], case: Case) -> None:
    """Raises AssertionError unless the backend agrees with the reference, and its rows do not touch
    each other."""
    inputs = make_inputs(case)
    backend = make(case)
    expected = reference(case, inputs)
    whole = compute(backend, case, inputs)
    _compare(whole, expected, case, "against float64")
    starts = case.rows.starts
    decodes = case.rows.num_decodes
    for row in {max(0, decodes - 1), min(decodes, len(starts) - 2)}:  # the last decode, the first extend
        part = slice(int(starts[row]), int(starts[row + 1]))
        alone = compute(backend, case, inputs, only=row)[part]
        _compare(alone, expected[part], case, f"row {row} while all others are NaN")
        if backend.capabilities.batch_invariant:
            lone = replace(case, rows=Rows((case.rows.prefixes[row],), (case.rows.queries[row],), int(row < decodes)))
            lone = replace(lone, groups=())
            pages = replace(inputs.pages, slots=inputs.pages.slots[row : row + 1], places=[inputs.pages.places[row]])
            single = replace(inputs, pages=pages, queries=[inputs.queries[row]], cached=[inputs.cached[row]])
            assert torch.equal(compute(backend, lone, single), whole[part]), f"row {row} has other bits alone than in the batch ({case})"


def _compare(got: torch.Tensor, expected: torch.Tensor, case: Case, what: str) -> None:
    assert torch.isfinite(got).all(), f"{what}: the result is not finite; a slot or a buffer was read that no row owns ({case})"
    tolerance = TOLERANCE[case.dtype]
    error = float((got - expected).abs().max()) if got.numel() else 0.0
    assert error <= tolerance, f"{what}: largest error {error:.2e}, allowed {tolerance:.0e} ({case})"


def suite(subject: Subject) -> Iterator[Check]:
    """`attention/2`: every case that the stated capabilities cover."""
    capabilities, device = subject.record.capabilities, subject.setting.device
    found = list(cases(device, subject.setting.thorough, capabilities))
    if not found:
        return  # the plugin does not run here: nothing can be said

    def make(case: Case) -> AttentionBackend:
        context = build_context(device, case.dtype, case.page_size, rows=max(64, len(case.rows.queries)))
        backend: AttentionBackend = subject.target(context, subject.options)
        return backend

    yield Check("record_states_the_capabilities_of_the_class", partial(_same_capabilities, subject))
    for name, case in found:
        yield Check(name, partial(check_case, make, case))
    if device.startswith("cuda"):
        for name, case, changes in replays():
            placed = replace(with_pages_for(case, capabilities), device=device)
            if not capabilities.unsupported(requirements(placed, graphs=True)):
                yield Check(f"replayed-{name}", partial(check_replays, make, placed, changes))


def _same_capabilities(subject: Subject) -> None:
    stated, real = subject.record.capabilities, getattr(subject.target, "capabilities", None)
    assert isinstance(stated, AttentionCapabilities), "the record states no AttentionCapabilities"
    assert stated == real, f"the record states {stated}, the class {real}"
