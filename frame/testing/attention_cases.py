"""Forward batches over a plain paged cache, and the cases of the attention conformance suite.

Used by the suite, tests and benchmarks. Batches are those of `InputBatch`, with shuffled pages.
KV slots that no row owns are NaN, so that the result shows whether a backend reads them. Cases are
drawn within a backend's capabilities. Must not know the scheduler or a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionRequirements, AttentionSpec, Phase
from frame.core.interfaces.batch import ForwardBatch, HostView
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.testing.devices import open_platform

FP8_MAX = 448.0  # of e4m3


class PlainKVCache:
    """One layer's cache as bare tensors [pages, page_size, …]
    (`frame.core.interfaces.batch.KVCache`)."""

    def __init__(self, page_size: int, parts: Sequence[torch.Tensor], factors: Sequence[torch.Tensor] = ()) -> None:
        self.page_size = page_size
        self.parts, self.factors = tuple(parts), tuple(factors)

    def store(self, spec: AttentionSpec, slots: torch.Tensor, *tensors: torch.Tensor) -> None:
        for part, factor, tensor in zip(self.parts, self.factors, tensors, strict=False):
            codes, scales = quantize_rows(tensor)
            part.flatten(0, 1)[slots], factor.flatten(0, 1)[slots] = codes, scales
        if self.factors:
            return
        for part, tensor, scale in zip(self.parts, tensors, (spec.k_scale, spec.v_scale)[: len(tensors)], strict=True):
            if part.dtype == torch.float8_e4m3fn:  # nothing indexes fp8: its bytes are written
                stored = (tensor / scale).clamp(-FP8_MAX, FP8_MAX).to(part.dtype)
                part.view(torch.uint8).view(-1, *part.shape[2:])[slots] = stored.view(torch.uint8)
            else:
                part.view(-1, *part.shape[2:])[slots] = tensor.to(part.dtype)

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.parts

    def scales(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.factors


def quantize_rows(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [..., width] and scales float16 [...] of an int8 cache: the largest magnitude of a
    row is 127. The numbers of such codes give the same codes again."""
    scales = (numbers.double().abs().amax(-1) / 127).to(torch.float16).clamp_min(2.0**-24)
    codes = (numbers.double() / scales.double().unsqueeze(-1)).round().clamp(-127, 127)
    return codes.nan_to_num().to(torch.int8), scales


