"""`MediaScheduler`: the media of requests in the scheduler, from arrival to their last chunk.

Implements `RequestMedia` for models that place rows of encoders in the prompt. An item has rows
from the first chunk that reads it to the last one; later steps run after these on the same stream,
so that rows may be encoded anew as soon as a later step is scheduled. Must not know a tensor, pages
or the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frame.core.interfaces.media import EncodeOrder
from frame.core.interfaces.step_media import MediaPlan
from frame.core.messages import Finish
from frame.core.scheduling.request import Request
from frame.media.cache_keys import ItemKeys, ItemName, name_item
from frame.media.checks import ItemLimits, check_items
from frame.media.prompt_layout import PromptLayout, lay_out_prompt
from frame.media.row_table import BLOCK, RowTable


@dataclass(frozen=True, slots=True)
class _Blocked:
    """The request that waits longest for rows or for encoding, and what it needs: requests after it
    leave it as much."""

    request: Request
    index: int  # of its item
    blocks: int
    patches: int


class MediaScheduler:
    """`plan`: sizes and what the model needs. `token_budget`: prompt tokens of a step.
    `whole_prompts`: a prompt is computed in one step."""

    def __init__(self, plan: MediaPlan, token_budget: int, *, whole_prompts: bool = False, block: int = BLOCK) -> None:
        self._plan = plan
        self._whole_prompts = whole_prompts
        self._table = RowTable(plan.table_rows, block)
        rows = self._table.num_rows
        self._limits = ItemLimits(
            plan.modalities, rows, token_budget if plan.whole_items else None, rows if whole_prompts else None
        )  # fmt: skip
        self._keys = ItemKeys()
        self._orders: list[EncodeOrder] = []  # of the step being planned
        self._patches = plan.encode_budget  # that this step may still encode
        self._has_rows = False  # the step has chunks with media
        self._blocked: _Blocked | None = None
        self._num_encoded = self._num_reused = 0

    def start_request(self, request: Request) -> Finish | None:
        """See `RequestMedia`, as for all methods."""
        if not request.media:
            return None
        refusal = check_items(request.media, request.prompt_len, self._limits)
        if refusal is not None:
            return refusal
        names = [name_item(request.tenant, item) for item in request.media]
        keys = [self._keys.find_key(name) for name in names]
        layout, request.prompt_keys = lay_out_prompt(
            request.prompt, request.media, names, keys, has_positions=self._plan.rotary_positions, has_spans=self._plan.whole_items
        )
        request.media_layout, request.position_offset = layout, layout.position_offset
        return None

    def may_start(self, request: Request) -> bool:
        return self._blocked is None

    def count_next(self, request: Request, start: int) -> int:
        if not self._plan.whole_items:
            return 0
        return _layout_of(request).find_run(start)[1] - start

    def limit_chunk(self, request: Request, start: int, count: int) -> int:
        layout, end = _layout_of(request), start + count
        if start >= layout.end:
            return count
        if self._plan.whole_items:
            end = max(layout.find_run(end)[0], start)
        blocked = self._blocked if self._blocked is not None and self._blocked.request is not request else None
        blocks = self._table.num_available - (0 if blocked is None else blocked.blocks)
        patches = self._patches - (0 if blocked is None else blocked.patches)
        may_exceed = blocked is None and not self._orders  # an item above the budget is encoded alone
        counted = set[ItemName]()
        for index in layout.find_items(start, end):
            need_blocks, need_patches = self._count_needs(layout, index)
            if layout.names[index] in counted:
                need_blocks = need_patches = 0
            counted.add(layout.names[index])
            if need_blocks > blocks or (need_patches > patches and not may_exceed):
                if self._blocked is None:
                    self._blocked = _Blocked(request, index, need_blocks, min(need_patches, self._plan.encode_budget))
                return max(int(layout.starts[index]) - start, 0)
            blocks, patches = blocks - need_blocks, patches - need_patches
            may_exceed = may_exceed and (self._whole_prompts or not need_patches)
        return end - start

    def _count_needs(self, layout: PromptLayout, index: int) -> tuple[int, int]:
        """What a chunk needs to read an item: blocks that are available now, and patches."""
        item = layout.items[index]
        held = self._table.find_item(layout.names[index])
        if held is None:
            return self._table.count_blocks(item.num_rows), item.patches
        return 0 if held.num_readers else len(held.blocks), 0 if held.is_encoded else item.patches

    def schedule_chunk(self, request: Request, start: int, count: int, step: int) -> None:
        layout = _layout_of(request)
        if start >= layout.end:
            return
        self._has_rows = True
        every = layout.find_items(start, start + count)
        if self._blocked is not None and self._blocked.request is request and self._blocked.index in every:
            self._blocked = None
        for index in every:
            layout.last_read = step
            item = layout.items[index]
            held = layout.held.get(index)
            if held is None:
                held = layout.held[index] = self._table.acquire(layout.names[index], item.num_rows)
                self._num_reused += held.is_encoded
            if not held.is_encoded:
                held.is_encoded = True
                self._orders.append(EncodeOrder(item, held.rows[:-1]))
                self._patches -= item.patches
                self._num_encoded += 1

    def release(self, request: Request) -> None:
        if self._blocked is not None and self._blocked.request is request:
            self._blocked = None
        layout = request.media_layout
        if layout is not None:
            for held in layout.held.values():
                self._table.release(held)
            layout.held.clear()

    def take_inputs(self, chunks: Sequence[tuple[Request, int, int]], num_tokens: int) -> dict[str, Any]:
        if not self._has_rows:
            return {}
        rows = np.full(num_tokens, -1, np.int32)
        spans = np.zeros(num_tokens, np.int32) if self._plan.whole_items else None
        positions = np.zeros((3, num_tokens), np.int32) if self._plan.rotary_positions else None
        at = num_tokens - sum(count for _, _, count in chunks)
        for request, start, count in chunks:
            layout: PromptLayout | None = request.media_layout
            if positions is not None:
                positions[:, at : at + count] = np.arange(start, start + count) + request.position_offset
            if layout is not None and start < layout.end:
                end = min(start + count, layout.end)
                target = slice(at, at + end - start)
                self._place_rows(layout, start, end, rows[target])
                if spans is not None and layout.spans is not None:
                    spans[target] = layout.spans[start:end]
                if positions is not None and layout.positions is not None:
                    positions[:, target] = layout.positions[:, start:end]
            at += count
        orders, self._orders = self._orders, []
        self._patches, self._has_rows = self._plan.encode_budget, False
        has_rows = bool((rows >= 0).any())
        return {
            "encodes": orders,
            "media_rows": rows if has_rows else None,
            "media_spans": spans if has_rows else None,
            "rotary_positions": positions,
        }

    def _place_rows(self, layout: PromptLayout, start: int, end: int, target: np.ndarray) -> None:
        """Fill the rows of a chunk's tokens, and release the items that end in it."""
        for index in layout.find_items(start, end):
            first, last = max(start, int(layout.starts[index])), min(end, int(layout.ends[index]))
            held = layout.held[index]
            target[first - start : last - start] = held.rows[layout.rows[first:last]]
            if last == layout.ends[index]:
                self._table.release(layout.held.pop(index))

    def fail_step(self, step: int, running: Sequence[Request]) -> list[Request]:
        self._table.invalidate()
        return [request for request in running if request.media_layout is not None and request.media_layout.last_read > step]

    def describe_load(self) -> dict[str, Any]:
        return {
            "media_rows": self._table.num_rows,
            "media_used_rows": self._table.num_used_rows,
            "media_encoded": self._num_encoded,
            "media_reused": self._num_reused,
        }


def _layout_of(request: Request) -> PromptLayout:
    layout = request.media_layout
    assert isinstance(layout, PromptLayout), "the request has passed `start_request`"
    return layout
