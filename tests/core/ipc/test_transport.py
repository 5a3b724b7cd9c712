"""Transports: order, batching, waiting."""

from __future__ import annotations

import threading
import time

from frame.core.ipc.transport import InProcessTransport, ZmqSender, ZmqTransport
from frame.core.messages import Abort, AbortAll, Heartbeat, StepTokens
from frame.host.socket_directory import SocketDirectory


def test_in_process_keeps_order_and_wakes() -> None:
    near, far = InProcessTransport.pair()
    assert far.receive() == []
    near.send_all([Abort(rids=[str(i)]) for i in range(3)])
    near.send(Abort(rids=["3"]))
    assert [m.rids for m in far.receive(None) if isinstance(m, Abort)] == [["0"], ["1"], ["2"], ["3"]]
    started = time.perf_counter()
    assert far.receive(0.05) == []
    assert time.perf_counter() - started >= 0.04
    threading.Timer(0.02, near.send, [AbortAll()]).start()
    assert far.receive(10.0) == [AbortAll()]


def test_in_process_an_empty_send_wakes_without_a_message() -> None:
    near, far = InProcessTransport.pair()
    near.send_all([])
    started = time.perf_counter()
    assert far.receive(0.05) == []
    assert time.perf_counter() - started >= 0.04
    near.send_all([])
    threading.Timer(0.02, near.send, [AbortAll()]).start()
    assert far.receive(10.0) == [AbortAll()]


def test_in_process_sink_is_called_by_the_sender() -> None:
    seen: list[tuple[object, str]] = []
    near, far = InProcessTransport.pair(lambda message: seen.append((message, threading.current_thread().name)))
    far.send(AbortAll())
    assert seen == [(AbortAll(), threading.current_thread().name)]
    near.close()
    assert near.receive(None) == []


def test_zmq_routes_by_type() -> None:
    sockets = SocketDirectory()
    a, b, c = (sockets.address(name) for name in "abc")
    first = ZmqTransport(a, b, {StepTokens: c})
    second, third = ZmqTransport(b, a), ZmqTransport(c, None)
    alone = ZmqSender(b)
    try:
        first.send_all([Abort(rids=["x"]), StepTokens(rids=["r"], token_ids=[[1, 2]]), Abort(rids=["y"])])
        received = second.receive(10.0)
        while len(received) < 2:
            received += second.receive(10.0)
        assert received == [Abort(rids=["x"]), Abort(rids=["y"])]
        assert third.receive(10.0) == [StepTokens(rids=["r"], token_ids=[[1, 2]])]
        third.send(Heartbeat(process="p", step=1))  # no route and no default: dropped
        alone.send(Abort(rids=["z"]))
        assert second.receive(10.0) == [Abort(rids=["z"])]
        assert second.receive(0.01) == []
        assert isinstance(first.fd, int)
    finally:
        alone.close()
        for transport in (first, second, third):
            transport.close()
        sockets.remove()
    assert not sockets.path.exists()


def test_many_messages_arrive_in_order() -> None:
    sockets = SocketDirectory()
    one, two = ZmqTransport(sockets.address("1"), sockets.address("2")), ZmqTransport(sockets.address("2"), None)
    try:
        for i in range(2000):
            one.send(Heartbeat(process="p", step=i))
        steps: list[int] = []
        while len(steps) < 2000:
            steps += [m.step for m in two.receive(10.0) if isinstance(m, Heartbeat)]
        assert steps == list(range(2000))
    finally:
        one.close()
        two.close()
        sockets.remove()
