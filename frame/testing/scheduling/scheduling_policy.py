"""The conformance suite of scheduling policies: single calls, simulations of long queues, then
whole scheduler runs on `SchedulerRig`. Must not know a policy by name.

The class may state what it does: `conformance_orders` is a tuple of (requests, order). A request is
a mapping with any of the fields of `EXAMPLE`; the order has the places of the requests, as
`sort_waiting` returns them.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from frame.core.interfaces.cache import Match
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling import policy_guard as guarded_policy
from frame.core.scheduling.request import Request
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.testing.conformance import Check, SkipCheck, Subject, collect, count_elements
from frame.testing.contexts import SCHEDULING
from frame.testing.generators import ALIKE, make_alike, require_fast, require_growth
from frame.testing.scheduler_rig import SchedulerRig, add_requests, make_tight_config

VIEW = SchedulerView(now=8.0, num_running=3, token_budget=512, free_pages=7, evictable_pages=5, page_size=4)
EDGE_VIEWS = (SchedulerView(0.0, 0, 0, 0, 0, 1), SchedulerView(1e9, 10_000, 1 << 20, 0, 1 << 30, 128))
VOCAB = 97
WINDOW = 128  # waiting requests that the scheduler shows a policy at most
MAX_SECONDS = 0.02  # of one `sort_waiting` of a window; a step takes about as long
MAX_FEW_SECONDS = 1.5e-3  # of a call with four requests
MAX_WAIT = 200  # seconds that a request may wait while later ones are admitted
BACKLOG, ADMITTED = 8, 2  # of the simulated queue: its length, and the requests admitted each second

# A request of `conformance_orders`; `pages` are those of its cached prefix (None: it was not looked
# up), `waited` are seconds.
EXAMPLE: Mapping[str, Any] = MappingProxyType(
    {"prompt_len": 40, "max_new_tokens": 20, "output_len": 0, "priority": 0, "waited": 1.0, "pages": ()}
)

Make = Callable[[], SchedulingPolicy]


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `scheduling_policy`: single calls, simulated queues, then whole runs
    that must yield what an unconstrained run yields."""
    policy = partial(subject.target, SCHEDULING, subject.options)
    yield from collect(__name__, policy)
    yield Check("orders_as_it_states", partial(_orders_as_it_states, policy, getattr(subject.target, "conformance_orders", ())))
    if policy().by_priority:
        yield Check("priorities_are_kept", partial(priorities_are_kept, policy))
    for overlap in (False, True):
        for page_size in (1, 4):
            name = f"runs_{'overlapped' if overlap else 'plain'}_with_pages_of_{page_size}"
            yield Check(name, partial(runs, policy, page_size, overlap))


def example_requests(count: int, seed: int = 0) -> list[Request]:
    """Requests with mixed lengths, priorities, outputs and matches, oldest first."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        prompt = np.array([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], np.int32)
        params = SamplingParams(max_tokens=rng.randint(1, 60))
        request = Request(
            f"request-{index}", prompt, params, seed=index, index=index, arrival=index / 10, deadline=600.0, max_num_tokens=100
        )
        request.priority = rng.randint(-2, 2)
        request.output.extend(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 5))))
        pages = np.arange(rng.randint(0, len(prompt) // 4), dtype=np.int32) + 1 + 20 * rng.randint(0, 2)
        request.match = rng.choice((None, Match(4 * len(pages), pages, None)))
        requests.append(request)
    return requests


# single calls -------------------------------------------------------------------------------------


def check_order_is_a_permutation(policy: Make) -> None:
    one = policy()
    for turn, count in enumerate((50, 50, 1, WINDOW)):  # one policy orders window after window
        take_all(one, example_requests(count, seed=turn), VIEW)


def _orders_as_it_states(policy: Make, stated: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[int]]]) -> None:
    """The class's own examples of its order."""
    if not stated:
        raise SkipCheck("the class has no conformance_orders: whether it orders as it means to is not checked")
    for examples, expected in stated:
        waiting = [_make_example(place, example) for place, example in enumerate(examples)]
        got = [request.index for request in policy().sort_waiting(waiting, VIEW)]
        assert got == [*expected], f"requests {examples} are ordered {got}, and not {[*expected]}"


