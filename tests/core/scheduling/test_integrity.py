"""The self-check finds and repairs leaked pages, locks and slots; running requests are not
affected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.scheduler import Scheduler, SchedulerConfig
from frame.plugins.loader import load_registry
from frame.testing.contexts import SCHEDULING
from frame.testing.scheduler_rig import SchedulerRig

CONFIG = SchedulerConfig(page_size=4, num_pages=40, max_running=4, token_budget=16, max_context=80, vocab_size=50, overlap=True)


def lose_a_page(scheduler: Scheduler) -> None:
    scheduler._running.kv_manager.allocate_pages(3)


def lose_an_unlock(scheduler: Scheduler) -> None:
    cache = scheduler._running.kv_manager.cache
    cache.lock(cache.match(scheduler._running.requests[0].tokens).handle)
    scheduler._running.kv_manager.unlock_prefix(scheduler._running.requests[0])
    handle = cache.match(DONE).handle
    assert handle is not None
    cache.lock(handle)
    scheduler._running.requests[0].handle = cache.match(scheduler._running.requests[0].tokens).handle


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler._running.table._free.pop()


DONE = [9] * 12
FAULTS: dict[str, tuple[Callable[[Scheduler], None], str, str]] = {
    "page": (lose_a_page, "3 pages leaked", "3 leaked pages were reclaimed"),
    "lock": (lose_an_unlock, "locked pages, running requests share", "the locks were reset"),
    "slot": (lose_a_slot, "1 request slots leaked", "1 lost request slots were reclaimed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_repaired(fault: str) -> None:
    cause, found, done = FAULTS[fault]
    registry = load_registry(installed=False)
    rig = SchedulerRig(CONFIG, registry.load(registry.get("scheduling_policy", "fcfs"))(SCHEDULING))
    rig.add(DONE, SamplingParams(max_tokens=2, temperature=0.0))
    while not rig.scheduler.is_idle:
        rig.step()
    for i in range(3):
        rig.add(range(i, i + 14), SamplingParams(max_tokens=30, temperature=0.0))
    for _ in range(6):
        rig.step()
    rig.scheduler.check_integrity()
    assert rig.scheduler.repair_integrity() == []
    cause(rig.scheduler)
    with pytest.raises(RuntimeError, match=found):
        rig.scheduler.check_integrity()
    repairs = rig.scheduler.repair_integrity()
    assert len(repairs) == 1
    assert done in repairs[0]
    rig.run()


def test_a_page_with_two_holders_cannot_be_repaired() -> None:
    registry = load_registry(installed=False)
    rig = SchedulerRig(CONFIG, registry.load(registry.get("scheduling_policy", "fcfs"))(SCHEDULING))
    for i in range(2):
        rig.add(range(i, i + 14), SamplingParams(max_tokens=30, temperature=0.0))
    for _ in range(4):
        rig.step()
    table = rig.scheduler._running.table.arrays
    table.page_table[0, table.num_pages[0] - 1] = table.page_table[1, table.num_pages[1] - 1]
    with pytest.raises(RuntimeError, match="held twice"):
        rig.scheduler.repair_integrity()
