"""Random inputs of an attention case, and what attention over them is, in dense float64 arithmetic.

Used by the attention suites and tests. Must not know a backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec
from frame.core.interfaces.batch import ForwardBatch, TreeMask
from frame.core.interfaces.platform import SupportsSynchronisationChecks
from frame.entrypoints.tools.bench.paged_batches import Case, Pages, RandomProjections, lay_out, quantize_rows, shared_with
from frame.plugins.devices import open_platform
from frame.testing.attention.cases import select_positions

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


def no_waiting(device: str) -> AbstractContextManager[object]:
    """Inside, a PyTorch call that makes the host wait for a GPU raises."""
    platform = open_platform(device)
    return platform.check_synchronisation(is_allowed=False) if isinstance(platform, SupportsSynchronisationChecks) else nullcontext()


def make_inputs(case: Case) -> Inputs:
    """Random tensors of the case, rounded to its dtype so that reference and backend start from the
    same numbers."""
    rng = np.random.default_rng(case.seed)
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=generator) * scale
        if dtype != torch.int8:
            return numbers.to(dtype).double()
        quantized, scales = quantize_rows(numbers)
        return quantized * scales.double().unsqueeze(-1)

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
        scale=case.scores / case.magnitude / case.head_dim**0.5,
        sliding_window=case.window,
        chunked=case.chunked,
        soft_cap=case.soft_cap,
        sinks=normal(case.heads).float().to(case.device) if case.sinks else None,
        causal=case.causal,
        spans=case.reads_spans,
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
        queries=[normal(length, case.heads, case.head_dim, scale=case.magnitude) for length in case.rows.queries],
        cached=cached,
        weight=normal(case.heads, case.head_dim - case.rope + case.v_head_dim, case.rank, scale=case.rank**-0.5) if case.rank else None,
        shapes=shapes,
    )


def make_words(case: Case) -> dict[int, list[int]]:
    """The words of `TreeMask.bits` of each row after a prefix: an extend is a random tree, a decode
    a token of one, whose other tokens are in the cache."""
    words, numbers = {}, np.random.default_rng(case.seed)
    for row, (queries, prefix) in enumerate(zip(case.rows.queries, case.rows.prefixes, strict=True)):
        if prefix and row < case.rows.num_decodes:
            words[row] = [-1 - 2 * int(numbers.integers(1 << min(prefix, 20)))]
        elif prefix:
            sees = np.eye(queries, dtype=bool)
            for node in range(1, queries):
                sees[node] |= sees[numbers.integers(node)]
            words[row] = [-1 - sum(1 << (node - other) for other in range(node) if not sees[node, other]) for node in range(queries)]
    return words


def make_tree_mask(case: Case) -> TreeMask:
    row_words = make_words(case)
    words = [word for row, queries in enumerate(case.rows.queries) for word in row_words.get(row, [-1] * queries)]
    return TreeMask(np.array(list(row_words)), torch.tensor(words, dtype=torch.int32, device=case.device))


def make_ends(case: Case) -> list[np.ndarray]:
    """Of each row `MediaSpans.ends` of its queries: an extend has texts and images by turns, of one
    to seven tokens each."""
    numbers, ends = np.random.default_rng(case.seed), []
    for row, (queries, prefix) in enumerate(zip(case.rows.queries, case.rows.prefixes, strict=True)):
        row_ends, start = np.zeros(queries, np.int32), int(numbers.integers(4))
        while row >= case.rows.num_decodes and start < queries:
            stop = min(queries, start + int(numbers.integers(1, 8)))
            row_ends[start:stop] = prefix + stop
            start = stop + int(numbers.integers(3))
        ends.append(row_ends)
    return ends


def reference(case: Case, inputs: Inputs) -> torch.Tensor:
    """Dense attention in float64, row by row -> [tokens, heads, v_head_dim]."""
    spec, outs = inputs.spec, []
    words, ends = make_words(case) if case.trees else {}, make_ends(case) if case.spans and case.reads_spans else []
    for row, (q, cached, prefix) in enumerate(zip(inputs.queries, inputs.cached, case.rows.prefixes, strict=True)):
        q = q.to(case.device)
        k, v = _keys_and_values(case, inputs, tuple(part.to(case.device) for part in cached))
        length, queries = k.shape[0], q.shape[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        at = torch.arange(prefix, prefix + queries, device=case.device)[:, None]
        keys = torch.arange(length, device=case.device)[None]
        last = torch.maximum(at, torch.from_numpy(ends[row]).to(case.device)[:, None] - 1) if ends else at
        hidden = keys > (last if case.causal else length)
        if spec.sliding_window is not None:
            hidden |= (keys < at // spec.sliding_window * spec.sliding_window) if spec.chunked else (keys <= at - spec.sliding_window)
        if case.selected:
            for query in range(queries):
                hidden[query] = True
                hidden[query, select_positions(case, prefix + query)] = False
        for query, word in enumerate(words.get(row, ())):
            hidden[query, [prefix + query - away for away in range(31) if not word >> away & 1]] = True
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
    step_kv: list[torch.Tensor]  # this step's keys and values, or its latents
    batch: ForwardBatch
    layer: RandomProjections | None

    @classmethod
    def of(cls, case: Case, inputs: Inputs, q: torch.Tensor, step_kv: list[torch.Tensor], batch: ForwardBatch) -> Placed:
        """With the projections of a case of latent attention."""
        layer = None
        if inputs.weight is not None:
            weight = inputs.weight.to(device=case.device, dtype=case.dtype)
            layer = RandomProjections(inputs.spec, case.rank, case.head_dim - case.rope, case.rope, weight)
        return cls(q, step_kv, batch, layer)

    def spread(self) -> Placed:
        """The same with keys and values as layers pass them: heads of a wider tensor, whose other
        heads are NaN here. On a CPU queries too, which a fused kernel makes dense on a GPU."""
        q = _in_wider(self.q) if self.q.device.type == "cpu" else self.q
        return replace(self, q=q, step_kv=[_in_wider(part) for part in self.step_kv] if self.layer is None else self.step_kv)

    def read_only(self) -> dict[str, torch.Tensor | np.ndarray]:
        """All that `run` may only read, apart from the cache."""
        batch, host = self.batch, self.batch.host
        weight = {"the projections": self.layer.weight} if self.layer is not None else {}
        device = {name: value for name, value in fields_of(batch).items() if isinstance(value, torch.Tensor)}
        arrays = {f"host.{name}": value for name, value in fields_of(host).items() if value is not None}
        step_kv = {"the latents" if self.layer else ("k", "v")[index]: part for index, part in enumerate(self.step_kv)}
        return {"q": self.q, **step_kv, **weight, **device, **arrays}

    def run(self, backend: AttentionBackend, spec: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        if self.layer is None:
            return backend.run(spec, self.q, self.step_kv[0], self.step_kv[1], batch)
        nope = self.layer.qk_nope_head_dim
        return backend.run_mla(self.layer, self.q[..., :nope], self.q[..., nope:], self.step_kv[0], batch)


def _in_wider(tensor: torch.Tensor) -> torch.Tensor:
    wider = tensor.new_full((tensor.shape[0], tensor.shape[1] + 2, tensor.shape[2]), torch.nan)
    wider[:, 1:-1] = tensor
    return wider[:, 1:-1]


def fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclass_fields(value)}
