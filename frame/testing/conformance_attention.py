"""What every attention backend must satisfy, checked against dense float64 arithmetic.

Cases are drawn within the capabilities that the backend states. Pages are shuffled, everything that no row owns is NaN,
uninitialised memory is NaN, and one row's result must not change when all other rows turn to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionNeeds, AttentionSpec
from frame.testing.attention_batch import Pages, PlainKVCache, RandomProjections, Rows, build_context, forward_batch, lay_out, planned
from frame.testing.conformance import Check, Subject

deterministic: Any = torch.utils.deterministic  # a module with a property, which no type stub knows
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # absolute, for values of variance 1
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One batch and one layer. `rank` > 0 makes it latent attention with `head_dim` = nope + `rope`."""

    rows: Rows
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int = 32
    rank: int = 0
    rope: int = 0
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    causal: bool = True  # False: an encoder's layer, whose rows have no prefix
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    shuffled: bool = True


@dataclass
class Inputs:
    """A case's tensors, in float64 on the host; rows in step order. `layer` is set for latent attention only."""

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
    """Random tensors of the case, rounded to its dtype so that reference and backend start from the same numbers."""
    rng = np.random.default_rng(case.seed)
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(case.dtype).double()

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
    )
    return Inputs(
        spec=spec,
        pages=lay_out(case.rows, case.page_size, rng, case.shuffled),
        queries=[normal(length, case.heads, case.head_dim) for length in case.rows.queries],
        cached=[tuple(normal(int(length), *shape) for shape in shapes) for length in case.rows.lengths],
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


def compute(backend: AttentionBackend, case: Case, inputs: Inputs, only: int | None = None) -> torch.Tensor:
    """The backend's result, float64 on the host. With `only`, all other rows' queries and cache are NaN."""

    def poison(row: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if only in (None, row) else torch.full_like(tensor, torch.nan)

    device, rows, pages = case.device, case.rows, inputs.pages
    parts = []
    for index, shape in enumerate(inputs.shapes):
        part = torch.full((pages.num_pages * case.page_size, *shape), torch.nan, dtype=torch.float64)
        for row, places in enumerate(pages.places):
            part[torch.from_numpy(places)] = poison(row, inputs.cached[row][index])
        parts.append(part.view(pages.num_pages, case.page_size, *shape).to(device=device, dtype=case.dtype))
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
    with poisoned_memory(), no_waiting(device):
        batch = planned(backend, batch)
        if layer is None:
            out = backend.run(inputs.spec, q, own[0], own[1], batch)
        else:
            nope = layer.qk_nope_head_dim
            out = backend.run_mla(layer, q[..., :nope], q[..., nope:], own[0], batch)
    expected = (q.shape[0], case.heads, case.v_head_dim)
    assert tuple(out.shape) == expected, f"the result's shape is {tuple(out.shape)}, not {expected}"
    assert out.dtype == case.dtype, f"the result's dtype is {out.dtype}, not {case.dtype}"
    return out.double().cpu()


def check_case(make: Callable[[Case], AttentionBackend], case: Case) -> None:
    """Raises AssertionError unless the backend agrees with the reference, and its rows do not touch each other."""
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
            pages = replace(inputs.pages, slots=inputs.pages.slots[row : row + 1], places=[inputs.pages.places[row]])
            single = replace(inputs, pages=pages, queries=[inputs.queries[row]], cached=[inputs.cached[row]])
            assert torch.equal(compute(backend, lone, single), whole[part]), f"row {row} has other bits alone than in the batch ({case})"


def _compare(got: torch.Tensor, expected: torch.Tensor, case: Case, what: str) -> None:
    assert torch.isfinite(got).all(), f"{what}: the result is not finite; a slot or a buffer was read that no row owns ({case})"
    tolerance = TOLERANCE[case.dtype]
    error = float((got - expected).abs().max()) if got.numel() else 0.0
    assert error <= tolerance, f"{what}: largest error {error:.2e}, allowed {tolerance:.0e} ({case})"


def suite(subject: Subject) -> Iterator[Check]:
    """`attention/1`: every case that the stated capabilities cover."""
    capabilities, device = subject.record.capabilities, subject.setting.device
    found = list(cases(device, subject.setting.thorough, capabilities))
    if not found:
        return  # the plugin does not run here: nothing can be said

    def make(case: Case) -> AttentionBackend:
        backend: AttentionBackend = subject.target(build_context(device, case.dtype, case.page_size), subject.options)
        return backend

    yield Check("record_states_the_capabilities_of_the_class", partial(_same_capabilities, subject))
    for name, case in found:
        yield Check(name, partial(check_case, make, case))


def _same_capabilities(subject: Subject) -> None:
    stated, real = subject.record.capabilities, getattr(subject.target, "capabilities", None)
    assert isinstance(stated, AttentionCapabilities), "the record states no AttentionCapabilities"
    assert stated == real, f"the record states {stated}, the class {real}"


DECODES = Rows.of([5, 37, 300, 1])
EXTENDS = Rows.of([], [(0, 21), (34, 9), (0, 1), (0, 18)])
MIXED = Rows.of([5, 70], [(0, 21), (34, 9), (60, 1)])
LATENT: dict[str, Any] = {"rank": 32, "rope": 16, "head_dim": 40, "v_head_dim": 24, "heads": 4}


def cases(device: str, thorough: bool, capabilities: Any) -> Iterator[tuple[str, Case]]:
    """Named cases that the capabilities cover."""
    candidates = [*_heads_cases(), *_latent_cases(), *_encoder_cases()]
    if thorough:
        candidates += [*_large_cases(), *_fuzzed_cases(60)]
    names = [name for name in DTYPES if name in getattr(capabilities, "dtypes", DTYPES)]
    for index, (name, case) in enumerate(candidates):
        # all dtypes where there is time for it; otherwise each case in one of them, in turn
        for dtype in names if thorough else [names[index % len(names)]]:
            found = replace(case, dtype=DTYPES[dtype], device=device, seed=index)
            if not capabilities.unsupported(needs(found)):
                yield f"{name}-{dtype}", found


def needs(case: Case) -> AttentionNeeds:
    """What a case asks of a backend."""
    dtype = str(case.dtype).removeprefix("torch.")
    return AttentionNeeds(
        device="cuda" if case.device.startswith("cuda") else case.device,
        compute_capability=torch.cuda.get_device_capability(case.device) if case.device.startswith("cuda") else None,
        kind="mla" if case.rank else "mha",
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        latent=(case.rank, case.rope) if case.rank else None,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=case.page_size,
        sliding_window=case.window is not None,
        soft_cap=case.soft_cap is not None,
        sinks=case.sinks,
        bidirectional=not case.causal,
    )


def _heads_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends"), (MIXED, "mixed")):
        yield f"mha-{name}", Case(rows, head_dim=64, v_head_dim=64)
        yield f"mha-{name}-pages-of-1", Case(rows, page_size=1, head_dim=64, v_head_dim=64)
    yield "mha-pages-of-3", Case(MIXED, page_size=3)
    yield "mha-pages-of-64", Case(MIXED, page_size=64, head_dim=128, v_head_dim=128)
    yield "mha-pages-in-order", Case(MIXED, page_size=16, head_dim=64, v_head_dim=64, shuffled=False)
    yield "mha-one-row", Case(Rows.of([129]), head_dim=64, v_head_dim=64)
    yield "mha-seven-heads-a-key", Case(MIXED, heads=7, kv_heads=1, head_dim=64, v_head_dim=64)
    yield "mha-as-many-keys-as-heads", Case(MIXED, heads=3, kv_heads=3, head_dim=64, v_head_dim=64)
    yield "mha-odd-widths", Case(MIXED, head_dim=80, v_head_dim=80)
    yield "mha-narrow-values", Case(MIXED, head_dim=48, v_head_dim=24)
    yield "mha-wide-values", Case(MIXED, head_dim=24, v_head_dim=40)
    yield "mha-window-decodes", Case(DECODES, window=33, head_dim=64, v_head_dim=64)
    yield "mha-window-extends", Case(EXTENDS, window=8, head_dim=64, v_head_dim=64)
    yield "mha-window-of-one", Case(MIXED, window=1, head_dim=64, v_head_dim=64)
    yield "mha-soft-cap", Case(MIXED, soft_cap=1.5, head_dim=64, v_head_dim=64)
    yield "mha-sinks", Case(MIXED, sinks=True, head_dim=64, v_head_dim=64)
    yield "mha-sinks-decodes-window", Case(DECODES, sinks=True, window=40, head_dim=64, v_head_dim=64)


def _latent_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends"), (MIXED, "mixed")):
        yield f"mla-{name}", Case(rows, **LATENT)
    yield "mla-pages-of-1", Case(MIXED, page_size=1, **LATENT)
    yield "mla-pages-of-64", Case(MIXED, page_size=64, **LATENT)
    yield "mla-short-extends-of-long-rows", Case(Rows.of([40], [(250, 2), (200, 3)]), **LATENT)
    yield "mla-window", Case(MIXED, window=12, **LATENT)
    yield "mla-soft-cap", Case(MIXED, soft_cap=1.5, **LATENT)


def _encoder_cases() -> Iterator[tuple[str, Case]]:
    fresh = Rows.of([], [(0, 21), (0, 1), (0, 9), (0, 130), (0, 21), (0, 131)])
    yield "encoder", Case(fresh, kv_heads=4, causal=False)
    yield "encoder-equal-rows", Case(Rows.of([], [(0, 40)] * 3), kv_heads=4, head_dim=64, v_head_dim=64, causal=False)
    yield "encoder-shared-keys", Case(fresh, heads=6, kv_heads=2, causal=False)
    yield "encoder-soft-cap", Case(fresh, soft_cap=1.5, causal=False)


def _large_cases() -> Iterator[tuple[str, Case]]:
    long = Rows.of([3000, 17, 5000], [(1000, 513), (0, 700), (2047, 65)])
    for width in (64, 128, 256):
        yield f"mha-long-width-{width}", Case(long, heads=8, kv_heads=2, head_dim=width, v_head_dim=width)
    yield "mha-long-width-192-values-128", Case(long, heads=4, kv_heads=4, head_dim=192, v_head_dim=128)
    yield "mha-long-window", Case(long, heads=8, kv_heads=2, head_dim=128, v_head_dim=128, window=700)
    many = Rows.of(list(range(1, 200)), [(n, n % 7 + 1) for n in range(40)])
    yield "mha-many-rows", Case(many, heads=4, kv_heads=1, head_dim=64, v_head_dim=64)
    deepseek: dict[str, Any] = {"heads": 16, "rank": 512, "rope": 64, "head_dim": 192, "v_head_dim": 128}
    for page_size in (1, 64):
        yield f"mla-512-64-pages-of-{page_size}", Case(long, page_size=page_size, **deepseek)
    yield "mla-512-64-many-heads", Case(Rows.of([700, 90], [(50, 40)]), **{**deepseek, "heads": 128})
    yield "mla-256-64", Case(long, heads=8, rank=256, rope=64, head_dim=128, v_head_dim=64)


def _fuzzed_cases(count: int) -> Iterator[tuple[str, Case]]:
    for seed in range(count):
        rng = np.random.default_rng(seed)
        kv_heads, group = int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 4, 5, 8]))
        decodes = [int(n) for n in rng.integers(1, int(rng.choice([20, 600])), int(rng.integers(0, 9)))]
        count_extends = int(rng.integers(not decodes, 6))
        prefixes = rng.integers(0, 300, count_extends) * rng.integers(0, 2, count_extends)
        extends = [(int(prefix), int(rng.integers(1, 150))) for prefix in prefixes]
        shared: dict[str, Any] = {
            "rows": Rows.of(decodes, extends),
            "page_size": int(rng.choice([1, 2, 5, 16, 32, 64, 128])),
            "window": int(rng.integers(1, 200)) if rng.random() < 0.3 else None,
            "soft_cap": float(rng.uniform(1, 30)) if rng.random() < 0.2 else None,
            "sinks": bool(rng.random() < 0.2),
            "shuffled": bool(rng.random() < 0.8),
        }
        widths = [16, 32, 40, 64, 80, 96, 128, 192]
        if seed % 3:
            width = int(rng.choice(widths))
            value = width if rng.random() < 0.7 else int(rng.choice(widths))
            yield f"mha-fuzzed-{seed}", Case(heads=kv_heads * group, kv_heads=kv_heads, head_dim=width, v_head_dim=value, **shared)
        else:
            rope = int(rng.choice([8, 16, 32, 64]))
            nope, value = (int(n) for n in rng.choice([16, 32, 64, 128], 2))
            heads, rank = int(rng.choice([1, 3, 8, 16, 20])), int(rng.choice([32, 64, 96, 128, 256, 512]))
            yield f"mla-fuzzed-{seed}", Case(heads=heads, rank=rank, rope=rope, head_dim=nope + rope, v_head_dim=value, **shared)
