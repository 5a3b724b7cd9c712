"""Times attention backends on one layer and compares them with the roofline of the machine.

The lower bound (floor) of a batch is the time to read its cached keys and values once or to compute
their products, whichever is longer. Backends come from the registry, batches from the conformance
suites.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.core.errors import ConfigError
from frame.core.interfaces.attention import AttentionSpec
from frame.entrypoints.tools.bench.clock import LARGER_THAN_CACHES, Call, Clock
from frame.entrypoints.tools.bench.paged_batches import (
    Case,
    PlainKVCache,
    RandomProjections,
    Rows,
    build_context,
    forward_batch,
    lay_out,
    requirements,
)
from frame.entrypoints.tools.bench.workload import Span

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.model import ModelConfig
    from frame.core.interfaces.plugin import PluginRecord
    from frame.entrypoints.tools.bench.floors import Ceilings
    from frame.plugins.registry import Registry

SPARE_PAGES = 5
MAX_COPIES = 16  # caches per batch, so that their data exceeds the hardware caches


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer on one rank. rank > 0: latent attention, with `head_dim` = nope +
    `rope`."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rank: int = 0
    rope: int = 0

    @classmethod
    def of(cls, model_config: ModelConfig) -> AttentionShape:
        rank, rope = model_config.latent or (0, 0)
        return cls(model_config.num_heads, model_config.num_kv_heads, model_config.head_dim, model_config.v_head_dim, rank, rope)


@dataclass(frozen=True, slots=True)
class Batch:
    """`rows` requests, each with `context` tokens (drawn uniformly from the range). new: tokens
    that the step computes per row; 0: decode."""

    rows: int
    context: Span
    new: int = 0

    @property
    def name(self) -> str:
        low, high = self.context
        prefix = f"{low - self.new}" + (f"–{high - self.new}" if high > low else "")
        if not self.new:
            return f"decode {self.rows} × {prefix}"
        return f"extend {self.rows} × {self.new}" + ("" if prefix == "0" else f" after {prefix}")

    @property
    def layout(self) -> Rows:
        lengths = np.random.default_rng(self.rows).integers(self.context[0], self.context[1] + 1, self.rows).tolist()
        return Rows.of([], [(length - self.new, self.new) for length in lengths]) if self.new else Rows.of(lengths)


@dataclass(frozen=True, slots=True)
class AttentionBench:
    """The parameters that all batches share."""

    registry: Registry
    shape: AttentionShape
    clock: Clock
    ceilings: Ceilings
    dtype: torch.dtype
    page_size: int = 16

    def rows(self, record: PluginRecord, batches: list[Batch]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Measure each batch. -> (batch, values); `refused` has the reasons if the backend does not
        support the batch."""
        for batch in batches:
            device = str(self.clock.device)
            case = Case(batch.layout, page_size=self.page_size, dtype=self.dtype, device=device, **asdict(self.shape))
            reasons = record.capabilities.unsupported(requirements(case))
            yield batch, {"refused": "; ".join(map(str, reasons))} if reasons else self._measure(record, case)

    @torch.inference_mode()
    def _measure(self, record: PluginRecord, case: Case) -> dict[str, Any]:
        context = build_context(case.device, case.dtype, case.page_size, rows=len(case.rows.queries))
        backend = self.registry.load(record)(context, self.registry.options(record, {}))
        token_bytes = sum(np.prod(shape) for shape in _cached_shapes(case)) * case.dtype.itemsize
        read = int(case.rows.lengths.sum()) * int(token_bytes)
        copies = 1
        if self.clock.device.type == "cuda":
            copies = min(MAX_COPIES, max(1, -(-LARGER_THAN_CACHES // read)))
        batch, plan_seconds = _batch(backend, case, timed_as_graph=self.clock.device.type == "cuda")
        timed = self.clock.time([_call(backend, case, batch) for _ in range(copies)])
        operations = 2 * _pairs(case.rows) * case.heads * (case.head_dim + case.v_head_dim)
        queries = 2 * int(case.rows.starts[-1]) * case.heads * case.head_dim * case.dtype.itemsize
        return figures(timed.seconds, timed.how, read + queries, operations, self.ceilings) | {"plan_us": round(plan_seconds * 1e6, 1)}


def figures(seconds: float, how: str, read: int, operations: float, ceilings: Ceilings) -> dict[str, Any]:
    """The values of one row, with the ratio to the floor for these bytes and operations."""
    floor = ceilings.seconds(read, operations)
    return {
        "microseconds": round(seconds * 1e6, 2),
        "gb_per_s": round(read / seconds / 1e9, 1),
        "tflop_per_s": round(operations / seconds / 1e12, 3),
        "floor_microseconds": round(floor * 1e6, 2),
        "share_of_floor": round(floor / seconds, 3),
        "bound": "memory" if read / ceilings.read > operations / ceilings.operations else "operations",
        "timed": how,
    }


def parse_batches(phases: tuple[str, ...], rows: list[int], contexts: list[Span], new: int | None) -> list[Batch]:
    """All combinations. An extend computes `new` tokens per row, or the whole context if `new` is
    None. Raises ConfigError."""
    shortest = min(low for low, _ in contexts)
    if new is not None and new > shortest:
        raise ConfigError(f"--new {new} is more than the shortest context ({shortest}); the new tokens are the last ones of a context.")
    return [
        Batch(count, context, 0 if phase == "decode" else new or context[0]) for phase in phases for context in contexts for count in rows
    ]


def _cached_shapes(case: Case) -> list[tuple[int, ...]]:
    """The shapes of one token's cached tensors."""
    return [(case.rank + case.rope,)] if case.rank else [(case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim)]


def _pairs(rows: Rows) -> int:
    """The number of (query, key) pairs of a causal batch."""
    lengths, queries = rows.lengths, np.asarray(rows.queries)
    return int((queries * (2 * lengths - queries + 1)).sum()) // 2


def _batch(backend: AttentionBackend, case: Case, timed_as_graph: bool) -> tuple[ForwardBatch, float]:
    """The batch with its plan but without a KV cache, and the seconds that `plan` takes."""
    pages = lay_out(case.rows, case.page_size, np.random.default_rng(0), spare_pages=SPARE_PAGES)
    batch = forward_batch(case.rows, pages, PlainKVCache(case.page_size, []), case.device)
    backend.plan(batch)
    began = time.perf_counter()
    plan = backend.plan(batch)
    seconds = time.perf_counter() - began
    if timed_as_graph and case.rows.num_decodes == len(case.rows.queries) and backend.capabilities.graphs != "none":
        plan = backend.capture_plan(batch)
    return replace(batch, plan=plan), seconds


def _call(backend: AttentionBackend, case: Case, batch: ForwardBatch) -> Call:
    """A call of `run` with a KV cache of its own."""
    tokens = int(case.rows.starts[-1])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=case.device, dtype=case.dtype)

    shapes = _cached_shapes(case)
    num_pages = int((-(-case.rows.lengths // case.page_size)).sum()) + SPARE_PAGES
    kv = PlainKVCache(case.page_size, [normal(num_pages, case.page_size, *shape) for shape in shapes])
    stored = [normal(tokens, *shape) for shape in shapes]
    spec = AttentionSpec(0, case.heads, 1 if case.rank else case.kv_heads, case.head_dim, case.v_head_dim, case.head_dim**-0.5)
    q = normal(tokens, case.heads, case.head_dim)
    batch = replace(batch, kv=kv)
    if not case.rank:
        return lambda: backend.run(spec, q, stored[0], stored[1], batch)
    nope = case.head_dim - case.rope
    layer = RandomProjections(spec, case.rank, nope, case.rope, normal(case.heads, nope + case.v_head_dim, case.rank) * case.rank**-0.5)
    q_nope, q_rope = q[..., :nope].contiguous(), q[..., nope:].contiguous()
    return lambda: backend.run_mla(layer, q_nope, q_rope, stored[0], batch)