def build_context(device: torch.device | str, dtype: torch.dtype, page_size: int, rows: int = 64, **parts: Any) -> BuildContext:
    """A context of one rank; `parts` are further fields of `BuildContext`."""
    limits = Limits(max_running_requests=rows, max_tokens_per_step=8192, max_context=131072, page_size=page_size)
    return BuildContext(platform=open_platform(device), device=torch.device(device), dtype=dtype, tp=LocalGroup(), limits=limits, **parts)


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
        own = table[slots[row], :count].astype(np.int64)
        positions = np.arange(length)
        places.append(own[positions // page_size] * page_size + positions % page_size)
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


# cases ----------------------------------------------------------------------------------------

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


Changes = tuple[tuple[Rows, tuple[tuple[int, int], ...]], ...]  # rows and groups to replay a captured case for

DECODES = Rows.of([5, 37, 300, 1])
EXTENDS = Rows.of([], [(0, 21), (34, 9), (0, 1), (0, 18)])
MIXED = Rows.of([5, 70], [(0, 21), (34, 9), (60, 1)])
PROMPTS = Rows.of([5], [(40, 300), (0, 270)])  # so many queries that a backend may convert each key once
LATENT: dict[str, Any] = {"rank": 32, "rope": 16, "head_dim": 40, "v_head_dim": 24, "heads": 4}


# cases that differ by dtype in more than the type of their numbers: in the sizes of tiles, or in
# what is converted to what
EACH_DTYPE = (
    *(f"{kind}-{rows}" for kind in ("mha", "mla", "mha-fp8", "mla-fp8") for rows in ("decodes", "extends", "mixed")),
    *("mha-odd-widths", "mha-sinks", "mha-window-extends", "mha-soft-cap", "encoder", "mha-shared-prefix", "mla-shared-prefix"),
    *(f"mha-long-width-{width}" for width in ("64", "128", "256", "192-values-128")),
    *("mla-512-64-pages-of-64", "mla-512-64-many-heads", "mla-512-64-decodes", "mla-256-64"),
)


def cases(device: str, thorough: bool, capabilities: Any) -> Iterator[tuple[str, Case]]:
    """Named cases that the capabilities cover: those of `EACH_DTYPE` in every dtype where there is
    time for it, the others in one."""
    candidates = [*_heads_cases(), *_latent_cases(), *_encoder_cases(), *_shared_cases(), *_fp8_cases(), *_chunked_cases(), *_int8_cases()]
    candidates += [*_sparse_cases(), *_tree_cases()]
    if thorough:
        candidates += [*_large_cases(), *_fuzzed_cases(60)]
    names = [name for name in DTYPES if name in getattr(capabilities, "dtypes", DTYPES)]
    for index, (name, case) in enumerate(candidates):
        one = np.random.default_rng(index).integers(len(names)) if thorough else index % len(names)
        for dtype in names if thorough and name in EACH_DTYPE else [names[one]]:
            found = replace(with_pages_for(case, capabilities), dtype=DTYPES[dtype], device=device, seed=index)
            if not capabilities.unsupported(requirements(found)):
                yield f"{name}-{dtype}", found


def with_pages_for(case: Case, capabilities: Any) -> Case:
    """The case with pages of a size that the backend takes, unless rows have pages in common."""
    sizes = getattr(capabilities, "page_sizes", None)
    return replace(case, page_size=sizes[0]) if sizes and case.page_size not in sizes and not case.groups else case


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
        graphs=graphs,
        phases=phases,
    )


def _chunked_cases() -> Iterator[tuple[str, Case]]:
    yield "mha-chunks", Case(MIXED, window=24, chunked=True, head_dim=64, v_head_dim=64)
    yield "mha-chunks-decodes", Case(DECODES, window=37, chunked=True, head_dim=64, v_head_dim=64)
    yield "mha-chunks-extends", Case(EXTENDS, window=8, chunked=True, sinks=True, head_dim=64, v_head_dim=64)


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
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends")):
        yield f"mha-large-scores-{name}", Case(rows, head_dim=64, v_head_dim=64, scores=40.0)
        yield f"mha-large-products-{name}", Case(rows, head_dim=64, v_head_dim=64, magnitude=4096.0)
    yield "mha-large-scores-sinks", Case(MIXED, sinks=True, head_dim=64, v_head_dim=64, scores=40.0)
    yield "mha-long-rows", Case(Rows.of([3000], [(2500, 33)]), heads=2, kv_heads=1, head_dim=64, v_head_dim=64)
    many = Rows.of([1 + n % 23 for n in range(68)], [(n, 1 + n % 2) for n in range(5)])
    yield "mha-many-rows", Case(many, heads=2, kv_heads=1, head_dim=64, v_head_dim=64)
    yield "mha-sinks-decodes-window", Case(DECODES, sinks=True, window=40, head_dim=64, v_head_dim=64)


def _sparse_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends"), (MIXED, "mixed")):
        yield f"mla-selected-keys-{name}", Case(rows, selected=9, **LATENT)
    yield "mla-selected-keys-pages-of-64", Case(MIXED, selected=40, page_size=64, **LATENT)
    yield "mla-selected-keys-int8", Case(MIXED, selected=40, kv_dtype=torch.int8, **LATENT)


def _tree_cases() -> Iterator[tuple[str, Case]]:
    rows = Rows.of([5, 70], [(34, 9), (0, 21), (60, 4), (300, 17), (7, 2)])
    yield "mha-trees", Case(rows, trees=True, page_size=4)
    yield "mla-trees", Case(rows, trees=True, **LATENT)


def select_positions(case: Case, position: int) -> np.ndarray:
    """The keys that the token at a position attends to in a case of sparse attention: its own, and
    random ones before it."""
    before = np.random.default_rng((case.seed, position)).permutation(position)
    found: np.ndarray = np.concatenate(([position], before[: case.selected - 1]))
    return found


def _latent_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends"), (MIXED, "mixed")):
        yield f"mla-{name}", Case(rows, **LATENT)
    yield "mla-pages-of-1", Case(MIXED, page_size=1, **LATENT)
    yield "mla-pages-of-64", Case(MIXED, page_size=64, **LATENT)
    yield "mla-short-extends-of-long-rows", Case(Rows.of([40], [(250, 2), (200, 3)]), **LATENT)
    yield "mla-large-scores", Case(MIXED, scores=40.0, **LATENT)
    yield "mla-window", Case(MIXED, window=12, **LATENT)
    yield "mla-soft-cap", Case(MIXED, soft_cap=1.5, **LATENT)


SHARED_ROWS = Rows.of([600, 593, 640, 700, 594, 601, 602, 603, 604, 30])
SHARED_GROUPS = ((9, 37),)  # 592 tokens


def _shared_cases() -> Iterator[tuple[str, Case]]:
    """Decodes of rows that have the beginning of their keys in common."""
    yield "mha-shared-prefix", Case(SHARED_ROWS, groups=SHARED_GROUPS)
    yield "mha-shared-prefix-eight-heads-a-key", Case(SHARED_ROWS, groups=SHARED_GROUPS, heads=8, kv_heads=1)
    two = Rows.of([840, 850, 833, 900, 834, 20, 1300, 1025, 1030, 1040, 1026], [(5, 9)])
    yield "mha-two-shared-prefixes", Case(two, groups=((5, 52), (1, 0), (5, 64)), heads=3, kv_heads=1)
    yield "mha-shared-prefix-sinks", Case(SHARED_ROWS, groups=SHARED_GROUPS, sinks=True)
    yield "mha-shared-prefix-window", Case(SHARED_ROWS, groups=SHARED_GROUPS, window=50)
    yield "mha-shared-prefix-soft-cap", Case(SHARED_ROWS, groups=SHARED_GROUPS, soft_cap=1.5)
    yield "mla-shared-prefix", Case(SHARED_ROWS, groups=SHARED_GROUPS, **LATENT)


def _fp8_cases() -> Iterator[tuple[str, Case]]:
    fp8 = torch.float8_e4m3fn
    for rows, name in ((DECODES, "decodes"), (MIXED, "mixed")):
        yield f"mha-fp8-{name}", Case(rows, head_dim=64, v_head_dim=64, kv_dtype=fp8, kv_scales=(2.0, 0.5))
        yield f"mla-fp8-{name}", Case(rows, kv_dtype=fp8, kv_scales=(0.5, 1.0), **LATENT)
    yield "mha-fp8-prompts", Case(PROMPTS, head_dim=64, v_head_dim=32, kv_dtype=fp8, kv_scales=(2.0, 0.5), sinks=True)


def _int8_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (MIXED, "mixed")):
        yield f"mha-int8-{name}", Case(rows, head_dim=64, v_head_dim=64, kv_dtype=torch.int8)
        yield f"mla-int8-{name}", Case(rows, kv_dtype=torch.int8, **LATENT)
    yield "mha-int8-prompts", Case(PROMPTS, head_dim=80, v_head_dim=80, kv_dtype=torch.int8, page_size=5)
    yield "mha-int8-odd-widths", Case(MIXED, head_dim=80, v_head_dim=80, kv_dtype=torch.int8, soft_cap=1.5)


