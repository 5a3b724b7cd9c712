"""Checks of the capability `batch_invariant` of attention backends: the bits of a token's result,
computed among others, alone, and with its row cut into steps.

The context is `deterministic`. Keys after a token's row are in the cache, as those of another step
would be. Must not know a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend
from frame.core.interfaces.batch import ForwardBatch, HostView, SparseKeys
from frame.entrypoints.tools.bench.paged_batches import DTYPES, Case, Rows, planned, requirements
from frame.testing.attention.cases import DECODES, LATENT, MIXED, with_pages_for
from frame.testing.attention.reference import TOLERANCE, Inputs, Placed, make_inputs, poisoned_memory, reference
from frame.testing.conformance import Check, Subject
from frame.testing.tensors import require_near

Place = Callable[[AttentionBackend, Case, Inputs], Placed]
CASES = {
    "mha-mixed": Case(MIXED, head_dim=64, v_head_dim=64),
    "mha-decodes": Case(DECODES, heads=7, kv_heads=1, head_dim=64, v_head_dim=64),
    "mha-window": Case(MIXED, window=33, sinks=True, head_dim=64, v_head_dim=64),
    "mha-window-long": Case(Rows.of([300], [(200, 40), (120, 30)]), window=70, heads=2, kv_heads=1, head_dim=64, v_head_dim=64),
    "mha-long": Case(Rows.of([2600, 5], [(2300, 9), (0, 21)]), heads=2, kv_heads=1, head_dim=64, v_head_dim=64),
    "mla-mixed": Case(MIXED, **LATENT),
    "mla-selected-keys": Case(MIXED, selected=40, **LATENT),
}
CHUNKS = (1, 7, 64)  # queries of a step
TILE = 16  # rows of a product


def invariance_checks(make: Callable[[Case], AttentionBackend], place: Place, subject: Subject) -> Iterator[Check]:
    """A check for each case that the capabilities cover, in one dtype, or in each where there is
    time for it."""
    capabilities, device = subject.record.capabilities, subject.setting.device
    if not getattr(capabilities, "batch_invariant", False):
        return
    dtypes = [dtype for dtype in getattr(capabilities, "dtypes", ()) if dtype != "float16"]
    for index, (name, case) in enumerate(CASES.items() if dtypes else ()):
        for dtype in dtypes if subject.setting.thorough else dtypes[index % len(dtypes) :][:1]:
            placed = replace(with_pages_for(case, capabilities), dtype=DTYPES[dtype], device=device, seed=index)
            needed = replace(requirements(placed), deterministic=True)
            if not capabilities.unsupported(needed):
                yield Check(f"batch_invariant-{name}-{dtype}", partial(_check, make, place, placed))


def _check(make: Callable[[Case], AttentionBackend], place: Place, case: Case) -> None:
    inputs = make_inputs(case)
    placed = _with_invariant_layer(place(make(case), case, inputs))
    with poisoned_memory():
        whole = _compute(make(case), placed, inputs, placed.batch)
        require_near(whole.double().cpu(), reference(case, inputs), f"against float64 ({case})", TOLERANCE[case.dtype], is_relative=False)
        starts = case.rows.starts
        for row in range(len(starts) - 1):
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            for chunk in CHUNKS if tokens.stop - tokens.start > 1 else CHUNKS[:1]:
                backend = make(case)
                parts = []
                for first in range(tokens.start, tokens.stop, chunk):
                    some = slice(first, min(first + chunk, tokens.stop))
                    part = replace(placed, q=placed.q[some], step_kv=[each[some] for each in placed.step_kv])
                    parts.append(_compute(backend, part, inputs, _cut(placed.batch, row, some, tokens.start)))
                same = torch.equal(torch.cat(parts), whole[tokens])
                assert same, f"row {row} in steps of {chunk} has other bits than among the other rows ({case})"


def _compute(backend: AttentionBackend, placed: Placed, inputs: Inputs, batch: ForwardBatch) -> torch.Tensor:
    return placed.run(backend, inputs.spec, planned(backend, batch))


def _with_invariant_layer(placed: Placed) -> Placed:
    """With latent projections tile by tile, so that a difference is the backend's."""
    if placed.layer is not None:
        for name in ("absorb", "unabsorb"):
            setattr(placed.layer, name, partial(_multiply_tiles, getattr(placed.layer, name)))
    return placed


def _multiply_tiles(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    padded = torch.cat((x, x.new_zeros(-len(x) % TILE, *x.shape[1:])))
    return torch.cat([multiply(tile) for tile in padded.split(TILE)])[: len(x)]


def _cut(batch: ForwardBatch, row: int, tokens: slice, row_start: int) -> ForwardBatch:
    """A step of some tokens of one row, whose first token is `row_start`."""
    host, count = batch.host, tokens.stop - tokens.start
    length = int(host.seq_lens[row] - host.query_lens[row]) + tokens.stop - row_start
    counts, lengths = np.array([count], np.int32), np.array([length], np.int32)
    device = batch.token_ids.device
    chosen = batch.get(SparseKeys)
    return replace(
        batch,
        extensions=batch.extensions if chosen is None else {**batch.extensions, SparseKeys: SparseKeys(chosen.slots[tokens])},
        num_decodes=int(count == 1),
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        kv_slots=batch.kv_slots[tokens],
        request_slots=batch.request_slots[row : row + 1],
        seq_lens=torch.from_numpy(lengths).to(device),
        query_lens=torch.from_numpy(counts).to(device),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        logits_indices=torch.tensor([count - 1], device=device),
        host=HostView(host.slots[row : row + 1], counts, lengths, host.page_table),
    )
