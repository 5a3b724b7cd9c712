"""Jobs of several keys take turns, and one key leaves a place for the others."""

from __future__ import annotations

from frame.fair_queue import FairQueue


def take_all(queue: FairQueue[int]) -> list[tuple[str, int]]:
    """Take and release until nothing waits."""
    taken = []
    while (job := queue.take()) is not None:
        taken.append(job)
        queue.release(job[0])
    return taken


def test_keys_take_turns() -> None:
    queue = FairQueue[int](1)
    for number in range(5):
        queue.put("many", number)
    queue.put("few", 10)
    queue.put("other", 20)
    queue.put("few", 11)
    assert take_all(queue) == [("many", 0), ("few", 10), ("other", 20), ("many", 1), ("few", 11), ("many", 2), ("many", 3), ("many", 4)]


def test_one_key_leaves_a_place_for_others_once_there_are_others() -> None:
    queue = FairQueue[int](3)
    for number in range(9):
        queue.put("many", number)
    assert [queue.take() for _ in range(4)] == [("many", 0), ("many", 1), ("many", 2), None]  # the only key takes all
    queue.put("few", 10)
    assert queue.take() is None
    queue.release("many")
    assert [queue.take(), queue.take()] == [("few", 10), None]
    queue.release("few")
    assert queue.take() is None  # the place stays free for others
    queue.put("other", 20)
    assert queue.take() == ("other", 20)
    queue.release("many")
    assert queue.take() == ("many", 3)


def test_one_key_has_a_bounded_number_of_places() -> None:
    queue = FairQueue[int](8, max_per_key=2)
    for number in range(4):
        for key in "abc":
            queue.put(key, number)
    taken = [job for job in (queue.take() for _ in range(9)) if job is not None]
    assert sorted(taken) == [(key, number) for key in "abc" for number in (0, 1)]


def test_jobs_that_are_discarded_take_no_turn() -> None:
    queue = FairQueue[int](1)
    for number in range(3):
        queue.put("a", number)
    queue.put("b", 9)
    for key, job in (("a", 0), ("b", 9), ("b", 9), ("unknown", 1)):
        queue.discard(key, job)
    assert take_all(queue) == [("a", 1), ("a", 2)]
    assert not queue._waiting and not queue._num_running