def _make_example(place: int, example: Mapping[str, Any]) -> Request:
    unknown = sorted(example.keys() - EXAMPLE.keys())
    assert not unknown, f"conformance_orders has the field {unknown[0]}; write one of {', '.join(EXAMPLE)}"
    prompt_len, max_new_tokens, output_len, priority, waited, pages = ({**EXAMPLE, **example}[name] for name in EXAMPLE)
    prompt, arrival = np.full(prompt_len, 5, np.int32), VIEW.now - waited
    request = Request(
        f"request-{place}", prompt, SamplingParams(), place, place, arrival, arrival + 600, prompt_len + max_new_tokens, priority=priority
    )
    request.output.extend([5] * output_len)
    request.match = None if pages is None else Match(VIEW.page_size * len(pages), np.array(pages, np.int32), None)
    return request


def take_all(policy: SchedulingPolicy, waiting: list[Request], view: SchedulerView) -> None:
    """Order the requests, and again those that an order left out, since it may be the prefix of a
    permutation. Asserts that each comes, and comes once."""
    left = {id(request): request for request in waiting}
    while left:
        ordered = list(policy.sort_waiting([*left.values()], view))
        assert ordered, f"sort_waiting() returned none of {len(left)} requests, with {view}"
        assert len({id(each) for each in ordered}) == len(ordered), "sort_waiting() returned a request twice"
        assert left.keys() >= {id(each) for each in ordered}, "sort_waiting() returned other requests than it was given"
        for each in ordered:
            del left[id(each)]


def check_equal_requests_are_told_apart(policy: Make) -> None:
    """The prompts of a batch come in one moment, and may be equal in all but their ids: each is
    ordered."""
    for count in (2, 9, 64):
        waiting = example_requests(count)
        for request in waiting:
            for name in ("arrival", "deadline", "priority", "prompt", "max_num_tokens", "match", "params", "output"):
                setattr(request, name, getattr(waiting[0], name))
        take_all(policy(), waiting, VIEW)
        ordered = list(policy().sort_waiting(waiting, VIEW))
        is_filled = sum(request.prompt_len for request in ordered) >= VIEW.token_budget
        assert len(ordered) == count or is_filled, f"of {count} equal requests that fit in a step, sort_waiting() returned {len(ordered)}"


def check_windows_in_any_order(policy: Make) -> None:
    """Deadlines, arrivals and priorities in any order: the window stays as it was passed."""
    for seed in range(6):
        waiting = example_requests(40, seed)
        rng = random.Random(seed)
        for request in waiting:
            request.deadline = request.arrival + rng.choice((0.5, 5.0, 60.0, 600.0))
        rng.shuffle(waiting)
        for passed in (waiting, sorted(waiting, key=lambda request: -request.index)):
            before = _snapshot(passed)
            list(policy().sort_waiting(passed, VIEW))
            assert before == _snapshot(passed), "sort_waiting() changed the sequence that it was given; return another one"


def check_addresses_do_not_count(policy: Make) -> None:
    """Requests that have ended leave their memory to others, so an address names no request."""

    def run(keeps: bool) -> list[list[str]]:
        one, kept, orders = policy(), list[list[Request]](), []
        for seed in range(25):
            waiting = example_requests(40, seed)
            for request in waiting:
                request.rid, request.index = f"{seed}-{request.rid}", 40 * seed + request.index
            orders.append([request.rid for request in one.sort_waiting(list(waiting), VIEW)])
            if keeps:
                kept.append(waiting)
            del waiting, request
        return orders

    apart = run(keeps=True)
    if run(keeps=True) == apart:  # its order is no matter of chance
        assert run(keeps=False) == apart, "the order of requests is another where they have the memory of requests that ended"


