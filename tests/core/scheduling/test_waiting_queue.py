"""The order of the waiting queue, and deadlines."""

from __future__ import annotations

from frame.core.scheduling.request import RequestStatus
from frame.core.scheduling.waiting_queue import Deadlines, WaitingQueue
from frame.testing.scheduling.scheduling_policy import example_requests


def test_arrival_order_and_return_to_the_head() -> None:
    queue, requests = WaitingQueue(), example_requests(6)
    for request in requests[:5]:
        queue.push(request)
    queue.push_front(requests[5])
    queue.remove(requests[2])
    assert [request.index for request in queue] == [5, 0, 1, 3, 4]
    assert [request.index for request in queue.head(2)] == [5, 0]
    assert len(queue) == 5
    for request in list(queue):
        queue.remove(request)
    assert len(queue) == 0
    assert queue.head(3) == []


def test_push_front_goes_to_the_head_of_its_priority() -> None:
    queue, requests = WaitingQueue(by_priority=True), example_requests(5)
    for request, priority in zip(requests, (0, 7, 0, -1, 7), strict=True):
        request.priority = priority
    for request in requests[:4]:
        queue.push(request)
    queue.push_front(requests[4])
    assert [request.index for request in queue] == [4, 1, 0, 2, 3]


def test_deadlines_drop_ended_requests() -> None:
    deadlines, requests = Deadlines(), example_requests(300)
    for i, request in enumerate(requests):
        request.deadline = float(i % 10)
        deadlines.add_request(request, num_alive=10)
        request.state = RequestStatus.FINISHED if i % 30 else RequestStatus.RUNNING
    assert len(deadlines) <= 2 * 10 + 64
    assert deadlines.pop_expired(-1.0) == []
    assert {request.index for request in deadlines.pop_expired(0.0)} == {i for i in range(300) if i % 30 == 0}
    assert deadlines.pop_expired(0.0) == []
    deadlines.pop_expired(9.0)
    assert len(deadlines) == 0


def test_a_request_with_many_sequences_takes_turns_with_later_ones() -> None:
    queue, requests = WaitingQueue(), example_requests(12)
    for request in requests[:10]:  # the first eight are of one request
        request.is_further = 0 < request.index < 8
        queue.push(request)
    assert [request.index for request in queue] == [0, 1, 8, 2, 9, 3, 4, 5, 6, 7]
    order = []
    for later in (None, None, None, 10, 11, None, None, None, None):  # one goes, and some come
        if later:
            queue.push(requests[later])
        (head,) = queue.head(1)
        queue.remove(head)
        order.append(head.index)
    assert order == [0, 1, 8, 2, 9, 3, 10, 4, 11]
    queue.push_front(requests[2])  # preempted
    assert [request.index for request in queue] == [2, 5, 6, 7]
    assert len(queue) == 4