def replays() -> Iterator[tuple[str, Case, Changes]]:
    """Cases to capture, and the rows and groups to replay them for."""
    bf16, few, many = torch.bfloat16, Rows.of([5, 37, 300, 1]), Rows.of([3000, 1, 17, 64])
    heads = Case(few, heads=8, kv_heads=2, head_dim=128, v_head_dim=128, dtype=bf16)
    yield "mha", heads, ((many, ()), (few, ()))
    yield "mha-fp8", replace(heads, kv_dtype=torch.float8_e4m3fn), ((many, ()),)
    yield "mha-window", replace(heads, window=100), ((many, ()),)
    yield "mla", Case(few, dtype=bf16, heads=16, rank=512, rope=64, head_dim=192, v_head_dim=128), ((many, ()), (few, ()))
    one = Rows.of([7])
    yield "mha-one-row", replace(heads, rows=one), ((Rows.of([40_000]), ()), (one, ()))
    shared = replace(heads, rows=SHARED_ROWS)
    longer = Rows.of([length + 1 for length in SHARED_ROWS.lengths.tolist()])
    yield (
        "mha-shared-prefix",
        shared,
        ((SHARED_ROWS, SHARED_GROUPS), (longer, SHARED_GROUPS), (SHARED_ROWS, ()), (longer, ((4, 37), (5, 37)))),
    )
    similar = Rows.of([4200 + row for row in range(64)])
    yield "mha-shared-prefix-64-rows", replace(heads, rows=similar, groups=((64, 256),)), ((similar, ()), (similar, ((30, 256), (34, 250))))


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
    yield "mha-many-long-rows", Case(many, heads=4, kv_heads=1, head_dim=64, v_head_dim=64)
    deepseek: dict[str, Any] = {"heads": 16, "rank": 512, "rope": 64, "head_dim": 192, "v_head_dim": 128}
    for page_size in (1, 64):
        yield f"mla-512-64-pages-of-{page_size}", Case(long, page_size=page_size, **deepseek)
    yield "mla-512-64-decodes", Case(Rows.of([3000, 17, 5000, 1, 64, 65]), page_size=64, **deepseek)
    yield "mla-512-64-decodes-many-heads", Case(Rows.of(list(range(1, 400, 7))), page_size=64, **{**deepseek, "heads": 128})
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
