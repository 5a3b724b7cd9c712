"""Micro-batches of a pipeline: a batch is cut by request slot, and the results are put together
again. Must not know a device or a rank.

A slot is always in the micro-batch `slot % count`, so that the row's next token depends on earlier
micro-batches of the same number alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.batch import ScheduledBatch, StepResult

_BY_TOKEN = ("media_rows", "rotary_positions", "media_spans")  # of rows that extend, the tokens last
_BY_ROW = ("slots", "num_computed", "num_scheduled", "samples", "prompt_logprobs", "skip_kv_store", "num_drafts")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`rows` of a batch, as a batch. `samples` and `sampling_rows`: indices of its samples, and of
    its rows that sample, among those of the whole (see `StepResult`)."""

    number: int
    batch: ScheduledBatch
    rows: np.ndarray
    samples: np.ndarray
    sampling_rows: np.ndarray


def whole_batch(batch: ScheduledBatch, number: int) -> MicroBatch:
    """All rows as one micro-batch."""
    return MicroBatch(number, batch, np.arange(len(batch.slots)), np.arange(count_samples(batch).sum()), np.arange(batch.samples.sum()))


def count_samples(batch: ScheduledBatch) -> np.ndarray:
    """The samples of each row, int64 [rows]."""
    return batch.samples * (1 if batch.num_drafts is None else batch.num_drafts.astype(np.int64) + 1)


def split_batch(batch: ScheduledBatch, count: int) -> list[MicroBatch]:
    """At most `count` micro-batches, of at least one row each; none for a batch without rows. The
    first one has the setups, releases, pages and loaded states of all, the last one the saved
    states."""
    number_of = batch.slots % count
    sample_row = np.repeat(np.arange(len(batch.slots)), count_samples(batch))  # the row of each sample
    place = np.cumsum(batch.samples) - 1  # of each sampling row
    micro_batches: list[MicroBatch] = []
    for number in range(count):
        rows = np.flatnonzero(number_of == number)
        if len(rows):
            samples = np.flatnonzero(np.isin(sample_row, rows))
            rows_batch = _take_rows(batch, rows, samples, is_first=not micro_batches, is_last=not (number_of > number).any())
            micro_batches.append(MicroBatch(number, rows_batch, rows, samples, place[rows][batch.samples[rows]]))
    return micro_batches


def _take_rows(batch: ScheduledBatch, rows: np.ndarray, samples: np.ndarray, *, is_first: bool, is_last: bool) -> ScheduledBatch:
    extends = rows[rows >= batch.num_decodes] - batch.num_decodes
    ends = np.cumsum(batch.num_scheduled[batch.num_decodes :])
    changes: dict[str, Any] = {name: value[rows] for name in _BY_ROW if (value := getattr(batch, name)) is not None}
    changes["num_decodes"] = int((rows < batch.num_decodes).sum())
    chunks = np.split(np.arange(len(batch.token_ids)), ends[:-1]) if len(ends) else []
    tokens = np.concatenate([chunks[row] for row in extends]) if len(extends) else np.empty(0, np.int64)
    changes["token_ids"] = batch.token_ids[tokens]
    changes |= {name: value[..., tokens] for name in _BY_TOKEN if (value := getattr(batch, name)) is not None}
    changes["grammar_mask"] = None if batch.grammar_mask is None else batch.grammar_mask[samples]
    if not is_first:
        changes |= {
            "new_pages": batch.new_pages[:0],
            "setups": [],
            "released": [],
            "adapter_loads": [],
            "encodes": [],
            "group_pages": [],
            "state_loads": None,
        }
    if not is_last:
        changes["state_saves"] = None
    return msgspec.structs.replace(batch, **changes)


def join_results(batch: ScheduledBatch, micro_batches: Sequence[MicroBatch], results: Sequence[StepResult]) -> StepResult:
    """The result of the batch from those of its micro-batches."""
    if len(micro_batches) == 1:
        return results[0]
    total = int(count_samples(batch).sum())
    joined: dict[str, Any] = {"step": batch.step, "token_ids": np.zeros(total, np.int32)}
    prompts: list[Any] = [None] * len(batch.slots)
    states: list[Any] = [None] * len(batch.slots)
    faults: dict[int, str] = {}
    for micro_batch, result in zip(micro_batches, results, strict=True):
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs", "listed_logprobs", "invalid"):
            if (value := getattr(result, name)) is not None:
                joined[name] = _scatter(joined.get(name), value, micro_batch.samples, total)
        if batch.num_drafts is not None:
            counts = np.ones(len(micro_batch.sampling_rows), np.int32) if result.counts is None else result.counts
            joined["counts"] = _scatter(joined.get("counts"), counts, micro_batch.sampling_rows, int(batch.samples.sum()))
        for row, logprobs in zip(micro_batch.rows, result.prompt_logprobs or (), strict=False):
            prompts[row] = logprobs
        for row, each in zip(micro_batch.rows, result.hidden_states or (), strict=False):
            states[row] = each
        faults |= {int(micro_batch.samples[sample]): why for sample, why in (result.faults or {}).items()}
    joined["prompt_logprobs"] = prompts if any(logprobs is not None for logprobs in prompts) else None
    joined["hidden_states"] = states if any(each is not None for each in states) else None
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
