"""Forward batches over a plain paged cache: rows, pages, and `Case`, one batch of one layer.

Used by `frame bench`, the conformance suites and tests. Batches are those of `InputBatch`, with
shuffled pages. KV slots that no row owns are NaN, so that a result shows whether a backend reads
them. Must not know the scheduler or a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionRequirements, AttentionSpec, Phase
from frame.core.interfaces.batch import ForwardBatch, HostView
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.plugins.devices import open_platform

FP8_MAX = 448.0  # of e4m3


class PlainKVCache:
    """One layer's cache as bare tensors [pages, page_size, …]
    (`frame.core.interfaces.batch.KVCache`)."""

    def __init__(self, page_size: int, parts: Sequence[torch.Tensor], factors: Sequence[torch.Tensor] = ()) -> None:
        self.page_size = page_size
        self.parts, self.factors = tuple(parts), tuple(factors)

    def store(self, spec: AttentionSpec, slots: torch.Tensor, *tensors: torch.Tensor) -> None:
        for pool, factor, tensor in zip(self.parts, self.factors, tensors, strict=False):
            quantized, scales = quantize_rows(tensor)
            pool.flatten(0, 1)[slots], factor.flatten(0, 1)[slots] = quantized, scales
        if self.factors:
            return
        for pool, tensor, scale in zip(self.parts, tensors, (spec.k_scale, spec.v_scale)[: len(tensors)], strict=True):
            if pool.dtype == torch.float8_e4m3fn:  # nothing indexes fp8: its bytes are written
                stored = (tensor / scale).clamp(-FP8_MAX, FP8_MAX).to(pool.dtype)
                pool.view(torch.uint8).view(-1, *pool.shape[2:])[slots] = stored.view(torch.uint8)
            else:
                pool.view(-1, *pool.shape[2:])[slots] = tensor.to(pool.dtype)

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.parts

    def scales(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.factors


def quantize_rows(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [..., width] and scales float16 [...] of an int8 cache: the largest magnitude of a
    row is 127. The numbers of such codes give the same codes again."""
    scales = (numbers.double().abs().amax(-1) / 127).to(torch.float16).clamp_min(2.0**-24)
    quantized = (numbers.double() / scales.double().unsqueeze(-1)).round().clamp(-127, 127)
    return quantized.nan_to_num().to(torch.int8), scales


def build_context(device: torch.device | str, dtype: torch.dtype, page_size: int, rows: int = 64, **fields: Any) -> BuildContext:
    """A context of one rank; `parts` are further fields of `BuildContext`."""
    limits = Limits(max_running_requests=rows, max_tokens_per_step=8192, max_context=131072, page_size=page_size)
    return BuildContext(platform=open_platform(device), device=torch.device(device), dtype=dtype, tp=LocalGroup(), limits=limits, **fields)


@dataclass(frozen=True)
class Rows:
    """The rows of a step: `prefixes[r]` tokens are cached before it, `queries[r]` are computed in
    it; decodes come first."""

    prefixes: tuple[int, ...]
    queries: tuple[int, ...]
    num_decodes: int

    @classmethod
    def of(cls, decodes: Sequence[int], extends: Sequence[tuple[int, int]] = ()) -> Rows:
        """`decodes`: lengths with the new token; `extends`: (cached prefix, new tokens)."""
        prefixes = (*(length - 1 for length in decodes), *(prefix for prefix, _ in extends))
        queries = (*(1 for _ in decodes), *(new for _, new in extends))
        return cls(prefixes, queries, len(decodes))

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray(self.prefixes, dtype=np.int64) + np.asarray(self.queries, dtype=np.int64)

    @property
    def starts(self) -> np.ndarray:
        """int64 [rows + 1]: where each row's tokens start among the step's tokens."""
        return np.concatenate(([0], np.cumsum(np.asarray(self.queries, dtype=np.int64))))


@dataclass(frozen=True)
class Pages:
    """Who owns what: `table` int32 [slots, max pages], `slots` int32 [rows], and every token's
    place in the flat cache."""

    page_size: int
    num_pages: int
    table: np.ndarray
    slots: np.ndarray
    places: list[np.ndarray]  # int64 [length] for each row