def check_time_grows_with_the_window(policy: Make) -> None:
    """A window of 4,096 requests takes about 16 times as long as one of 256."""

    def sort(size: int) -> Callable[[], object]:
        one, waiting = policy(), example_requests(size)
        return lambda: list(one.sort_waiting(waiting, VIEW))

    require_growth(sort, 256, 4096, "sort_waiting() of so many requests", factor=64.0, minimum=0.02)


def check_names_are_compared_whole(policy: Make) -> None:
    """Requests whose ids are equal in up to 128 characters are different requests."""
    waiting = example_requests(2 * len(ALIKE))
    for request, name in zip(waiting, (name for pair in make_alike(fill="r") for name in pair), strict=True):
        request.rid = name
    take_all(policy(), waiting, VIEW)


def check_victims_after_preemptions(policy: Make) -> None:
    """The oldest request is spared however often the others were preempted before it."""
    one = policy()
    for cycle in range(40):
        running = example_requests(6, cycle)
        for place, request in enumerate(running):
            request.num_preemptions = cycle % 5 * bool(place)
        victim = one.select_victim(running, VIEW)
        assert victim is not running[0], (
            "select_victim returned the oldest running request, which was preempted least, so no request advances"
        )
        assert victim is not None and any(victim is each for each in running), "select_victim returned a request that is not running"


def check_late_requests_are_not_changed(policy: Make) -> None:
    """Requests that have waited for an hour are ordered, and not changed."""
    waiting = example_requests(50)
    before = _snapshot(waiting)
    list(policy().sort_waiting(waiting, replace(VIEW, now=VIEW.now + 3600)))
    assert before == _snapshot(waiting), "sort_waiting() changed the requests that have waited for long"


def check_order_of_a_few_is_fast(policy: Make) -> None:
    one, waiting = policy(), example_requests(4)
    require_fast(lambda: list(one.sort_waiting(waiting, VIEW)), MAX_FEW_SECONDS, "sort_waiting() of 4 requests")
    require_fast(lambda: one.select_victim(waiting, VIEW), MAX_FEW_SECONDS, "select_victim() of 4 requests")


def check_order_changes_nothing(policy: Make) -> None:
    waiting = example_requests(50)
    before = _snapshot(waiting)
    list(policy().sort_waiting(waiting, VIEW))
    assert before == _snapshot(waiting), "sort_waiting() changed the requests, or the sequence that holds them"


def check_order_of_nothing(policy: Make) -> None:
    assert not list(policy().sort_waiting([], VIEW)), "sort_waiting() of no requests is not empty"


def check_order_takes_any_view(policy: Make) -> None:
    """Views of an idle scheduler at its start, and of a full one after years."""
    for view in EDGE_VIEWS:
        take_all(policy(), example_requests(9), view)


def check_order_is_fast(policy: Make) -> None:
    one, waiting, taken = policy(), example_requests(WINDOW), []
    for _ in range(4):
        began = time.perf_counter()
        list(one.sort_waiting(waiting, VIEW))
        taken.append(time.perf_counter() - began)
        if taken[-1] < MAX_SECONDS:
            return
    raise AssertionError(f"sort_waiting() of {WINDOW} requests takes {min(taken) * 1e3:.0f} ms, and every step waits for it")


def check_victim_is_never_the_oldest(policy: Make) -> None:
    for seed in range(20):
        running = example_requests(8, seed)
        for count in range(1, 9):
            victim = policy().select_victim(running[:count], VIEW)
            assert victim is not running[0], "select_victim returned the oldest running request, so progress is not guaranteed"
            assert victim is None or any(victim is r for r in running[:count]), "select_victim returned a request that is not running"
            assert count == 1 or victim is not None, f"select_victim returned None for {count} requests when pages ran out"


def check_preemption_has_no_cycle(policy: Make) -> None:
    requests, asked = example_requests(30), policy()
    for one, other in product(requests, repeat=2):
        both = asked.can_preempt(one, other) and asked.can_preempt(other, one)
        assert not both, "two requests may preempt each other, so neither would ever finish"


