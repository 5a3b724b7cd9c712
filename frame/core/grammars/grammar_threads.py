"""Threads that call grammars, because a call cannot be interrupted: the engine waits for a quick call and goes on without a slow one.

Used by `frame.core.grammars.grammar_masks`. Knows no scheduler and no backend.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

QUICK = 0.01  # seconds of CPU that the engine waits for one call
LOST = 1.0  # seconds of the clock without an end, after which a call counts as slow on a machine that is busy with other things
MOST_LEFT = 8  # threads that may run abandoned calls; with more of them, threads are not replaced
IDLE = 5.0  # seconds without a call, after which a thread ends
NICENESS = 10  # of a thread whose call is slow, so that the engine's threads run first


class _Thread(NamedTuple):
    """The running thread, as the kernel knows it. `clock`: of its CPU time, where the system has such clocks."""

    id: int
    clock: int | None

    @classmethod
    def current(cls) -> _Thread:
        has_clocks = hasattr(time, "pthread_getcpuclockid")
        return cls(threading.get_native_id(), time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None)


class ThreadedCall:
    """One call, which is made in another thread. `seconds`: CPU that it has taken, once it `is_finished`. Flags change under the lock of
    its threads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.queued_at = time.monotonic()
        self.is_finished = self.is_left = False
        self.thread: _Thread | None = None  # once it has begun
        self._began = 0.0

    def run(self) -> None:
        """Called once, by the thread."""
        self._began = time.thread_time()
        self.call()
        self.seconds = time.thread_time() - self._began

    def call(self) -> None:
        """What is done; it must not raise."""
        raise NotImplementedError

    def cpu_seconds(self) -> float:
        """CPU that it has taken so far, seen from any thread."""
        if self.thread is not None and self.thread.clock is not None and self._began and not self.is_finished:
            with suppress(OSError):  # the thread has ended since
                return time.clock_gettime(self.thread.clock) - self._began
        return self.seconds

    def is_slow(self) -> bool:
        """Whether it takes too long to be waited for."""
        return self.thread is not None and (self.cpu_seconds() > QUICK or time.monotonic() - self.queued_at > LOST)


class Round:
    """Calls that several threads take from. `is_over` is set when each is finished or left: one event, since to wait for each call by
    itself would wake the engine's thread as often, and it would take the interpreter's lock from the others."""

    def __init__(self, calls: Sequence[ThreadedCall]) -> None:
        self.calls = calls
        self.waiting = deque(calls)
        self.num_open = len(calls)
        self.is_over = threading.Event()

    def count_down(self) -> None:
        """One more call is finished or left."""
        self.num_open -= 1
        if not self.num_open:
            self.is_over.set()


class GrammarThreads:
    """At most `threads` at work, and a few that are left with a slow call. They are daemons: none keeps the process from its end. All
    but `_work` is the engine's thread."""

    def __init__(self, threads: int, niceness: int = 0) -> None:
        self.threads = threads
        self._niceness = niceness
        self._queue: SimpleQueue[Round | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_active = 0
        self._num_left = 0

    def begin(self, calls: Sequence[ThreadedCall], workers: int = 1) -> Round:
        """Start calls, in order, by so many threads."""
        workers = max(1, min(workers, self.threads, len(calls)))
        begun = Round(calls)
        with self._lock:
            while self._num_active < workers and self._num_left < MOST_LEFT:
                self._spawn()
            for _ in range(workers):
                self._queue.put(begun)
        return begun

    def wait(self, begun: Round) -> None:
        """Return when each call is finished or was left, because it is slow or there is no thread for it."""
        while not begun.is_over.wait(QUICK):
            for call in begun.calls:
                if call.is_slow() or not self._num_active:
                    self.leave(call, begun)

    def leave(self, call: ThreadedCall, begun: Round | None = None) -> None:
        """Wait for a call no more. One that has not begun never does. The thread of one that has ends with it, and another takes its
        place as long as there are not too many."""
        with self._lock:
            if call.is_finished or call.is_left:
                return
            call.is_left = True
            if begun is not None:
                begun.count_down()
            if call.thread is None:
                return
            _set_niceness(call.thread.id, NICENESS)
            self._num_active -= 1
            self._num_left += 1
            if self._num_left < MOST_LEFT:
                self._spawn()
                if begun is not None:
                    self._queue.put(begun)

    def close(self) -> None:
        """Let the threads end, each after its call."""
        for _ in range(self._num_active):
            self._queue.put(None)

    def _spawn(self) -> None:
        self._num_active += 1
        threading.Thread(target=self._work, name="grammar-calls", daemon=True).start()

    def _work(self) -> None:
        thread = _Thread.current()
        if self._niceness:
            _set_niceness(thread.id, self._niceness)
        while (begun := self._next_round()) is not None:
            while (call := self._next_call(begun, thread)) is not None:
                call.run()
                if self._is_left(call, begun):
                    return

    def _next_round(self) -> Round | None:
        """None: the thread ends."""
        while True:
            with suppress(Empty):
                if (begun := self._queue.get(timeout=IDLE)) is not None:
                    return begun
            with self._lock:  # which `begin` has while it counts on this thread
                if self._queue.empty():
                    self._num_active -= 1
                    return None

    def _next_call(self, begun: Round, thread: _Thread) -> ThreadedCall | None:
        with self._lock:
            while begun.waiting:
                call = begun.waiting.popleft()
                if not call.is_left:
                    call.thread = thread
                    return call
        return None

    def _is_left(self, call: ThreadedCall, begun: Round) -> bool:
        """Whether a call that is finished was left, and this thread with it."""
        with self._lock:
            call.is_finished = True
            if call.is_left:
                self._num_left -= 1
                return True
            begun.count_down()
            return False


def _set_niceness(thread_id: int, niceness: int) -> None:
    if sys.platform.startswith("linux"):  # elsewhere it would be the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
