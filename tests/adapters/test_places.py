"""`AdapterPlaces`: which adapters are on the device, and which requests start."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from frame.adapters.places import RESERVED_SECONDS, AdapterPlaces, AdapterVersions
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.request import Request


def _request(digest: str, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request(digest, np.array(prompt, np.int32), SamplingParams(), 0, 0, 0.0, 0.0, 9, adapter=digest)


def _places(num_places: int, num_pages: int, digests: str = "abc", pages: int = 1) -> AdapterPlaces:
    versions = AdapterVersions()
    for digest in digests:
        versions.add_version(digest, pages, (), copy_seconds=0.0)
    return AdapterPlaces(versions, num_places, num_pages)


def test_the_unused_adapter_makes_room() -> None:
    places = _places(num_places=2, num_pages=2)
    a, b, c = (_request(digest) for digest in "abc")
    for request in (a, b, c):
        assert places.start_request(request) is None
    places.begin_pass([], 1, 0.0)
    assert places.acquire(a, is_idle=True)
    assert places.acquire(b, is_idle=True)
    assert not places.acquire(c, is_idle=True)
    assert [(load.place, load.digest, load.pages) for load in places.take_loads()] == [(0, "a", [0]), (1, "b", [1])]
    places.release(a)
    assert places.acquire(c, is_idle=True)
    assert [(load.place, load.digest) for load in places.take_loads()] == [(0, "c")]


def test_a_request_waits_for_its_copy_while_others_run() -> None:
    places = _places(num_places=1, num_pages=1)
    places._versions.by_digest["a"].copy_seconds = 0.5
    request = _request("a")
    places.start_request(request)
    places.begin_pass([], 1, 10.0)
    assert not places.acquire(request, is_idle=False)
    assert places.acquire(request, is_idle=True)
    places.release(request)
    places.begin_pass([], 1, 10.6)
    assert places.acquire(request, is_idle=False)
    assert len(places.take_loads()) == 1


def test_a_busy_adapter_is_followed_by_one_that_waits() -> None:
    places = _places(num_places=1, num_pages=1)
    first, other, later = _request("a"), _request("b"), _request("a")
    for request in (first, other, later):
        places.start_request(request)
    places.begin_pass([], 1, 0.0)
    assert places.acquire(first, is_idle=True)
    places.begin_pass([], 1, 1.0)
    assert not places.acquire(other, is_idle=False)
    assert not places.acquire(later, is_idle=False), "it would prolong the use of the place"
    places.release(first)
    places.begin_pass([], 1, 2.0)
    assert places.acquire(other, is_idle=False)


def test_requests_of_an_adapter_share_its_turn() -> None:
    """Of adapters that come in turn, each serves what has come meanwhile, not one request."""
    places = _places(num_places=1, num_pages=1)
    queue = [_request(digest) for _ in range(4) for digest in "abc"]
    for request in queue:
        places.start_request(request)
    turns = []
    for now in range(3):
        places.begin_pass(queue, 128, float(now))
        started = [request for request in queue if places.acquire(request, is_idle=True)]
        turns.append([request.adapter for request in started])
        for request in started:
            queue.remove(request)
            places.release(request)
    assert turns == [["a"] * 4, ["b"] * 4, ["c"] * 4]


def test_a_place_is_kept_for_the_request_that_it_was_filled_for() -> None:
    places = _places(num_places=1, num_pages=1)
    places._versions.by_digest["a"].copy_seconds = 0.1
    one, other = _request("a"), _request("b")
    places.start_request(one)
    places.start_request(other)
    places.begin_pass([], 1, 0.0)
    assert not places.acquire(one, is_idle=False)
    assert not places.acquire(other, is_idle=False)
    places.begin_pass([], 1, 0.2 + RESERVED_SECONDS)  # the first request was aborted meanwhile
    assert places.acquire(other, is_idle=True)
    assert [load.digest for load in places.take_loads()] == ["b"], "the copy that was never made is not made any more"


def test_one_adapter_does_not_fill_the_window() -> None:
    places = _places(num_places=1, num_pages=1)
    queue = [*(_request("a") for _ in range(500)), _request(""), _request("b")]
    window = places.begin_pass(queue, 128, 0.0)
    assert {request.adapter for request in window} == {"a", "", "b"}


def test_adapters_without_a_place_leave_room_in_the_window() -> None:
    digests = "abcdefghijklmnopqrstuvwxyz"
    places = _places(num_places=1, num_pages=1, digests=digests)
    running = _request("a")
    places.start_request(running)
    places.begin_pass([], 1, 0.0)
    assert places.acquire(running, is_idle=True)
    queue = [*(_request(digests[1 + i % 25]) for i in range(900)), _request("a"), _request("")]
    window = [request.adapter for request in places.begin_pass(queue, 128, 0.1)]
    assert window[-2:] == ["a", ""]
    assert len(window) == 32 + 2 and max(map(window.count, window)) == 2
    far = [*queue[:900], *queue[:900], *queue[900:]]
    assert any(places.begin_pass(far, 128, 0.2)[-1].adapter == "" for _ in range(16)), "requests behind many others are seen at times"


def test_the_place_with_the_fewest_requests_is_emptied() -> None:
    places = _places(num_places=2, num_pages=4, digests="abc")
    places._versions.by_digest["c"].num_pages = 3
    users = [_request(digest) for digest in "aabbb"]
    places.begin_pass([], 1, 0.0)
    for request in users:
        places.start_request(request)
        assert places.acquire(request, is_idle=True)
    first = _request("c")
    places.begin_pass([], 1, 0.1)
    assert places.choose_victims(first, users) == [], "both are there for a moment only"
    places.begin_pass([], 1, 1.0)
    assert places.choose_victims(first, users) == users[:2]
    assert places.choose_victims(first, users[1:]) == users[2:], "one of the other place may not be preempted"
    assert places.choose_victims(first, users[1:4]) == []
    places._versions.by_digest["c"].num_pages = 4
    assert places.choose_victims(first, users) == [], "the pages of one place are too few"
    places._versions.by_digest["c"].num_pages = 1
    for request in users[:2]:
        places.release(request)
    places.begin_pass([], 1, 2.0)
    assert places.choose_victims(first, users[2:]) == [], "a place is idle"


def test_an_adapter_with_an_invocation_is_active_from_its_last_occurrence_on() -> None:
    versions = AdapterVersions()
    versions.add_version("x", 1, (7, 8), 0.0)
    places = AdapterPlaces(versions, 1, 1)
    request, without = _request("x", (7, 8, 1, 7, 8, 2)), _request("x", (7, 1, 8))
    places.start_request(request)
    places.start_request(without)
    assert (request.adapter_start, request.adapter_key) == (3, versions.find_key(versions.by_digest["x"], 7))
    assert without.adapter == ""
    keys = request.cache_keys(request.prompt)
    assert keys[:3].tolist() == [7, 8, 1]
    assert keys[3] < 0


def test_an_adapter_loaded_again_has_another_cache_key() -> None:
    versions = AdapterVersions()
    versions.add_version("x", 1, (), 0.0)
    first = versions.find_key(versions.by_digest.pop("x"), 5)
    versions.add_version("x", 1, (), 0.0)
    assert versions.find_key(versions.by_digest["x"], 5) != first


def test_the_first_token_is_part_of_its_cache_key() -> None:
    places = _places(num_places=1, num_pages=1)
    one, other, same = _request("a", (4, 5, 6)), _request("a", (9, 5, 6)), _request("a", (4, 5, 6))
    for request in (one, other, same):
        places.start_request(request)
    keys = [request.cache_keys(request.prompt).tolist() for request in (one, other, same)]
    assert keys[0] == keys[2] != keys[1]


class PlaceMachine(RuleBasedStateMachine):
    """Pages and places are neither lost nor used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.versions = AdapterVersions()
        for number in range(6):
            self.versions.add_version(str(number), 1 + number % 3, (), 0.0)
        self.places = AdapterPlaces(self.versions, 3, 5)
        self.running: list[Request] = []
        self.now = 0.0

    @rule(digest=st.integers(0, 5), seconds=st.floats(0, 2), is_idle=st.booleans())
    def start(self, digest: int, seconds: float, is_idle: bool) -> None:
        self.now += seconds
        if str(digest) not in self.versions.by_digest:
            return
        request = _request(str(digest))
        assert self.places.start_request(request) is None
        self.places.begin_pass([], 1, self.now)
        if self.places.acquire(request, is_idle=is_idle):
            self.running.append(request)
        else:
            self.places.finish_request(request)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 100))
    def end(self, index: int) -> None:
        request = self.running.pop(index % len(self.running))
        self.places.release(request)
        self.places.finish_request(request)

    @rule(digest=st.integers(0, 5))
    def reload(self, digest: int) -> None:
        version = self.versions.by_digest.get(str(digest))
        if version is not None and not version.num_requests:
            del self.versions.by_digest[version.digest]
            self.places.forget(version.digest)
            self.versions.add_version(version.digest, version.num_pages, (), 0.0)

    @rule()
    def take(self) -> None:
        for load in self.places.take_loads():
            assert len(load.pages) == self.versions.by_digest[load.digest].num_pages

    @invariant()
    def accounts(self) -> None:
        used = [page for place in self.places._places for page in place.pages]
        assert sorted(used + self.places._free_pages) == list(range(5))
        for number, place in enumerate(self.places._places):
            assert place.num_running == sum(request.adapter_place == number for request in self.running)
            assert all(request.adapter == place.digest for request in self.running if request.adapter_place == number)


PlaceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPlaces = PlaceMachine.TestCase
