"""`MediaScheduler`: the media of requests in the scheduler, from arrival to their last chunk.

Implements `RequestMedia` for models that place rows of encoders in the prompt. An item has rows
from the first chunk that reads it to the last one; later steps run after these on the same stream,
so that rows may be encoded anew as soon as a later step is scheduled. A large item is encoded by
several steps while tokens are decoded, see `Division`. Must not know a tensor, pages or the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frame.core.interfaces.media import EncodeOrder, MediaItem
from frame.core.messages import Finish
from frame.core.scheduling.request import Request
from frame.core.scheduling.running import StepPlan
from frame.interfaces.modality import MediaPlan
from frame.media.cache_keys import ItemKeys, ItemName, name_item
from frame.media.checks import ItemLimits, check_items, refuse
from frame.media.division import Division, count_left, find_limit, has_decodes
from frame.media.prompt_layout import PromptLayout, lay_out_prompt
from frame.media.row_table import BLOCK, RowTable

_NO_ROWS = np.empty(0, np.int32)


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
    `whole_prompts`: a prompt is computed in one step. `max_context`: positions that the model has;
    None: any number. `note_encoded` is told of each step with
    decodes how many prompt tokens take as long as what it encodes."""

    def __init__(
        self,
        plan: MediaPlan,
        token_budget: int,
        *,
        whole_prompts: bool = False,
        max_context: int | None = None,
        block: int = BLOCK,
        note_encoded: Callable[[float], None] | None = None,
    ) -> None:
        self._plan = plan
        self._whole_prompts = whole_prompts
        self._table = RowTable(plan.table_rows, block)
        rows = self._table.num_rows
        self._limits = ItemLimits(
            plan.modalities, rows, token_budget if plan.whole_items else None, rows if whole_prompts else None, max_context
        )  # fmt: skip
        self._keys = ItemKeys()
        self._orders: list[EncodeOrder] = []  # of the step being planned
        self._patches = 0  # of items that this step encodes whole
        self._division: Division | None = None
        self._forgotten: MediaItem | None = None  # its division has ended early: the ranks forget its layers
        self._note_encoded = note_encoded
        self._has_rows = False  # the step has chunks with media
        self._blocked: _Blocked | None = None
        self._num_encoded = self._num_reused = self._num_divided = 0

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
        return None if self._limits.max_context is None else _bound_positions(request, self._limits.max_context)

    def may_start(self, request: Request) -> bool:
        return self._blocked is None

    def count_next(self, request: Request, start: int) -> int:
        if not self._plan.whole_items:
            return 0
        return _layout_of(request).find_run(start)[1] - start

    def limit_chunk(self, plan: StepPlan, request: Request, start: int, count: int) -> int:
        layout, end = _layout_of(request), start + count
        if start >= layout.end:
            return count
        if self._plan.whole_items:
            end = max(layout.find_run(end)[0], start)
        blocked = self._blocked if self._blocked is not None and self._blocked.request is not request else None
        blocks = self._table.num_available - (0 if blocked is None else blocked.blocks)
        patches, reserved = self._patches, 0 if blocked is None else blocked.patches
        may_exceed = not self._orders  # an item above the budget is encoded alone
        counted = set[ItemName]()
        for index in layout.find_items(start, end):
            need_blocks, need_patches = self._count_needs(layout, index)
            if layout.names[index] in counted:
                need_blocks = need_patches = 0
            counted.add(layout.names[index])
            limit = find_limit(self._plan, layout.items[index].modality, plan)
            is_divided = limit < need_patches <= self._plan.held_patches and has_decodes(plan) and not self._whole_prompts
            is_held = index in layout.held  # what waits for rows waits for this one
            left = limit - patches - (0 if is_held else reserved)
            is_full = need_patches > max(left, 0) and not (may_exceed and (is_held or blocked is None))
            has_rows = need_blocks <= max(blocks, 0)
            if is_divided and has_rows and self._divide(request, index):
                return max(int(layout.starts[index]) - start, 0)
            if not has_rows or is_full or is_divided:
                if self._blocked is None and not (is_divided and has_rows):  # it waits for another one's layers alone
                    self._blocked = _Blocked(request, index, need_blocks, 0 if is_divided else min(need_patches, limit))
                return max(int(layout.starts[index]) - start, 0)
            blocks, patches = blocks - need_blocks, patches + need_patches
            may_exceed = may_exceed and (self._whole_prompts or not need_patches)
        return end - start

    def _divide(self, request: Request, index: int) -> bool:
        """Begin to encode an item by layers. -> False while another one is encoded so; True also
        where it is this one."""
        layout: PromptLayout = request.media_layout
        item, name = layout.items[index], layout.names[index]
        if self._division is not None:
            return self._division.held.name == name
        held = layout.held.get(index)
        if held is None:
            held = layout.held[index] = self._table.acquire(name, item.num_rows)
        self._division = Division(item, held, self._plan.costs[item.modality])
        if self._blocked is not None and self._blocked.request is request and self._blocked.index == index:
            self._blocked = None
        return True

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
        for index in sorted(every, key=lambda index: self._table.find_item(layout.names[index]) is None):  # new ones may take idle rows
            layout.last_read = step
            item = layout.items[index]
            held = layout.held.get(index)
            if held is None:
                held = layout.held[index] = self._table.acquire(layout.names[index], item.num_rows)
                self._num_reused += held.is_encoded
            if not held.is_encoded:
                held.is_encoded = True
                first = 0
                if self._division is not None and self._division.held is held:  # there are no decodes any more
                    first, self._division = self._division.layer, None
                self._orders.append(EncodeOrder(item, held.rows[:-1], first_layer=first))
                self._patches += item.patches
                self._num_encoded += 1

    def release(self, request: Request) -> None:
        if self._blocked is not None and self._blocked.request is request:
            self._blocked = None
        layout = request.media_layout
        if layout is not None:
            for held in layout.held.values():
                self._table.release(held)
            layout.held.clear()
            if self._division is not None and not self._division.held.num_readers:
                self._end_division()

    def _end_division(self) -> None:
        """Nothing reads what the divided item has computed so far."""
        if self._division is not None:
            self._forgotten, self._division = self._division.item, None

    def take_inputs(self, plan: StepPlan, num_tokens: int) -> dict[str, Any]:
        if self._division is None and self._forgotten is None and not self._has_rows:
            return {}
        self._order_layers(plan)
        orders, self._orders, self._patches = self._orders, [], 0
        if not self._has_rows:
            return {"encodes": orders}
        rows = np.full(num_tokens, -1, np.int32)
        spans = np.zeros(num_tokens, np.int32) if self._plan.whole_items else None
        positions = np.zeros((3, num_tokens), np.int32) if self._plan.rotary_positions else None
        at = num_tokens - sum(count for _, _, count in plan.chunks)
        for request, start, count in plan.chunks:
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
        self._has_rows = False
        has_rows = bool((rows >= 0).any())
        return {
            "encodes": orders,
            "media_rows": rows if has_rows else None,
            "media_spans": spans if has_rows else None,
            "rotary_positions": positions,
        }

    def _order_layers(self, plan: StepPlan) -> None:
        """Order the next layers of the divided item, and let ranks forget those of one that has
        ended."""
        encoded = 0.0
        if has_decodes(plan):
            whole = [order.item for order in self._orders if order.item.modality in self._plan.costs]
            encoded = sum(self._plan.costs[item.modality].count_tokens(item.patches) for item in whole)
        division = self._division
        if self._forgotten is not None and (division is None or division.layer):
            self._orders.append(EncodeOrder(self._forgotten, _NO_ROWS, first_layer=-1))
        self._forgotten = None
        if division is not None:
            order, tokens = division.order_layers(count_left(plan, encoded), self._plan.encode_budget)
            self._orders.append(order)
            division.held.last_divided, encoded = plan.step, encoded + tokens
            self._num_divided += division.is_complete
            if division.is_complete:
                division.held.is_encoded, self._division = True, None
                self._num_encoded += 1
        if encoded and self._note_encoded is not None and has_decodes(plan):
            self._note_encoded(encoded)

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
        self._end_division()
        return [request for request in running if request.media_layout is not None and _has_read(request.media_layout, step)]

    def describe_load(self) -> dict[str, Any]:
        return {
            "media_rows": self._table.num_rows,
            "media_used_rows": self._table.num_used_rows,
            "media_encoded": self._num_encoded,
            "media_reused": self._num_reused,
            "media_divided": self._num_divided,
        }


def _has_read(layout: PromptLayout, step: int) -> bool:
    """Whether a later step reads rows of the request, or this one or a later one encoded an item of
    it by layers."""
    return layout.last_read > step or any(held.last_divided >= step for held in layout.held.values())


def _layout_of(request: Request) -> PromptLayout:
    layout = request.media_layout
    assert isinstance(layout, PromptLayout), "the request has passed `start_request`"
    return layout


def _bound_positions(request: Request, max_context: int) -> Finish | None:
    """End the answer after the model's last position: those of a long video are ahead of its
    tokens. -> how the request ends whose prompt has more."""
    if (end := request.prompt_len + request.position_offset) >= max_context:
        return refuse(
            f"the prompt's media take {end} positions by their length and size, and the context holds {max_context} with the answer; send "
            "shorter files"
        )
    request.max_num_tokens = min(request.max_num_tokens, max_context - request.position_offset)
    return None
