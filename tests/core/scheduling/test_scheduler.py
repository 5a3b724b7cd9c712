"""Batches, stops, seeds and load counters of the scheduler, and that its state stays bounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.scheduling import SchedulerView
from frame.core.messages import Finish, Generate
from frame.core.scheduling.planner import POLICY_MATCH_WINDOW, POLICY_WINDOW
from frame.core.scheduling.request import Request
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.contexts import EVICTION
from frame.testing.fake_runner import FakeRunner, continuation
from frame.testing.page_allocators import make_allocator
from frame.testing.scheduler_rig import OldestFirst, SchedulerRig
from tests.core.scheduling.small_rig import GREEDY, VOCAB, Recorder, config, params, policy, prompt, rig


@pytest.mark.parametrize("overlap", [False, True])
def test_decodes_come_first_and_prompts_are_cut_to_the_budget(overlap: bool) -> None:
    harness = rig(overlap=overlap, token_budget=10)
    harness.add(prompt(4), params(max_tokens=20))
    harness.step()
    harness.add(prompt(25, 50), params())
    seen = []
    launch = harness.runner.launch
    harness.runner.launch = lambda batch: (seen.append(batch), launch(batch))[1]  # type: ignore[method-assign]
    for _ in range(4):
        harness.step()
    assert [(b.num_decodes, b.num_scheduled.tolist(), b.samples.tolist()) for b in seen] == [
        (1, [1, 10], [True, False]),
        (1, [1, 10], [True, False]),
        (1, [1, 5], [True, True]),
        (2, [1, 1], [True, True]),
    ]
    assert [len(b.token_ids) for b in seen] == [10, 10, 5, 0]
    assert [b.num_computed.tolist() for b in seen][:3] == [[4, 0], [5, 10], [6, 20]]
    harness.run()


def test_overlap_schedules_a_step_before_the_last_is_committed() -> None:
    harness = rig(overlap=True)
    harness.add(prompt(4), params(max_tokens=5))
    batches = []
    for _ in range(2):
        batch = harness.scheduler.schedule_batch(0.0)
        assert batch is not None
        batches.append((batch, harness.runner.launch(batch)))
    assert batches[1][0].num_decodes == 1
    assert len(batches[1][0].token_ids) == 0
    with pytest.raises(RuntimeError, match="commit the oldest first"):
        harness.scheduler.schedule_batch(0.0)
    with pytest.raises(RuntimeError, match="step 1 is committed out of order: the oldest step in flight is 0"):
        harness.scheduler.commit(batches[1][0], batches[1][1].wait())
    for batch, step in batches:
        harness._receive(harness.scheduler.commit(batch, step.wait()))
    harness.run()


def test_without_overlap_only_one_step_is_in_flight() -> None:
    harness = rig()
    harness.add(prompt(4), GREEDY)
    assert harness.scheduler.schedule_batch(0.0) is not None
    with pytest.raises(RuntimeError, match="commit the oldest first"):
        harness.scheduler.schedule_batch(0.0)


def test_under_overlap_only_a_stop_token_wastes_a_row() -> None:
    for stops, rows in ((False, 0), (True, 1)):
        harness = rig(overlap=True)
        whole = continuation(prompt(4), GREEDY, 0, VOCAB, 6)
        stop = {"stop_token_ids": (whole[5],), "ignore_eos": False, "max_tokens": 50} if stops else {"max_tokens": 6}
        assert whole.index(whole[5]) == 5
        harness.add(prompt(4), params(**stop))
        harness.run()
        assert harness.runner.num_tokens == 4 + 5 + rows
        finish = harness.requests["request-0"].finish
        assert finish == (Finish("stop", matched=whole[5]) if stops else Finish("length"))


def test_a_single_slot_is_reused_under_overlap() -> None:
    harness = rig(overlap=True, max_running=1, num_pages=8, max_context=28)
    for i in range(12):
        harness.add(prompt(5 + i % 7, i), params(max_tokens=1 + i % 5, stop_token_ids=tuple(range(0, VOCAB, 5)), ignore_eos=False))
    harness.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_stops(overlap: bool) -> None:
    whole = continuation(prompt(6), GREEDY, 0, VOCAB, 40)
    harness = rig(overlap=overlap, eos_ids=(whole[3],))
    by_eos = harness.add(prompt(6), params(ignore_eos=False, max_tokens=40))
    ignoring = harness.add(prompt(6), params(max_tokens=12))
    late = harness.add(prompt(6), params(ignore_eos=False, max_tokens=12, min_tokens=5))
    stop_ids = (*range(50, 60), whole[1])  # these also end a request that ignores EOS
    bound = harness.add(prompt(6), params(max_tokens=12, stop_token_ids=stop_ids))
    harness.run()
    assert harness.requests[by_eos].got == whole[:4]
    assert harness.requests[by_eos].finish == Finish("stop", matched=whole[3])
    assert harness.requests[ignoring].got == whole[:12]
    assert harness.requests[late].got[:5] == whole[:5]
    assert harness.requests[bound].finish is not None
    assert harness.requests[bound].finish.matched in (whole[1], *range(50, 60))


def test_without_max_tokens_a_request_ends_at_the_context_or_cache_limit() -> None:
    harness = rig(max_context=30)
    first = harness.add(prompt(6), params(max_tokens=None))
    harness.run()
    assert len(harness.requests[first].got) == 24
    harness = rig(num_pages=6)  # 5 pages of 4 tokens, and the last token's K and V are not needed
    first = harness.add(prompt(6), params(max_tokens=None))
    harness.run()
    assert len(harness.requests[first].got) == 15


def test_seeds_derive_from_the_configured_seed() -> None:
    def run(seed: int) -> list[list[int]]:
        scheduler = assemble_scheduler(
            config(seed=seed), RadixCache(PrefixCacheContext(4, 4096, OldestFirst(EVICTION))), make_allocator(65), policy()
        )
        runner = FakeRunner(65, 4, 4, 25, VOCAB)
        for i in range(3):
            assert scheduler.add_request(Generate(rid=str(i), token_ids=prompt(5), params=SamplingParams(max_tokens=4))) is None
        rows: dict[str, list[int]] = {}
        while not scheduler.is_idle:
            batch = scheduler.schedule_batch()
            assert batch is not None
            tokens = scheduler.commit(batch, runner.launch(batch).wait())
            for rid, ids in zip(tokens.rids, tokens.token_ids, strict=True):
                rows.setdefault(rid, []).extend(ids)
        return list(rows.values())

    assert run(1) == run(1) != run(2)
    assert run(1)[0] != run(1)[1]


def test_a_recovered_request_continues_its_output() -> None:
    whole = continuation(prompt(6), params(temperature=1.0), 9, VOCAB, 12)
    harness = rig()
    message = Generate(rid="again", token_ids=prompt(6) + whole[:5], output_len=5, params=params(max_tokens=12, temperature=1.0, seed=9))
    assert harness.scheduler.add_request(message) is None
    got: list[int] = []
    while not harness.scheduler.is_idle:
        batch = harness.scheduler.schedule_batch(0.0)
        assert batch is not None
        assert not batch.setups or batch.setups[0].prompt_len == 6
        tokens = harness.scheduler.commit(batch, harness.runner.launch(batch).wait())
        got += tokens.token_ids[0] if tokens.rids else []
    assert got == whole[5:]
    done = Generate(rid="done", token_ids=prompt(6) + whole, output_len=12, params=params(max_tokens=12))
    assert harness.scheduler.add_request(done) == Finish("length")


def test_policies_see_at_most_a_window_of_the_queue() -> None:
    class Matching(Recorder):
        needs_matches = True

        def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
            assert all(request.match is not None for request in waiting)
            return super().sort_waiting(waiting, view)

    for recorder, maximum in ((Recorder(), POLICY_WINDOW), (Matching(), POLICY_MATCH_WINDOW)):
        harness = SchedulerRig(config(max_running=2, max_queued=1000), recorder)
        for i in range(300):
            harness.add(prompt(3, i), params(max_tokens=1))
        harness.run()
        assert max(recorder.windows) == maximum


def test_state_does_not_grow_with_served_requests() -> None:
    harness = rig(request_timeout=1e9)
    for i in range(400):
        harness.add(prompt(4, i), params(max_tokens=1))
        while not harness.scheduler.is_idle:
            harness.step()
    assert len(harness.scheduler._deadlines) <= 80
    assert not harness.scheduler._requests
    assert not harness.scheduler._queue._levels
    harness.check()


def test_load_counters() -> None:
    harness = rig()
    harness.add(prompt(5), params(max_tokens=3))
    harness.add(prompt(5), params(max_tokens=3))
    assert harness.scheduler.get_load()["waiting"] == 2
    harness.step()
    load = harness.scheduler.get_load()
    assert (load["running"], load["waiting"], load["total_pages"], load["used_pages"]) == (2, 0, 64, 3)
    while not harness.scheduler.is_idle:
        harness.step()
    load = harness.scheduler.get_load()
    assert (load["prompt_tokens"], load["generated_tokens"], load["used_pages"], load["evictable_pages"]) == (10, 6, 0, 1)
