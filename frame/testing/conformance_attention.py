"""What every attention backend must satisfy, checked against dense float64 arithmetic.

Cases are drawn within the capabilities that the backend states. Pages are shuffled, everything that no row owns is NaN,
uninitialised memory is NaN, and one row's result must not change when all other rows turn to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec
from frame.testing.attention_batch import Pages, PlainKVCache, RandomProjections, Rows, forward_batch, lay_out, planned

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
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


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
        k, v = _keys_and_values(case, inputs, cached)
        length, queries = k.shape[0], q.shape[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        at = torch.arange(prefix, prefix + queries)[:, None]
        keys = torch.arange(length)[None]
        hidden = keys > at
        if spec.sliding_window is not None:
            hidden |= keys <= at - spec.sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks.double().cpu()[:, None, None].expand(-1, queries, 1)
            weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


def _keys_and_values(case: Case, inputs: Inputs, cached: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    if inputs.weight is None:
        k, v = cached
        group = case.heads // case.kv_heads
        return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    (latent,) = cached
    both = torch.einsum("nr,hdr->nhd", latent[:, : case.rank], inputs.weight)
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
    with poisoned_memory():
        batch = planned(backend, batch)
        if inputs.weight is None:
            out = backend.run(inputs.spec, q, own[0], own[1], batch)
        else:
            nope = case.head_dim - case.rope
            weight = inputs.weight.to(device=device, dtype=case.dtype)
            layer = RandomProjections(inputs.spec, case.rank, nope, case.rope, weight)
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
    _compare(compute(backend, case, inputs), expected, case, "against float64")
    starts = case.rows.starts
    for row in {0, case.rows.num_decodes, len(starts) - 2}:
        if row < len(starts) - 1:
            part = slice(int(starts[row]), int(starts[row + 1]))
            alone = compute(backend, case, inputs, only=row)
            _compare(alone[part], expected[part], case, f"row {row} while all others are NaN")


def _compare(got: torch.Tensor, expected: torch.Tensor, case: Case, what: str) -> None:
    assert torch.isfinite(got).all(), f"{what}: the result is not finite; a slot or a buffer was read that no row owns ({case})"
    tolerance = TOLERANCE[case.dtype]
    error = float((got - expected).abs().max()) if got.numel() else 0.0
    assert error <= tolerance, f"{what}: largest error {error:.2e}, allowed {tolerance:.0e} ({case})"
