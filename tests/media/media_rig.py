"""`MediaRig`: the scheduler's rig with media. It keeps the device's table and the content of the KV
pages as the orders of the steps leave them, and checks what each token of a chunk reads."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.media import EncodeOrder, MediaItem, PlaceholderRun
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.interfaces.modality import MediaPlan
from frame.media.media_scheduler import MediaScheduler
from frame.testing.fake_runner import DoneStep, LaterStep
from frame.testing.scheduler_rig import Expected, SchedulerRig

FAILED = "the step fails"
Content = tuple[Any, ...]  # of a token: what its keys and values depend on


def make_item(name: str, *runs: PlaceholderRun, modality: str = "image", patches: int | None = None) -> MediaItem:
    count = sum(run.count for run in runs)
    return MediaItem(modality, hashlib.sha256(name.encode()).digest(), list(runs), count if patches is None else patches, "", [])


def positions_of(items: Sequence[MediaItem], length: int) -> np.ndarray:
    """The rotary positions of a prompt, token by token: int64 [3, length]."""
    runs = {run.start: run for item in items for run in item.runs}
    columns: list[tuple[int, int, int]] = []
    next_position = 0
    while len(columns) < length:
        run = runs.get(len(columns))
        if run is None or run.grid == (0, 0, 0):
            columns.append((next_position,) * 3)
            next_position += 1
            continue
        frames, height, width = run.grid
        base = next_position
        for frame in range(frames):
            at = base + int(np.float32(frame) * np.float32(run.frame_step))
            columns += [(at, base + row, base + column) for row in range(height) for column in range(width)]
        next_position = 1 + max(max(column) for column in columns)
    return np.array(columns).T


class MediaRig(SchedulerRig):
    def __init__(self, plan: MediaPlan, config: SchedulerConfig, *args: Any, block: int = 4, **more: Any) -> None:
        self.plan, self.media = plan, MediaScheduler(plan, config.token_budget, block=block, max_context=config.max_context)
        super().__init__(config, *args, media=self.media, **more)
        self.table: dict[int, tuple[bytes, int]] = {}  # by row: digest of its item, and index in it
        self.pages: dict[tuple[int, int], Content] = {}  # by page and offset
        self.fails_next = False
        self.encoded: list[bytes] = []
        self.layers: tuple[bytes, int] | None = None  # of the divided item, digest and layers that the device has computed
        self.num_parts = 0  # steps that computed some layers
        self._failing: set[int] = set()  # steps in flight
        self._wrong: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)  # by step: slot and epoch of rows that must be void
        self._launch, self.runner.launch = self.runner.launch, self.launch  # type: ignore[method-assign]

    def launch(self, batch: ScheduledBatch) -> DoneStep | LaterStep:
        launched = self._launch(batch)
        orders = np.concatenate([np.empty(0, np.int32), *(order.rows for order in batch.encodes)])
        assert len(set(orders.tolist())) == len(orders), "two items of a step get the same row"
        assert not len(orders) or int(orders.max()) < self.plan.table_rows
        parts = [order for order in batch.encodes if order.first_layer or order.stop_layer]
        patches = [order.item.patches for order in batch.encodes if order not in parts]
        assert sum(patches) <= self.plan.encode_budget or len(patches) == 1, f"a step encodes {patches}"
        assert sum(order.first_layer >= 0 for order in parts) <= 1
        is_failing, self.fails_next = self.fails_next, False
        for order in batch.encodes:
            if order in parts and not self._compute_layers(order, is_failing):
                continue
            assert len(order.rows) == order.item.num_rows
            self.encoded.append(order.item.digest)
            for index, row in enumerate(order.rows.tolist()):
                self.table[row] = (b"", -1) if is_failing else (order.item.digest, index)
        if is_failing:
            self._failing.add(batch.step)
        self._read_rows(batch)
        return launched

    def _compute_layers(self, order: EncodeOrder, is_failing: bool) -> bool:
        """-> whether the item is encoded to its end. A step that fails loses what it computes."""
        digest, first = order.item.digest, order.first_layer
        if first < 0:
            self.layers = None
            return False
        assert not first or self.layers in ((digest, first), (b"", -1)), f"layer {first} comes after {self.layers}"
        self.num_parts += 1
        num_layers = self.plan.costs[order.item.modality].num_layers
        assert first < (order.stop_layer or num_layers) <= num_layers
        assert order.item.patches <= self.plan.held_patches or not order.stop_layer
        self.layers = (b"", -1) if is_failing else (digest, order.stop_layer) if order.stop_layer else None
        return not order.stop_layer

    def _read_rows(self, batch: ScheduledBatch) -> None:
        at, table = 0, self.scheduler._running.table
        for row, slot in enumerate(batch.slots.tolist()):
            start, count = int(batch.num_computed[row]), int(batch.num_scheduled[row])
            request = table.get_request(slot)
            expected = self._contents(request.rid, start + count, request.all_tokens())
            problems = self._check_pages(slot, start, expected)
            if row >= batch.num_decodes:
                drafted = 0 if batch.num_drafts is None else int(batch.num_drafts[row])
                if not drafted:
                    problems += self._check_chunk(batch, request.rid, start, slice(at, at + count))
                at += count
            size = self.runner.page_size
            for place in range(start, start + count):
                page = int(self.runner._table[slot, place // size])
                if batch.skip_kv_store is None or not batch.skip_kv_store[row]:
                    is_good = batch.step not in self._failing and not problems
                    self.pages[page, place % size] = expected[place] if is_good else ("bad",)
            self._wrong[batch.step] += [(slot, int(table.arrays.epoch[slot]), problem) for problem in problems]

    def _contents(self, rid: str, end: int, tokens: np.ndarray) -> list[Content]:
        """Of each token, its id, or tenant, digest and row."""
        message = self.requests[rid].message
        contents: list[Content] = [(token,) for token in tokens.tolist()[:end]]
        contents += [("later",)] * (end - len(contents))
        for item in message.media:
            rows = iter(range(item.num_rows))
            for run in item.runs:
                for place, index in zip(range(run.start, run.start + run.count), rows, strict=False):
                    if place < end:
                        contents[place] = (message.namespace, item.digest, index)
        return contents

    def _check_pages(self, slot: int, start: int, expected: list[Content]) -> list[str]:
        size = self.runner.page_size
        for place in range(start):
            stored = self.pages.get((int(self.runner._table[slot, place // size]), place % size))
            if stored != expected[place] and ("later",) not in (stored, expected[place]):
                return [f"position {place} holds {stored}, not {expected[place]}"]
        return []

    def _check_chunk(self, batch: ScheduledBatch, rid: str, start: int, tokens: slice) -> list[str]:
        count, items = tokens.stop - tokens.start, self.requests[rid].message.media
        end, no_rows = start + count, np.full(count, -1, np.int32)
        rows = no_rows if batch.media_rows is None else batch.media_rows[tokens]
        spans = 0 * no_rows if batch.media_spans is None else batch.media_spans[tokens]
        problems, expected_spans = list[str](), 0 * no_rows
        read = [None if row < 0 else self.table.get(row) for row in rows.tolist()]
        expected: list[tuple[bytes, int] | None] = [None] * count
        for item in items:
            index = 0
            for run in item.runs:
                run_end = run.start + run.count
                for place in range(max(start, run.start), min(end, run_end)):
                    expected[place - start] = (item.digest, index + place - run.start)
                    expected_spans[place - start] = run_end
                index += run.count
                assert not self.plan.whole_items or not run.start < end < run_end, "a chunk divides an item"
        if read != expected:
            problems.append(f"{rid} reads {read} at {start}, not {expected}")
        if self.plan.whole_items:
            assert spans.tolist() == expected_spans.tolist()
        if items and self.plan.rotary_positions:
            self._check_positions(batch, rid, start, tokens)
        return problems

    def _check_positions(self, batch: ScheduledBatch, rid: str, start: int, tokens: slice) -> None:
        items, end = self.requests[rid].message.media, start + tokens.stop - tokens.start
        expected = positions_of(items, max(end, items[-1].runs[-1].start + items[-1].runs[-1].count + 1))
        slot = next(r.slot for r in self.scheduler._running.requests if r.rid == rid)
        offset = self.scheduler._running.table.get_request(slot).position_offset
        plain = np.repeat((np.arange(start, end) + offset)[None], 3, axis=0)
        given = plain if batch.rotary_positions is None else batch.rotary_positions[:, tokens]
        assert given.tolist() == expected[:, start:end].tolist(), f"{rid} has other positions from {start} on"

    def commit(self) -> None:
        if not self._in_flight:
            return
        batch, pending = self._in_flight[0]
        epochs = self.scheduler._running.table.arrays.epoch
        for slot, epoch, problem in self._wrong.pop(batch.step, ()):
            is_void = epochs[slot] != epoch or batch.step in self._failing
            assert is_void, problem
        if batch.step not in self._failing:
            super().commit()
            return
        self._in_flight.popleft()
        pending.wait()
        self._failing.discard(batch.step)
        failed = self.scheduler.fail_step(batch, FAILED)
        self._receive(failed.ended)

    def _check_request(self, rid: str, request: Expected) -> None:
        if request.finish is None or request.finish.error != FAILED:
            super()._check_request(rid, request)

    def _check_admission(self, batch: ScheduledBatch | None, has_preempted: bool) -> None:
        """Requests may wait for rows and for encoding."""

    def check(self) -> None:
        super().check()
        table = self.media._table
        assert table.num_available == table.num_blocks, "an item has readers, and no request runs"
        assert self.media._blocked is None
        assert not self.media._orders
        assert self.media._division is None
        assert self.layers is None or self.media._forgotten is not None or self.layers[1] < 0
