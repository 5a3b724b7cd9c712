"""Checks of the items of a request, before it waits: against its prompt and the scheduler's limits.

Used by `MediaScheduler`. Must not know what runs or waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from frame.core.interfaces.media import MediaItem, PlaceholderRun
from frame.core.messages import Finish

DIGEST_BYTES = 32
MAX_POSITION = 2**30


@dataclass(frozen=True, slots=True)
class ItemLimits:
    """What a request's items must fit in."""

    modalities: tuple[str, ...]
    max_rows: int  # of an item
    max_run: int | None  # placeholders of a run, which a chunk holds together; None: any number
    max_prompt_rows: int | None  # of all items of a prompt, which is computed in one step; None: any number
    max_context: int | None = None  # positions of the prompt and the answer; None: any number


def refuse(sentence: str) -> Finish:
    """How a request ends whose media cannot be served."""
    return Finish("error", error=sentence, code="invalid_request", param="messages")


def check_items(items: Sequence[MediaItem], prompt_len: int, limits: ItemLimits) -> Finish | None:
    """How a request with these items ends; None: they can be served."""
    end = 0
    for number, item in enumerate(items, 1):
        if item.modality not in limits.modalities:
            return refuse(f"the model reads no {item.modality}; it reads {', '.join(limits.modalities)}")
        if len(item.digest) != DIGEST_BYTES or not item.runs or item.patches < 0:
            return refuse(f"media item {number} has no placeholders or no digest of {DIGEST_BYTES} bytes; send the file through the API")
        for run in item.runs:
            if run.start < end or run.count < 1 or run.start + run.count > prompt_len:
                return refuse(f"the placeholders of media item {number} overlap others or lie outside of the prompt")
            if (problem := _check_grid(run)) is not None:
                return refuse(f"media item {number} {problem}")
            end = run.start + run.count
        if item.num_rows > limits.max_rows:
            return refuse(_too_large(f"media item {number}", item.num_rows, limits.max_rows))
        max_run = max(run.count for run in item.runs)
        if limits.max_run is not None and max_run > limits.max_run:
            return refuse(
                f"media item {number} has {max_run} placeholders in one piece, which the model reads in one step, and a step computes "
                f"{limits.max_run} prompt tokens; send a smaller file, or serve with --chunked-prefill-size {max_run}"
            )
    total = sum(item.num_rows for item in items)
    if limits.max_prompt_rows is not None and total > limits.max_prompt_rows:
        return refuse(_too_large("the prompt's media", total, limits.max_prompt_rows))
    return None


def _too_large(what: str, count: int, limit: int) -> str:
    sentence = f"{what} needs {count} rows of the encoders' output, and the table holds {limit}"
    return f"{sentence}; send less, or serve with a larger media.table_rows"


def _check_grid(run: PlaceholderRun) -> str | None:
    frames, height, width = run.grid
    if run.grid == (0, 0, 0):
        return None
    if min(run.grid) < 1 or frames * height * width != run.count:
        return f"has {run.count} placeholders for a grid of {frames} x {height} x {width}"
    if not (math.isfinite(run.frame_step) and 0 <= run.frame_step * frames < MAX_POSITION):
        return f"has a frame step of {run.frame_step:g}"
    return None
