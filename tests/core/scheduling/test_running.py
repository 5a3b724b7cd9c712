"""`RunningSet`, `RequestTable` and `KVCacheManager` without a scheduler: slots, page-table rows and
deferred releases."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.interfaces.batch import StepResult
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.output_processor import OutputProcessor
from frame.core.scheduling.request import Request, RequestStatus
from frame.core.scheduling.request_slots import FIRST_TOKEN, LOGPROBS, MIN_STOP_WIDTH, TOKEN_BUFFER, RequestTable
from frame.core.scheduling.running import RunningSet, StepRecord
from frame.plugins.prefix_caches.radix import RadixCache
from frame.speculation.draft_scheduler import DraftScheduler
from frame.structured_output.grammar_masks import GrammarCalls
from frame.testing.contexts import EVICTION
from frame.testing.page_allocators import make_allocator
from frame.testing.scheduler_rig import OldestFirst


def running(num_pages: int = 10, slots: int = 2) -> RunningSet:
    table = RequestTable(slots, max_pages=8)
    cache = RadixCache(PrefixCacheContext(2, num_pages, OldestFirst(EVICTION)))
    return RunningSet(table, KVCacheManager(table, cache, make_allocator(num_pages), 2))


def request(index: int, tokens: list[int], stop_ids: tuple[int, ...] = (), params: SamplingParams | None = None) -> Request:
    prompt = np.array(tokens, np.int32)
    admitted = Request(
        rid=str(index),
        prompt=prompt,
        params=params or SamplingParams(),
        seed=0,
        index=index,
        arrival=0.0,
        deadline=9.0,
        max_num_tokens=16,
        stop_ids=stop_ids,
    )
    admitted.tokens = prompt
    return admitted


def added(on: RunningSet, admitted: Request) -> Request:
    on.add_request(admitted, on.kv_manager.lock_prefix(admitted))
    return admitted


def step(on: RunningSet, number: int, slots: list[int]) -> StepRecord:
    a, rows = on.table.arrays, np.array(slots, np.intp)
    a.last_step[rows] = number
    ones = np.ones(len(rows), np.int32)
    record = StepRecord(number, rows, a.epoch[rows], a.num_computed_tokens[rows], ones, ones.astype(np.bool_), len(rows))
    on.in_flight.append(record)
    return record


def test_a_page_table_row_from_start_to_end() -> None:
    on = running()
    admitted = added(on, request(0, [1, 2, 3, 4, 5]))
    kv_manager, a = on.kv_manager, on.table.arrays
    assert kv_manager.grow_row(admitted.slot, 5)
    assert a.num_pages[admitted.slot] == 3
    writes = kv_manager.take_table_writes()
    assert writes[:, :2].tolist() == [[admitted.slot, 0], [admitted.slot, 1], [admitted.slot, 2]]
    assert a.page_table[admitted.slot, :3].tolist() == writes[:, 2].tolist()
    assert not kv_manager.grow_row(admitted.slot, 16 + 8)
    assert len(kv_manager.take_table_writes()) == 0
    assert len(kv_manager.cache_prefill(admitted, 5)) == 0
    assert kv_manager.shared_pages(admitted.slot).tolist() == writes[:2, 2].tolist()
    assert kv_manager.private_pages(admitted.slot).tolist() == writes[2:, 2].tolist()
    kv_manager.repeat_table_writes(np.array([admitted.slot]))
    assert kv_manager.take_table_writes().tolist() == writes.tolist()
    a.num_computed_tokens[admitted.slot] = 5
    on.remove_request(admitted, keep=True, state=RequestStatus.FINISHED)
    assert (kv_manager.cache.num_evictable, kv_manager.allocator.num_free) == (2, 7)
    assert on.take_released() == [0]
    assert on.take_released() == []


def test_allocation_evicts_only_if_enough_pages_can_be_freed() -> None:
    on = running()
    first = added(on, request(0, [1, 2, 3, 4]))
    on.kv_manager.grow_row(first.slot, 4)
    on.table.arrays.num_computed_tokens[first.slot] = 4
    on.remove_request(first, keep=True, state=RequestStatus.FINISHED)
    assert on.kv_manager.num_available == 9
    assert on.kv_manager.allocate_pages(10) is None
    assert on.kv_manager.cache.num_evictable == 2
    assert len(on.kv_manager.allocate_pages(8) if on.kv_manager.num_available else []) == 8
    assert on.kv_manager.cache.num_evictable == 1


def test_pages_and_slots_in_flight_are_freed_at_the_commit() -> None:
    on = running()
    admitted = added(on, request(0, [1, 2, 3, 4]))
    on.kv_manager.grow_row(admitted.slot, 4)
    slot = admitted.slot
    step(on, 7, [slot])
    on.remove_request(admitted, keep=False, state=RequestStatus.FINISHED)
    assert (on.num_deferred_pages, on.num_deferred_slots) == (2, 1)
    assert (on.kv_manager.allocator.num_free, on.table.num_free) == (7, 1)
    with pytest.raises(RuntimeError, match="step 8 is committed out of order: the oldest step in flight is 7"):
        on.begin_commit(8)
    record = on.begin_commit(7)
    on.end_commit(record)
    assert (on.kv_manager.allocator.num_free, on.table.num_free) == (9, 2)
    with pytest.raises(RuntimeError, match="oldest step in flight is none"):
        on.begin_commit(8)


def test_requests_are_kept_in_order_of_arrival() -> None:
    on = running(slots=3)
    for index in (4, 1, 3):
        added(on, request(index, [index]))
    assert [admitted.index for admitted in on.requests] == [1, 3, 4]
    assert [setup.slot for setup in on.take_setups()] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="request slot 1 is empty"):
        on.remove_request(on.requests[0], keep=False, state=RequestStatus.WAITING)
        on.table.get_request(1)


def test_the_table_flushes_tokens_and_widens_for_stop_ids() -> None:
    on = running()
    admitted = added(on, request(0, [1, 2], params=SamplingParams(logprobs=1)))
    a, slots = on.table.arrays, np.array([admitted.slot])
    assert a.special[admitted.slot] == FIRST_TOKEN | LOGPROBS
    for token in range(TOKEN_BUFFER + 3):
        num_committed = on.table.append_tokens(slots, np.array([token], np.int32))
    assert num_committed.tolist() == [TOKEN_BUFFER + 5]
    assert list(admitted.output) == list(range(TOKEN_BUFFER))
    on.table.flush_tokens(admitted.slot)
    assert list(admitted.output) == list(range(TOKEN_BUFFER + 3))
    other = added(on, request(1, [1], stop_ids=tuple(range(MIN_STOP_WIDTH + 2))))
    assert a.stop_ids[other.slot].tolist() == list(range(MIN_STOP_WIDTH + 2))
    assert set(a.stop_ids[admitted.slot].tolist()) == {-1}


def test_a_result_of_the_wrong_size_is_refused() -> None:
    on = running()
    admitted = added(on, request(0, [1, 2]))
    record = step(on, 0, [admitted.slot])
    grammars = GrammarCalls(8)
    processor = OutputProcessor(on, lambda ended, finish, keep: None, lambda: 0.0, grammars, DraftScheduler(on.table, 8, grammars))
    with pytest.raises(RuntimeError, match="step 0 yields 2 tokens for 1 samples"):
        processor.process_step(record, StepResult(step=0, token_ids=np.zeros(2, np.int32)))
