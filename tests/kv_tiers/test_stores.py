"""What is stored late: evicted pages with `write_back`, and the output of running requests."""

from __future__ import annotations

from typing import Any

from frame.core.interfaces.sampling_params import SamplingParams
from tests.kv_tiers.tier_rig import PARAMS, PROMPT, make_rig


def test_write_back_stores_what_is_evicted() -> None:
    """Nothing is stored before; evicted pages are free once they are copied; a tier without room
    drops them."""
    rig = make_rig((), write_policy="write_back", num_pages=33, max_running=1)

    def fill(number: int) -> None:
        rig.add([number, *range(25)], PARAMS)  # 7 pages of 32
        rig.run_until(lambda: rig.scheduler._running.requests == [] and not rig.scheduler._requests)

    for number in range(4):
        fill(number)
    assert not rig.tiers[0].blocks
    rig.mover.is_held = True
    fill(4)
    rig.step()
    transit, _ = rig.controller.list_held_pages()
    assert len(transit)
    allocator = rig.scheduler._running.kv_manager.allocator
    free = allocator.num_free
    assert not rig.tiers[0].blocks
    rig.mover.is_held = False
    rig.run_until(lambda: not rig.controller.is_busy)
    assert allocator.num_free == free + len(transit)
    assert len(rig.tiers[0].blocks) == len(transit)
    dropped = rig.load["tier_dropped_blocks"]  # whose pages were needed before the copies had ended
    rig.tiers[0].max_jobs = 0
    for number in range(5, 9):
        fill(number)
    assert rig.load["tier_dropped_blocks"] > dropped
    assert len(rig.tiers[0].blocks) == len(transit)
    rig.run()


def test_write_back_knows_the_pages_of_a_prompt_that_was_computed_again() -> None:
    """A preempted request gets other pages, which held other blocks before: their notes are of what
    they hold now, or the tier would be given blocks under the keys of others."""
    rig = make_rig((), write_policy="write_back", num_pages=33, max_running=1)
    rig.add([*range(1, 100)], SamplingParams(max_tokens=1, temperature=0.0))  # its blocks have been on most pages
    rig.run_until(lambda: rig.scheduler.is_idle)
    rig.drop_device_cache()
    rid = rig.add([7, *range(60, 90)], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    rig.run_until(lambda: len(rig.requests[rid].got) > 2)
    planner, kv_manager = rig.scheduler._planner, rig.scheduler._running.kv_manager
    planner.preempt(planner._running.requests[-1])
    rig.drop_device_cache()
    rig.run_until(lambda: len(rig.requests[rid].got) > 8)
    request = planner._running.requests[-1]
    chain, pages = rig.controller._keys.extend(request, request.tokens), kv_manager.shared_pages(request.slot).tolist()
    assert len(pages) > 6
    assert [rig.controller._set.noted[page][0] for page in pages] == chain.keys[: len(pages)]
    rig.run()


def test_output_is_stored_in_few_insertions() -> None:
    """Each costs as much as the sequence is long, and leaves a node of the tree."""
    rig = make_rig((), num_pages=400, max_context=1600)
    rid = rig.add(PROMPT, SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True))
    rig.run_until(lambda: len(rig.requests[rid].got) > 1490, 2000)
    cache: Any = rig.scheduler._running.kv_manager.cache
    assert len(list(cache._nodes())) < 120
    assert len(rig.tiers[0].blocks) * 4 > 1400


def test_output_is_stored_beside_a_request_of_earlier_weights() -> None:
    """Of which nothing is stored, however much it has."""
    rig = make_rig((), num_pages=200, max_context=400)
    old = rig.add(PROMPT, SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    rig.run_until(lambda: len(rig.requests[old].got) > 4)
    rig.run_until(lambda: not rig.controller.is_busy)
    rig.scheduler.change_weights(keeps_running=True)
    new = rig.add([1, *PROMPT], SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    stored = len(rig.tiers[0].blocks)
    rig.run_until(lambda: len(rig.requests[new].got) > 80)
    assert len(rig.tiers[0].blocks) - stored > 15