def check_preemption_changes_nothing(policy: Make) -> None:
    running, waiting = example_requests(8), example_requests(8, seed=1)
    before = _snapshot([*running, *waiting])
    one = policy()
    one.select_victim(running, VIEW)
    for request in waiting:
        one.can_preempt(request, running[-1])
    assert before == _snapshot([*running, *waiting]), "select_victim or can_preempt changed the requests, or their sequence"


def priorities_are_kept(policy: Make) -> None:
    """A policy that has the queue sorted by priority keeps that order, and preempts low priorities
    for higher ones only."""
    waiting = example_requests(40)
    for request in waiting:
        request.arrival = VIEW.now  # ageing has nothing to do
    first = next(iter(policy().sort_waiting(waiting, VIEW)))
    highest = max(request.priority for request in waiting)
    assert first.priority == highest, f"sort_waiting() puts priority {first.priority} before {highest}, though `by_priority` is set"
    victim = policy().select_victim(waiting, VIEW)
    lowest = min(request.priority for request in waiting[1:])
    assert victim is not None and victim.priority == lowest, "select_victim spares a request of the lowest priority"
    asked = policy()  # one policy for all pairs, as in a scheduler
    for one, other in product(waiting, repeat=2):
        assert one.priority >= other.priority or not asked.can_preempt(one, other), "can_preempt lets a lower priority preempt"


def check_preemption_is_decided_by_the_pair(policy: Make) -> None:
    """A policy that was asked about other pairs decides as a new one."""
    requests, asked = example_requests(12), policy()
    for one, other in product(requests, repeat=2):
        alone = policy().can_preempt(one, other)
        if alone == policy().can_preempt(one, other):  # no matter of chance
            assert asked.can_preempt(one, other) == alone, "can_preempt decides otherwise about a pair when it was asked about others"


def check_requests_are_not_kept(policy: Make) -> None:
    """The memory of a policy does not grow with the requests, nor with the tenants, that it has
    seen."""
    one, requests, sizes = policy(), example_requests(64), []
    for turn in range(60):
        waiting = [_renamed(request, f"{turn}-{request.rid}", 64 * turn + request.index) for request in requests]
        for place, request in enumerate(waiting):
            request.tenant = f"tenant-{turn}-{place % 8}"
            request.namespace = f"{request.tenant}:"
        list(one.sort_waiting(waiting, VIEW))
        one.select_victim(waiting, VIEW)
        for request in waiting[1:9]:
            one.can_preempt(waiting[0], request)
        if turn % 20 == 19:
            sizes.append(count_elements(one))
    grows = sizes[0] + 20 <= sizes[1] and sizes[1] + 20 <= sizes[2]  # at least by one in each step
    assert not grows, f"the policy holds {sizes} elements after 20, 40 and 60 steps: it keeps what it has seen"


# simulated queues ---------------------------------------------------------------------------------


def check_order_starves_no_request(policy: Make) -> None:
    """One request that differs from all others in some way waits in a queue that never empties."""
    differs = (False, True)
    priorities = (False,) if policy().by_priority else differs
    for long_prompt, long_output, cached, low in product(differs, differs, differs, priorities):
        odd, usual = (long_prompt, long_output, cached, -low), (not long_prompt, not long_output, not cached, 0)
        waited = _simulate(policy(), odd, usual)
        what = f"a {'long' if long_prompt else 'short'} prompt, {'many' if long_output else 'few'} output tokens"
        what += f", {'a' if cached else 'no'} cached prefix{' and a low priority' if low else ''}"
        assert waited < MAX_WAIT, f"a request with {what} waits for {waited} s while later ones are admitted: see `late_first`"


def check_preemption_starves_no_request(policy: Make) -> None:
    """A request that differs from those that arrive after it is not preempted for each of them."""
    one, differs = policy(), (False, True)
    for long_prompt, long_output, cached in product(differs, differs, differs):
        old = _shaped(0, 0.0, (long_prompt, long_output, cached, 0))
        new = (_shaped(second, float(second), (not long_prompt, not long_output, not cached, 0)) for second in range(1, MAX_WAIT + 1))
        what = f"a {'long' if long_prompt else 'short'} prompt and {'many' if long_output else 'few'} output tokens"
        always = all(one.can_preempt(request, old) for request in new)
        assert not always, f"a request with {what} is preempted for each one that arrives in {MAX_WAIT} s: compare arrivals too"


