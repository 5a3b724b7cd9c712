"""Micro-batches of a pipeline: a batch is cut by request slot, and the results are put together
again. Must not know a device or a rank.

A slot is always in the micro-batch `slot % count`, so that the row's next token depends on earlier
micro-batches of the same number alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from frame.core.interfaces.batch import StepResult

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ScheduledBatch

_BY_ROW = ("slots", "num_computed", "num_scheduled", "samples", "prompt_logprobs", "skip_kv_store")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`rows` of a batch, as a batch. `samples`: indices of its samples among those of the whole."""

    number: int
    batch: ScheduledBatch
    rows: np.ndarray
    samples: np.ndarray


def whole_batch(batch: ScheduledBatch, number: int) -> MicroBatch:
    """All rows as one micro-batch."""
    return MicroBatch(number, batch, np.arange(len(batch.slots)), np.arange(int(batch.samples.sum())))


def split_batch(batch: ScheduledBatch, count: int) -> list[MicroBatch]:
    """At most `count` micro-batches, of at least one row each; none for a batch without rows. The
    first one has the setups, releases and pages of all."""
    number_of = batch.slots % count
    place = np.cumsum(batch.samples) - 1  # of each row's sample
    found: list[MicroBatch] = []
    for number in range(count):
        rows = np.flatnonzero(number_of == number)
        if len(rows):
            samples = place[rows][batch.samples[rows]]
            found.append(MicroBatch(number, _take_rows(batch, rows, samples, is_first=not found), rows, samples))
    return found


def _take_rows(batch: ScheduledBatch, rows: np.ndarray, samples: np.ndarray, *, is_first: bool) -> ScheduledBatch:
    extends = rows[rows >= batch.num_decodes] - batch.num_decodes
    ends = np.cumsum(batch.num_scheduled[batch.num_decodes :])
    chunks = np.split(batch.token_ids, ends[:-1]) if len(ends) else []
    changes: dict[str, Any] = {name: value[rows] for name in _BY_ROW if (value := getattr(batch, name)) is not None}
    changes["num_decodes"] = int((rows < batch.num_decodes).sum())
    changes["token_ids"] = np.concatenate([chunks[row] for row in extends]) if len(extends) else batch.token_ids[:0]
    changes["grammar_mask"] = None if batch.grammar_mask is None else batch.grammar_mask[samples]
    if not is_first:
        changes |= {"new_pages": batch.new_pages[:0], "setups": [], "released": []}
    return msgspec.structs.replace(batch, **changes)


def join_results(batch: ScheduledBatch, parts: Sequence[MicroBatch], results: Sequence[StepResult]) -> StepResult:
    """The result of the batch from those of its micro-batches."""
    if len(parts) == 1:
        return results[0]
    total = int(batch.samples.sum())
    joined: dict[str, Any] = {"step": batch.step, "token_ids": np.zeros(total, np.int32)}
    prompts: list[Any] = [None] * len(batch.slots)
    faults: dict[int, str] = {}
    for part, result in zip(parts, results, strict=True):
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs", "invalid"):
            if (value := getattr(result, name)) is not None:
                joined[name] = _scatter(joined.get(name), value, part.samples, total)
        for row, found in zip(part.rows, result.prompt_logprobs or (), strict=False):
            prompts[row] = found
        faults |= {int(part.samples[sample]): why for sample, why in (result.faults or {}).items()}
    joined["prompt_logprobs"] = prompts if any(found is not None for found in prompts) else None
    return StepResult(faults=faults or None, **joined)


def _scatter(into: np.ndarray | None, values: np.ndarray, places: np.ndarray, total: int) -> np.ndarray:
    """Write `values` [n, ...] to `places` of an array of `total` entries, which is made, or made as
    wide as needed; other entries are 0."""
    if into is None:
        into = np.zeros((total, *values.shape[1:]), values.dtype)
    if values.ndim > 1 and values.shape[1] > into.shape[1]:
        into = np.pad(into, ((0, 0), (0, values.shape[1] - into.shape[1])))
    into[(places, slice(values.shape[1])) if values.ndim > 1 else places] = values
    return into
