"""Warm-up batches with dummy inputs, run before the first request. All their pages are the reserved
page 0.

Sizes cover the cases for which kernels are compiled: number of tokens and rows, with and without
cached keys. Used by the model runners. Must not know a kernel; runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frame.core.interfaces.batch import ScheduledBatch, SlotSetup
from frame.core.interfaces.sampling_params import SamplingParams

if TYPE_CHECKING:
    from frame.core.interfaces.build import Limits

_DECODES = (1, 2, 3)  # rows; compilers specialise on 1
_FEW_PROMPTS = ((1, 5, 0),)  # rows, new tokens per row, cached tokens per row
_PROMPTS = (
    *((rows, 3, 0) for rows in (1, 2, 4, 8, 16, 32, 64)),
    *((1, new, before) for new in (100, 400, 1100) for before in (0, 1500)),
    (2, 1100, 0),
    (3, 40, 1500),
    (1, 4, 1500),
)
_GREEDY = SamplingParams(temperature=0.0)
_PROCESSED = SamplingParams(  # greedy, with every built-in logits processor
    temperature=0.0,
    min_tokens=1,
    frequency_penalty=0.5,
    presence_penalty=0.5,
    repetition_penalty=1.5,
    bad_words_ids=((0,),),
    logit_bias={0: 1.0},
    thinking_token_budget=1,
    thinking_end_id=0,
)


def idle_decodes(padding_slot: int, *, few: bool = False) -> Iterator[ScheduledBatch]:
    """Decodes of a few rows; none samples a token. few: one row alone, where nothing is compiled
    for a number of rows."""
    for rows in _DECODES[:1] if few else _DECODES:
        yield _step(padding_slot, np.zeros(rows, np.int32), np.ones(rows, np.int32), num_decodes=rows)


def idle_prompts(limits: Limits, *, few: bool = False, fresh: bool = False) -> Iterator[ScheduledBatch]:
    """Prompts in slot 0, which has no pages yet, of sizes within the limits. Each samples greedily.

    The first batch uses logits processors; the second takes its slot, which releases their state.
    few: for a device on which kernels are not compiled per size. fresh: without cached tokens.
    """
    yield _prompts(_PROCESSED, 1, 1, 0)
    sizes = [size for size in _list_sizes(limits, _FEW_PROMPTS if few else _PROMPTS) if not (fresh and size[2])]
    if not few or not sizes:
        yield _prompts(_GREEDY, 1, 1, 0)
    for size in sizes:
        yield _prompts(_GREEDY, *size)


def idle_mixed(padding_slot: int, limits: Limits) -> Iterator[ScheduledBatch]:
    """Prompts beside a decode, whose operands backends may lay out as those of the prompt."""
    for rows, new, before in _list_sizes(limits, _PROMPTS):
        if rows == 1 and limits.max_running_requests > 1 and new < limits.max_tokens_per_step:
            yield _step(padding_slot, np.array([0, before], np.int32), np.array([1, new], np.int32), num_decodes=1)


def idle_extends(padding_slot: int, limits: Limits) -> Iterator[ScheduledBatch]:
    """Prompts that sample no token, in the padding slot, which no request uses: they may run while
    requests are served."""
    for rows, new, before in _list_sizes(limits, _PROMPTS):
        yield _step(padding_slot, np.full(rows, before, np.int32), np.full(rows, new, np.int32))


def _list_sizes(limits: Limits, sizes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """The sizes within the limits, with fewer cached tokens where the context is shorter."""
    for rows, new, before in sizes:
        maximum = limits.max_context - new
        if rows <= limits.max_running_requests and rows * new <= limits.max_tokens_per_step and maximum >= min(before, 1):
            yield rows, new, min(before, maximum)


def _prompts(params: SamplingParams, rows: int, new: int, before: int) -> ScheduledBatch:
    setup = SlotSetup(0, params, 0, 1, np.zeros(1, np.int32))
    return _step(0, np.full(rows, before, np.int32), np.full(rows, new, np.int32), setup)


def _step(
    slot: int, computed: np.ndarray, scheduled: np.ndarray, setup: SlotSetup | None = None, *, num_decodes: int = 0
) -> ScheduledBatch:
    rows = len(computed)
    return ScheduledBatch(
        step=-1,
        num_decodes=num_decodes,
        slots=np.full(rows, slot, np.int32),
        num_computed=computed,
        num_scheduled=scheduled,
        token_ids=np.zeros(int(scheduled[num_decodes:].sum()), np.int32),
        samples=np.full(rows, setup is not None, np.bool_),
        new_pages=np.empty((0, 3), np.int32),
        setups=[] if setup is None else [setup],
    )