Shape = tuple[bool, bool, bool, int]


def _simulate(policy: SchedulingPolicy, odd: Shape, usual: Shape) -> int:
    """Seconds until the first request, of the shape `odd`, is admitted."""
    waiting, number = [_shaped(0, 0.0, odd)], 1
    for second in range(1, MAX_WAIT + 1):
        while len(waiting) < BACKLOG:
            waiting.append(_shaped(number, float(second), usual))
            number += 1
        view = SchedulerView(float(second), 3, 512, 7, 5, 4)
        admitted = list(policy.sort_waiting(list(waiting), view))[:ADMITTED]
        if any(request.index == 0 for request in admitted):
            return second
        waiting = [request for request in waiting if not any(request is one for one in admitted)]
    return MAX_WAIT


def _shaped(index: int, arrival: float, shape: Shape) -> Request:
    long_prompt, long_output, cached, priority = shape
    prompt = np.full(80 if long_prompt else 8, 5, np.int32)
    limit = len(prompt) + (90 if long_output else 9)
    rid = f"{'r' * 64}-{index}"  # ids of one client, which begin alike
    request = Request(rid, prompt, SamplingParams(), 0, index, arrival, arrival + 1e4, limit, priority=priority)
    request.match = Match(8, np.array([1, 2], np.int32), None) if cached else Match(0, np.empty(0, np.int32), None)
    return request


# whole runs ---------------------------------------------------------------------------------------


def runs(policy: Make, page_size: int, overlap: bool) -> None:
    with _complaints() as errors:
        rig = SchedulerRig(_config(page_size, overlap), policy())
        add_requests(rig, page_size + overlap)
    assert not errors, errors[0] if errors else ""
    if not rig.scheduler.get_load()["preempted"]:
        raise SkipCheck("the pages never run out in this run, so no victim is asked for")


def check_a_busy_run_serves_the_oldest(policy: Make) -> None:
    """The first request finishes though more arrive all the time. A step takes a second."""
    with _complaints() as errors:
        rig = SchedulerRig(_config(4, False), policy())
        for i in range(5):
            rig.add([i] * 12, SamplingParams(max_tokens=12, temperature=0.0))
        oldest = rig.add([*range(30)], SamplingParams(max_tokens=20, temperature=0.0))
        for i in range(MAX_WAIT):
            rig.now += 1.0
            if rig.scheduler.get_load()["waiting"] < BACKLOG:
                rig.add([i % VOCAB, *range(i % 9)], SamplingParams(max_tokens=1 + i % 9, temperature=0.0))
            rig.step()
            if rig.requests[oldest].finish is not None:
                break
    assert rig.requests[oldest].finish is not None, f"a request is not done after {MAX_WAIT} steps, though others come and go"
    assert not errors, errors[0] if errors else ""


def _config(page_size: int, overlap: bool) -> SchedulerConfig:
    # without a reserve pages run out while requests grow, and the policy chooses victims
    return make_tight_config(page_size, 1 + 64 // page_size, overlap=overlap, growth_reserve=0)


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """The errors that the scheduler logs about a policy. It serves requests in spite of them."""
    errors: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    guarded_policy.log.addHandler(handler)
    try:
        yield errors
    finally:
        guarded_policy.log.removeHandler(handler)


# helpers ------------------------------------------------------------------------------------------


def _snapshot(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    """All fields of the requests, in order."""
    return [(id(request), *(_value(getattr(request, field.name)) for field in fields(request))) for request in requests]


def _value(value: Any) -> Any:
    return value.tobytes() if hasattr(value, "tobytes") else value if isinstance(value, int | float | str | tuple) else id(value)


def _renamed(request: Request, rid: str, index: int) -> Request:
    renamed = copy(request)
    renamed.rid, renamed.index = rid, index
    return renamed
