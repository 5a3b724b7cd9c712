"""The scheduler's promises, one by one, with the fake runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from frame.core.allocator import PagedAllocator
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.messages import Finish, Generate
from frame.core.radix_cache import RadixCache
from frame.core.request import NOT_FINITE, QUEUE_FULL, TIMED_OUT, Request
from frame.core.sampling_params import SamplingParams
from frame.core.scheduler import Scheduler, SchedulerConfig
from frame.core.step_planner import MATCH_WINDOW, WINDOW
from frame.plugins.loader import load_registry
from frame.testing.fake_runner import FakeRunner, continuation
from frame.testing.scheduler_rig import OldestFirst, SchedulerRig

REGISTRY = load_registry(installed=False)
VOCAB = 101
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def policy(name: str = "fcfs") -> SchedulingPolicy:
    return REGISTRY.load(REGISTRY.get("scheduling_policy", name))()


def config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "page_size": 4,
        "num_pages": 65,
        "max_running": 4,
        "token_budget": 32,
        "max_context": 100,
        "vocab_size": VOCAB,
        "eos_ids": (2,),
        "growth_reserve": 0,
    }
    return SchedulerConfig(**{**values, **changes})


def rig(name: str = "fcfs", **changes: Any) -> SchedulerRig:
    return SchedulerRig(config(**changes), policy(name))


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **changes})


def prompt(length: int, start: int = 10) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(length)]


# batching -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_decodes_come_first_and_prompts_are_cut_to_the_budget(overlap: bool) -> None:
    scheduler = rig(overlap=overlap, token_budget=10)
    scheduler.add(prompt(4), params(max_tokens=20))
    scheduler.step()
    scheduler.add(prompt(25, 50), params())
    seen = []
    launch = scheduler.runner.launch
    scheduler.runner.launch = lambda batch: (seen.append(batch), launch(batch))[1]  # type: ignore[method-assign]
    for _ in range(4):
        scheduler.step()
    assert [(b.num_decodes, b.num_scheduled.tolist(), b.samples.tolist()) for b in seen] == [
        (1, [1, 10], [True, False]),
        (1, [1, 10], [True, False]),
        (1, [1, 5], [True, True]),
        (2, [1, 1], [True, True]),
    ]
    assert [len(b.token_ids) for b in seen] == [10, 10, 5, 0]
    assert [b.num_computed.tolist() for b in seen][:3] == [[4, 0], [5, 10], [6, 20]]
    scheduler.run()


def test_overlap_builds_the_next_step_before_the_last_is_committed() -> None:
    made = rig(overlap=True)
    made.add(prompt(4), params(max_tokens=5))
    batches = []
    for _ in range(2):
        batch = made.scheduler.next_batch(0.0)
        assert batch is not None
        batches.append((batch, made.runner.launch(batch)))
    assert batches[1][0].num_decodes == 1
    assert len(batches[1][0].token_ids) == 0
    with pytest.raises(RuntimeError, match="commit the oldest first"):
        made.scheduler.next_batch(0.0)
    with pytest.raises(RuntimeError, match="step 1 is committed out of order: the oldest step in flight is 0"):
        made.scheduler.commit(batches[1][0], batches[1][1].wait())
    for batch, step in batches:
        made._receive(made.scheduler.commit(batch, step.wait()))
    made.run()


def test_without_overlap_only_one_step_is_in_flight() -> None:
    made = rig()
    made.add(prompt(4), GREEDY)
    assert made.scheduler.next_batch(0.0) is not None
    with pytest.raises(RuntimeError, match="commit the oldest first"):
        made.scheduler.next_batch(0.0)


def test_a_length_stop_wastes_no_row_and_an_eos_stop_wastes_one() -> None:
    for stops, rows in ((False, 0), (True, 1)):
        made = rig(overlap=True)
        whole = continuation(prompt(4), GREEDY, 0, VOCAB, 6)
        stop = {"stop_token_ids": (whole[5],), "ignore_eos": False, "max_tokens": 50} if stops else {"max_tokens": 6}
        assert whole.index(whole[5]) == 5
        made.add(prompt(4), params(**stop))
        made.run()
        assert made.runner.num_tokens == 4 + 5 + rows
        finish = made.requests["request-0"].finish
        assert finish == (Finish("stop", matched=whole[5]) if stops else Finish("length"))


def test_one_slot_is_used_again_and_again_under_overlap() -> None:
    made = rig(overlap=True, max_running=1, num_pages=8, max_context=28)
    for i in range(12):
        made.add(prompt(5 + i % 7, i), params(max_tokens=1 + i % 5, stop_token_ids=tuple(range(0, VOCAB, 5)), ignore_eos=False))
    made.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_stops(overlap: bool) -> None:
    whole = continuation(prompt(6), GREEDY, 0, VOCAB, 40)
    made = rig(overlap=overlap, eos_ids=(whole[3],))
    by_eos = made.add(prompt(6), params(ignore_eos=False, max_tokens=40))
    ignoring = made.add(prompt(6), params(max_tokens=12))
    late = made.add(prompt(6), params(ignore_eos=False, max_tokens=12, min_tokens=5))
    own = made.add(prompt(6), params(max_tokens=12, stop_token_ids=(*range(50, 60), whole[1])))  # they hold where EOS is ignored
    made.run()
    assert made.requests[by_eos].got == whole[:4]
    assert made.requests[by_eos].finish == Finish("stop", matched=whole[3])
    assert made.requests[ignoring].got == whole[:12]
    assert made.requests[late].got[:5] == whole[:5]
    assert made.requests[own].finish is not None
    assert made.requests[own].finish.matched in (whole[1], *range(50, 60))


def test_no_max_tokens_means_up_to_the_end_of_context_or_cache() -> None:
    made = rig(max_context=30)
    first = made.add(prompt(6), params(max_tokens=None))
    made.run()
    assert len(made.requests[first].got) == 24
    made = rig(num_pages=6)  # 5 pages of 4 tokens, and the last token's K and V are not needed
    first = made.add(prompt(6), params(max_tokens=None))
    made.run()
    assert len(made.requests[first].got) == 15


def test_seeds_are_drawn_from_the_configured_one() -> None:
    def run(seed: int) -> list[list[int]]:
        made = Scheduler(config(seed=seed), RadixCache(4, OldestFirst()), PagedAllocator(65), policy())
        runner = FakeRunner(65, 4, 4, 25, VOCAB)
        for i in range(3):
            assert made.add(Generate(rid=str(i), token_ids=prompt(5), params=SamplingParams(max_tokens=4))) is None
        rows: dict[str, list[int]] = {}
        while not made.is_idle:
            batch = made.next_batch()
            assert batch is not None
            tokens = made.commit(batch, runner.launch(batch).wait())
            for rid, ids in zip(tokens.rids, tokens.token_ids, strict=True):
                rows.setdefault(rid, []).extend(ids)
        return list(rows.values())

    assert run(1) == run(1) != run(2)
    assert run(1)[0] != run(1)[1]


def test_a_readmitted_request_goes_on_where_it_was() -> None:
    whole = continuation(prompt(6), params(temperature=1.0), 9, VOCAB, 12)
    made = rig()
    message = Generate(rid="again", token_ids=prompt(6) + whole[:5], output_len=5, params=params(max_tokens=12, temperature=1.0, seed=9))
    assert made.scheduler.add(message) is None
    got: list[int] = []
    while not made.scheduler.is_idle:
        batch = made.scheduler.next_batch(0.0)
        assert batch is not None
        assert not batch.setups or batch.setups[0].prompt_len == 6
        tokens = made.scheduler.commit(batch, made.runner.launch(batch).wait())
        got += tokens.token_ids[0] if tokens.rids else []
    assert got == whole[5:]
    done = Generate(rid="done", token_ids=prompt(6) + whole, output_len=12, params=params(max_tokens=12))
    assert made.scheduler.add(done) == Finish("length")


# the prefix cache -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_siblings_find_a_prefix_while_it_runs(overlap: bool) -> None:
    made = rig(overlap=overlap)
    first = made.add(prompt(21), params(max_tokens=30))
    for _ in range(3):
        made.step()
    sibling = made.add(prompt(21), GREEDY)
    for _ in range(3):
        made.step()
    assert made.requests[first].finish is None
    assert made.requests[sibling].cached == 20
    made.run()


def test_the_answer_is_cached_too_and_the_last_token_is_always_computed() -> None:
    made = rig()
    first = made.add(prompt(9), params(max_tokens=8))
    while not made.scheduler.is_idle:
        made.step()
    turn = made.add(prompt(9) + made.requests[first].got, GREEDY)
    whole = made.add(prompt(8), GREEDY)
    elsewhere = made.add(prompt(9), GREEDY, namespace="another tenant")
    while not made.scheduler.is_idle:
        made.step()
    assert made.requests[turn].cached == 16  # 17 tokens, 16 of them computed
    assert made.requests[whole].cached == 4  # 8 are cached, but one token must be computed and pages are whole
    assert made.requests[elsewhere].cached == 0
    assert made.scheduler.load()["cached_tokens"] == 20
    made.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_twins_that_start_together_end_up_sharing_pages(overlap: bool) -> None:
    made = rig(overlap=overlap, token_budget=64)
    for _ in range(2):
        made.add(prompt(16), params(max_tokens=12))
    for _ in range(4):
        made.step()
    # 4 pages of prompt once, and a private page each
    assert made.scheduler.load()["used_pages"] == 6
    made.run()


def test_flush_keeps_what_is_in_use() -> None:
    made = rig()
    for start in (10, 50):
        made.add(prompt(16, start), params(max_tokens=1))
    while not made.scheduler.is_idle:
        made.step()
    running = made.add(prompt(16), params(max_tokens=9))
    made.step()
    assert made.scheduler.flush_cache() == 4  # the prompt that nobody uses; the other's 4 pages are locked
    made.run()
    assert made.requests[running].cached == 12


# memory ---------------------------------------------------------------------------------------------------------------------


class Recorder(SchedulingPolicy):
    """Newest first to go; remembers who it was and who was the oldest."""

    def __init__(self) -> None:
        self.victims: list[tuple[str, str]] = []
        self.windows: list[int] = []

    def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        self.windows.append(len(waiting))
        return waiting

    def victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        if len(running) < 2:
            return None
        assert [request.index for request in running] == sorted(request.index for request in running)
        assert all(request.output_len <= request.max_new_tokens for request in running)
        self.victims.append((running[-1].rid, running[0].rid))
        return running[-1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_retraction_changes_no_token_and_spares_the_oldest(overlap: bool, page_size: int) -> None:
    recorder = Recorder()
    made = SchedulerRig(config(page_size=page_size, num_pages=1 + 48 // page_size, max_context=40, overlap=overlap), recorder)
    for i in range(6):
        made.add(prompt(8, i), params(max_tokens=28, temperature=float(i % 2), seed=i, logprobs=1))
    made.run()
    assert recorder.victims
    assert all(victim != oldest for victim, oldest in recorder.victims)
    assert made.scheduler.load()["retracted"] == len(recorder.victims)
    # they come back cheaply: their computed prefix is still cached, unless it had to be evicted
    recomputed = made.runner.num_tokens - 6 * (8 + 27)
    assert recomputed < 30 * len(recorder.victims)


@pytest.mark.parametrize("reserve", [0, 32])
def test_the_growth_reserve_prevents_retraction(reserve: int) -> None:
    made = rig(num_pages=13, max_context=40, growth_reserve=reserve)
    for i in range(6):
        made.add(prompt(8, i), params(max_tokens=16))
    made.run()
    assert (made.scheduler.load()["retracted"] == 0) == (reserve == 32)


def test_long_answers() -> None:
    made = rig(num_pages=200, max_context=400)
    for i in range(3):
        made.add(prompt(6, i), params(max_tokens=150 + 50 * i))
    made.run()


def test_the_retracted_one_comes_back_before_others() -> None:
    ended: list[str] = []
    made = SchedulerRig(config(num_pages=13, max_running=3, max_context=41), policy())
    made.scheduler._on_finish = lambda request, finish: ended.append(request.rid)
    for i in range(5):
        made.add(prompt(8, i), params(max_tokens=30))
    made.run()
    assert made.scheduler.load()["retracted"] > 0
    assert ended == [f"request-{i}" for i in range(5)]


def test_a_policy_that_names_nobody_cannot_stall_the_engine() -> None:
    class Shy(Recorder):
        def victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
            return None

    made = SchedulerRig(config(num_pages=11, max_context=40), Shy())
    for i in range(4):
        made.add(prompt(8, i), params(max_tokens=28))
    made.run()
    assert made.scheduler.load()["retracted"] > 0


def test_a_policy_that_names_the_oldest_is_told() -> None:
    class Wrong(Recorder):
        def victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
            return running[0]

    made = SchedulerRig(config(num_pages=11, max_context=40), Wrong())
    for i in range(4):
        made.add(prompt(8, i), params(max_tokens=28))
    with pytest.raises(RuntimeError, match=r"Wrong\.victim named a request that may not be retracted"):
        made.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_priority_pushes_lower_ones_off(overlap: bool) -> None:
    ended: list[str] = []
    made = SchedulerRig(config(max_running=2, overlap=overlap), policy("priority"))
    made.scheduler._on_finish = lambda request, finish: ended.append(request.rid)
    for i in range(3):
        made.add(prompt(8, i), params(max_tokens=30), priority=0)
    for _ in range(4):
        made.step()
    urgent = made.add(prompt(8, 90), params(max_tokens=3), priority=5)
    made.run()
    assert ended[0] == urgent
    assert made.scheduler.load()["retracted"] == 1
    assert ended[1] == "request-0"  # the oldest was not pushed off


# queue, refusals, ends ------------------------------------------------------------------------------------------------------


def refusal(message: Generate, **changes: Any) -> str:
    made = rig(**changes)
    finish = made.scheduler.add(message)
    assert finish is not None
    assert finish.reason == "error"
    assert made.scheduler.is_idle
    assert finish.error is not None
    return finish.error


def test_refusals_do_the_arithmetic() -> None:
    one = Generate(rid="a", token_ids=prompt(90), params=params(max_tokens=20))
    assert refusal(one) == (
        "the prompt has 90 tokens and max_tokens is 20: 110 together, above the context of 100; "
        "lower max_tokens to 10 or shorten the prompt"
    )
    assert refusal(Generate(rid="a", token_ids=prompt(100), params=params())).startswith("the prompt has 100 tokens, the context holds 100")
    assert refusal(Generate(rid="a", token_ids=prompt(30), params=params(max_tokens=12)), num_pages=11) == (
        "the request needs 11 pages of 4 tokens (30 of prompt plus 12 of output), the KV cache has 10; "
        "lower max_tokens, shorten the prompt or enlarge cache.max_total_tokens"
    )
    assert refusal(Generate(rid="a", token_ids=prompt(41), params=params(max_tokens=None)), num_pages=11).startswith(
        "the request needs 11 pages"
    )
    assert refusal(Generate(rid="a", token_ids=[], params=params())) == "the prompt is empty; it needs at least one token"
    assert "outside the vocabulary (0 to 100)" in refusal(Generate(rid="a", token_ids=[1, VOCAB], params=params()))
    assert "outside the vocabulary" in refusal(Generate(rid="a", token_ids=[-1], params=params()))
    assert "it may have 64" in refusal(Generate(rid="a", token_ids=[1], params=params(stop_token_ids=tuple(range(65)))))


def test_what_just_fits_runs_alone() -> None:
    for overlap in (False, True):
        made = rig(num_pages=11, overlap=overlap)
        made.add(prompt(30), params(max_tokens=11))
        made.add(prompt(30, 5), params(max_tokens=11))
        made.run()


def test_queue_is_bounded_and_ids_are_unique() -> None:
    made = rig(max_queued=2)
    for i in range(2):
        made.add(prompt(4, i), GREEDY)
    full = made.scheduler.add(Generate(rid="third", token_ids=[1], params=GREEDY))
    assert full is not None
    assert full.error is not None
    assert full.error.startswith(QUEUE_FULL)
    made.step()  # both are on the device now
    twin = made.scheduler.add(Generate(rid="request-0", token_ids=[1], params=GREEDY))
    assert twin is not None
    assert twin.error == "request id request-0 is in use; choose another"
    made.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_deadlines_end_waiting_and_running_requests(overlap: bool) -> None:
    made = rig(overlap=overlap, max_running=1, request_timeout=50.0)
    runs = made.add(prompt(4), params(max_tokens=60), deadline=5.0)
    waits = made.add(prompt(4), params(max_tokens=60), deadline=3.0)
    last = made.add(prompt(4), params(max_tokens=30))
    for _ in range(80):
        made.step()
        made.now += 1.0
    for rid, seconds in ((runs, 5), (waits, 3)):
        finish = made.requests[rid].finish
        assert finish is not None
        assert finish.error == f"{TIMED_OUT}: the request took longer than its {seconds} s; allow it more time"
    assert 0 < len(made.requests[runs].got) < 8
    assert made.requests[waits].got == []
    assert made.requests[last].finish == Finish("length")
    made.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_in_every_state(overlap: bool) -> None:
    made = rig(overlap=overlap, max_running=2, token_budget=6)
    decoding = made.add(prompt(4), params(max_tokens=50))
    prefilling = made.add(prompt(40, 1), params(max_tokens=50))
    waiting = made.add(prompt(4, 2), params(max_tokens=50))
    for _ in range(3):
        made.step()
    assert made.scheduler.load()["running"] == 2
    for rid in (decoding, prefilling, waiting):
        made.abort(rid)
        made.abort(rid)
        made.scheduler.check_integrity()
        assert made.requests[rid].finish == Finish("abort")
    made.scheduler.abort(["nobody"])
    assert made.scheduler.drain_outputs() is None
    assert not made.scheduler.is_idle or not overlap
    made.run()


def test_abort_of_all_and_with_a_reason() -> None:
    made = rig(max_running=1)
    for i in range(3):
        made.add(prompt(4, i), GREEDY)
    made.step()
    made.scheduler.abort(["request-0"], "stop")
    made.scheduler.abort()
    tokens = made.scheduler.drain_outputs()
    assert tokens is not None
    assert tokens.finishes == {0: Finish("stop"), 1: Finish("abort"), 2: Finish("abort")}
    assert tokens.token_ids == [[], [], []]
    assert made.scheduler.is_idle


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_is_not_finite_ends_alone(overlap: bool) -> None:
    bad = prompt(9, 3)
    made = SchedulerRig(config(overlap=overlap), policy(), is_invalid=lambda tokens: tokens[:9] == bad and len(tokens) == 12)
    fine, broken = made.add(prompt(9), GREEDY), made.add(bad, GREEDY)
    made.run()
    assert made.requests[fine].finish == Finish("length")
    finish = made.requests[broken].finish
    assert finish is not None
    assert finish.error is not None
    assert finish.error.startswith(NOT_FINITE)
    assert len(made.requests[broken].got) == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_ends_its_requests_and_no_others(overlap: bool) -> None:
    made = rig(overlap=overlap, max_running=2)
    for i in range(3):
        made.add(prompt(8, i), params(max_tokens=20))
    made.step()
    made.commit()
    batch = made.scheduler.next_batch(0.0)
    assert batch is not None
    made.runner.launch(batch).wait()
    tokens = made.scheduler.fail(batch, "the device was lost")
    assert sorted(tokens.rids) == ["request-0", "request-1"]
    assert {finish.error for finish in tokens.finishes.values()} == {"the device was lost"}
    made.scheduler.check_integrity()
    made._receive(tokens)
    while not made.scheduler.is_idle:
        made.step()
    assert made.requests["request-2"].got == made.requests["request-2"].whole


def test_nothing_of_a_broken_step_is_cached() -> None:
    bad = prompt(9, 3)
    made = SchedulerRig(config(), policy(), is_invalid=lambda tokens: len(tokens) == 13)
    broken = made.add(bad, GREEDY)
    while not made.scheduler.is_idle:
        made.step()
    assert len(made.requests[broken].got) == 4
    again = made.add([*bad, *made.requests[broken].whole], params(max_tokens=1))
    while not made.scheduler.is_idle:
        made.step()
    assert made.requests[again].cached == 8  # the prompt's pages; the third page was computed in the step that failed
    made.check()


# what requests ask for ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_of_output_and_prompt(overlap: bool) -> None:
    made = rig(overlap=overlap, token_budget=7, num_pages=16, max_context=50)
    made.add(prompt(30), params(max_tokens=4))
    while not made.scheduler.is_idle:
        made.step()
    asked = made.add(prompt(30), params(max_tokens=4, logprobs=2, prompt_logprobs=1))
    plain = made.add(prompt(30, 4), params(max_tokens=20))
    made.run()
    found = made.requests[asked]
    assert found.cached == 0  # logits of every prompt token are needed, so none comes from the cache
    assert [len(each.top[0]) for each in found.logprobs] == [2] * 4
    assert found.logprobs[0].top[0][0] == (found.got[0], found.logprobs[0].logprobs[0])
    assert found.prompt_logprobs is not None
    assert found.prompt_logprobs.top[0] == []
    assert [top[0] for top in found.prompt_logprobs.top[1:]] == list(zip(prompt(30)[1:], found.prompt_logprobs.logprobs[1:], strict=True))
    assert made.requests[plain].logprobs == []


class Alternating:
    """Allows even tokens, then odd ones, and so on; ends after `count`."""

    def __init__(self, count: int) -> None:
        self.taken: list[int] = []
        self.count = count

    def fill(self, mask: np.ndarray) -> bool:
        mask[:] = 0x55555555 if len(self.taken) % 2 == 0 else np.int32(-0x55555556)
        return True

    def accept(self, token_id: int) -> bool:
        if token_id % 2 != len(self.taken) % 2:
            return False
        self.taken.append(token_id)
        return True

    def is_finished(self) -> bool:
        return len(self.taken) == self.count


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [65, 14])
def test_grammars_see_every_token_before_the_next_mask(overlap: bool, pages: int) -> None:
    made = rig(overlap=overlap, num_pages=pages, max_context=50)
    for i in range(2):
        made.add(prompt(5, i), params(max_tokens=30))
    grammar = Alternating(20)
    message = Generate(rid="constrained", token_ids=prompt(5, 30), params=params(max_tokens=40))
    assert made.scheduler.add(message, grammar) is None
    finishes = {}
    in_flight: list[Any] = []
    followed = 0
    while not made.scheduler.is_idle:
        batch = made.scheduler.next_batch(0.0)
        if batch is not None:
            in_flight.append((batch, made.runner.launch(batch)))
        while len(in_flight) > (overlap and batch is not None):
            done, step = in_flight.pop(0)
            tokens = made.scheduler.commit(done, step.wait())
            finishes.update({tokens.rids[i]: finish for i, finish in tokens.finishes.items()})
        if batch is not None and batch.mask_follows:
            followed += 1
            in_flight[-1][1].sample(made.scheduler.mask(batch))
        made.scheduler.check_integrity()
    assert (followed > 15) == overlap
    assert len(grammar.taken) == 20
    assert [token % 2 for token in grammar.taken] == [0, 1] * 10
    assert finishes["constrained"] == Finish("stop")
    assert made.scheduler.load()["retracted"] == 0 or pages == 14


def test_a_token_that_breaks_the_grammar_is_an_error() -> None:
    class Never(Alternating):
        def accept(self, token_id: int) -> bool:
            return False

    made = rig()
    assert made.scheduler.add(Generate(rid="a", token_ids=prompt(5), params=GREEDY), Never(3)) is None
    batch = made.scheduler.next_batch(0.0)
    assert batch is not None
    tokens = made.scheduler.commit(batch, made.runner.launch(batch).wait())
    assert tokens.finishes[0].reason == "error"
    assert tokens.token_ids == [[]]
    assert made.scheduler.is_idle


# scale ----------------------------------------------------------------------------------------------------------------------


def test_policies_see_a_bounded_window() -> None:
    class Matching(Recorder):
        needs_matches = True

        def order(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
            assert all(request.match is not None for request in waiting)
            return super().order(waiting, view)

    for recorder, most in ((Recorder(), WINDOW), (Matching(), MATCH_WINDOW)):
        made = SchedulerRig(config(max_running=2, max_queued=1000), recorder)
        for i in range(300):
            made.add(prompt(3, i), params(max_tokens=1))
        made.run()
        assert max(recorder.windows) == most


def test_nothing_grows_with_the_number_of_requests_served() -> None:
    made = rig(request_timeout=1e9)
    for i in range(400):
        made.add(prompt(4, i), params(max_tokens=1))
        while not made.scheduler.is_idle:
            made.step()
    assert len(made.scheduler._deadlines) <= 80
    assert not made.scheduler._requests
    assert not made.scheduler._queue._levels
    made.check()


def test_load_counts() -> None:
    made = rig()
    made.add(prompt(5), params(max_tokens=3))
    made.add(prompt(5), params(max_tokens=3))
    assert made.scheduler.load()["waiting"] == 2
    made.step()
    load = made.scheduler.load()
    assert (load["running"], load["waiting"], load["total_pages"], load["used_pages"]) == (2, 0, 64, 3)
    while not made.scheduler.is_idle:
        made.step()
    load = made.scheduler.load()
    assert (load["prompt_tokens"], load["generated_tokens"], load["used_pages"], load["evictable_pages"]) == (10, 6, 0, 1)