def lay_out(
    rows: Rows,
    page_size: int,
    rng: np.random.Generator,
    shuffled: bool = True,
    spare_pages: int = 5,
    groups: Sequence[tuple[int, int]] = (),
) -> Pages:
    """Gives every row pages of its own, in any order, at request slots in any order; unused table
    entries are out of range. `groups` of (rows, pages), from the first row on, have their first
    pages in common."""
    lengths = rows.lengths
    counts = -(-lengths // page_size)
    num_pages = int(counts.sum()) + spare_pages
    order = rng.permutation(num_pages) if shuffled else np.arange(num_pages)
    num_slots = len(lengths) + 3
    slots = rng.permutation(num_slots)[: len(lengths)].astype(np.int32)
    table = np.full((num_slots, int(counts.max()) + 2), 2**30, dtype=np.int32)
    places, taken = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = order[taken : taken + count]
        taken += int(count)
        table[slots[row], :count] = pages
        leader, shared = shared_with(groups, row)
        table[slots[row], :shared] = table[slots[leader], :shared]
        row_pages = table[slots[row], :count].astype(np.int64)
        positions = np.arange(length)
        places.append(row_pages[positions // page_size] * page_size + positions % page_size)
    return Pages(page_size, num_pages, table, slots, places)


def shared_with(groups: Sequence[tuple[int, int]], row: int) -> tuple[int, int]:
    """(first row of the group that this row belongs to, pages that it shares); (row, 0) for a row
    of no group."""
    first = 0
    for rows, pages in groups:
        if first <= row < first + rows:
            return first, pages
        first += rows
    return row, 0


def widened(pages: Pages, num_pages: int, columns: int) -> Pages:
    """The same with a cache and a page table of at least these sizes."""
    table = np.full((pages.table.shape[0], max(columns, pages.table.shape[1])), 2**30, dtype=np.int32)
    table[:, : pages.table.shape[1]] = pages.table
    return replace(pages, num_pages=max(num_pages, pages.num_pages), table=table)


def forward_batch(rows: Rows, pages: Pages, kv: PlainKVCache, device: torch.device | str) -> ForwardBatch:
    """The batch of one step. `plan` is still to be made: see `planned`."""
    starts, lengths = rows.starts, rows.lengths
    positions = np.concatenate([np.arange(p, p + q) for p, q in zip(rows.prefixes, rows.queries, strict=True)])
    kv_slots = np.concatenate([place[p:] for place, p in zip(pages.places, rows.prefixes, strict=True)])

    def put(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype=dtype, device=device)

    return ForwardBatch(
        num_decodes=rows.num_decodes,
        token_ids=put(np.zeros(len(positions)), torch.int64),
        positions=put(positions, torch.int64),
        kv_slots=put(kv_slots, torch.int64),
        request_slots=put(pages.slots, torch.int64),
        seq_lens=put(lengths, torch.int32),
        query_lens=put(np.asarray(rows.queries), torch.int32),
        query_starts=put(starts, torch.int32),
        page_table=put(pages.table, torch.int32),
        logits_indices=put(starts[1:] - 1, torch.int64),
        kv=kv,
        host=HostView(
            slots=pages.slots,
            query_lens=np.asarray(rows.queries, dtype=np.int32),
            seq_lens=lengths.astype(np.int32),
            page_table=pages.table,
        ),
    )


def planned(backend: AttentionBackend, batch: ForwardBatch) -> ForwardBatch:
    """The batch with the backend's plan in it."""
    return replace(batch, plan=backend.plan(batch))


class RandomProjections:
    """Latent projections with random weights
    (`frame.core.interfaces.attention.LatentProjections`)."""

    def __init__(self, spec: AttentionSpec, rank: int, nope: int, rope: int, weight: torch.Tensor) -> None:
        """weight [heads, nope + v_head_dim, rank]: how a head's keys and values come of the
        latent."""
        self.spec = spec
        self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim = rank, nope, rope
        self.weight = weight
        self.to_key, self.to_value = weight[:, :nope], weight[:, nope:]

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        return torch.bmm(q_nope.transpose(0, 1), self.to_key).transpose(0, 1)

    def unabsorb(self, out: torch.Tensor) -> torch.Tensor:
        return torch.bmm(out.transpose(0, 1), self.to_value.transpose(1, 2)).transpose(0, 1)

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.cat((self.to_key, self.to_value), dim=1)
        both = (latent @ weight.flatten(0, 1).T).view(latent.shape[0], weight.shape[0], -1)
        return both[..., : self.qk_nope_head_dim], both[..., self.qk_nope_head_dim :]


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_DTYPES = {torch.float8_e4m3fn: "fp8_e4m3", torch.int8: "int8"}


@dataclass(frozen=True)
class Case:
    """One batch and one layer. `rank` > 0 makes it latent attention with `head_dim` = nope +
    `rope`."""

    rows: Rows
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int = 32
    rank: int = 0
    rope: int = 0
    window: int | None = None
    chunked: bool = False  # the window is a chunk
    soft_cap: float | None = None
    sinks: bool = False
    selected: int = 0  # keys that each token attends to (sparse attention); 0: all
    trees: bool = False  # rows after a prefix are of trees of drafted tokens
    spans: bool = False  # tokens of extends are placeholders of images, which attend in both directions
    reads_spans: bool = True  # False: in other layers than this one
    causal: bool = True  # False: an encoder's layer, whose rows have no prefix
    scores: float = 1.3  # standard deviation of the scores before the softmax
    magnitude: float = 1.0  # of the queries; the scale is so much smaller
    groups: tuple[tuple[int, int], ...] = ()  # (rows, pages): rows that have their first pages in common, from the first row on
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # of the cache, if another one
    kv_scales: tuple[float, float] = (1.0, 1.0)  # what its keys and values stand for; powers of two, so that they change no number
    device: str = "cpu"
    seed: int = 0
    shuffled: bool = True


def requirements(case: Case, graphs: bool = False) -> AttentionRequirements:
    """What a case asks of a backend; `graphs`: captured. Of one that computes decodes alone, a case
    without prompts asks no more."""
    has_prompts = len(case.rows.queries) > case.rows.num_decodes
    phases: tuple[Phase, ...] = ("extend", "decode") if has_prompts else ("decode",)
    dtype = str(case.dtype).removeprefix("torch.")
    return AttentionRequirements(
        device=case.device.partition(":")[0],
        compute_capability=open_platform(case.device).compute_capability,
        kind="mla" if case.rank else "mha",
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        latent=(case.rank, case.rope) if case.rank else None,
        dtype=dtype,
        kv_dtype=dtype if case.kv_dtype is None else KV_DTYPES[case.kv_dtype],
        page_size=case.page_size,
        sliding_window=case.window is not None,
        chunked=case.chunked,
        soft_cap=case.soft_cap is not None,
        sinks=case.sinks,
        sparse=case.selected > 0,
        bidirectional=not case.causal,
        tree_mask=case.trees,
        spans=case.spans,
        graphs=graphs,
        phases=phases,
    )
