"""Threads for calls of grammar backends: the engine waits for quick calls and continues without
slow ones.

A call cannot be interrupted. Used by `frame.structured_output.grammar_masks`. Must not know the
scheduler or a backend.
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

QUICK_SECONDS = 0.01  # CPU seconds that the engine waits for one call
LOST_SECONDS = 1.0  # seconds of the clock after which a call counts as slow, however little CPU time it got
MAX_ABANDONED = 8  # threads in abandoned calls; beyond that number they are not replaced
IDLE_SECONDS = 5.0  # seconds without a call after which a thread ends
NICENESS = 10  # of a thread in a slow call, so that the engine's threads run first


class _Thread(NamedTuple):
    """A running thread. `clock`: the id of its CPU-time clock, None where the system has none."""

    id: int
    clock: int | None

    @classmethod
    def current(cls) -> _Thread:
        has_clocks = hasattr(time, "pthread_getcpuclockid")
        return cls(threading.get_native_id(), time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None)


class ThreadedCall:
    """One call, made in another thread. `seconds`: its CPU time, once it `is_finished`. Flags
    change under the lock of its threads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.queued_at = time.monotonic()
        self.is_finished = self.is_abandoned = False
        self.thread: _Thread | None = None  # None: not started
        self._began = 0.0

    def run(self) -> None:
        """Execute and measure the call. The thread calls this once."""
        self._began = time.thread_time()
        self.execute()
        self.seconds = time.thread_time() - self._began

    def execute(self) -> None:
        """Do the work. Must not raise."""
        raise NotImplementedError

    def cpu_seconds(self) -> float:
        """CPU seconds so far. Any thread may ask."""
        if self.thread is not None and self.thread.clock is not None and self._began and not self.is_finished:
            with suppress(OSError):  # the thread has ended since
                return time.clock_gettime(self.thread.clock) - self._began
        return self.seconds

    def is_slow(self) -> bool:
        """Whether the engine should stop waiting for it."""
        return self.thread is not None and (self.cpu_seconds() > QUICK_SECONDS or time.monotonic() - self.queued_at > LOST_SECONDS)


class CallBatch:
    """Calls that several threads share. `is_over` is set when each call is finished or abandoned.
    One event for all: waiting for each call would wake the engine's thread as often, and it would
    take the interpreter's lock from the others."""

    def __init__(self, calls: Sequence[ThreadedCall]) -> None:
        self.calls = calls
        self.waiting = deque(calls)
        self.num_open = len(calls)
        self.is_over = threading.Event()

    def count_down(self) -> None:
        """Count one more call as finished or abandoned."""
        self.num_open -= 1
        if not self.num_open:
            self.is_over.set()


class GrammarThreads:
    """A pool of at most `threads` daemon threads, plus a few that an abandoned call still occupies.
    All methods but `_work` run in the engine's thread."""

    def __init__(self, threads: int, niceness: int = 0) -> None:
        self.threads = threads
        self._niceness = niceness
        self._queue: SimpleQueue[CallBatch | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_active = 0
        self._num_abandoned = 0

    def submit(self, calls: Sequence[ThreadedCall], workers: int = 1) -> CallBatch:
        """Start calls in order, in up to `workers` threads."""
        workers = max(1, min(workers, self.threads, len(calls)))
        batch = CallBatch(calls)
        with self._lock:
            while self._num_active < workers and self._num_abandoned < MAX_ABANDONED:
                self._spawn()
            for _ in range(workers):
                self._queue.put(batch)
        return batch

    def wait(self, batch: CallBatch) -> None:
        """Wait until each call is finished or abandoned: it is slow, or no thread is left for
        it."""
        while not batch.is_over.wait(QUICK_SECONDS):
            for call in batch.calls:
                if call.is_slow() or not self._num_active:
                    self.abandon(call, batch)

    def abandon(self, call: ThreadedCall, batch: CallBatch | None = None) -> None:
        """Stop waiting for a call. A call that has not started never starts. The thread of a
        started call ends with the call and is replaced, up to `MAX_ABANDONED` such threads."""
        with self._lock:
            if call.is_finished or call.is_abandoned:
                return
            call.is_abandoned = True
            if batch is not None:
                batch.count_down()
            if call.thread is None:
                return
            _set_niceness(call.thread.id, NICENESS)
            self._num_active -= 1
            self._num_abandoned += 1
            if self._num_abandoned < MAX_ABANDONED:
                self._spawn()
                if batch is not None:
                    self._queue.put(batch)

    def close(self) -> None:
        """End the threads, each after its current call."""
        for _ in range(self._num_active):
            self._queue.put(None)

    def _spawn(self) -> None:
        self._num_active += 1
        threading.Thread(target=self._work, name="grammar-calls", daemon=True).start()

    def _work(self) -> None:
        thread = _Thread.current()
        if self._niceness:
            _set_niceness(thread.id, self._niceness)
        while (batch := self._next_batch()) is not None:
            while (call := self._next_call(batch, thread)) is not None:
                call.run()
                if self._finish(call, batch):
                    return

    def _next_batch(self) -> CallBatch | None:
        """None: the thread ends."""
        while True:
            with suppress(Empty):
                if (batch := self._queue.get(timeout=IDLE_SECONDS)) is not None:
                    return batch
            with self._lock:  # `submit` holds it while it counts active threads
                if self._queue.empty():
                    self._num_active -= 1
                    return None

    def _next_call(self, batch: CallBatch, thread: _Thread) -> ThreadedCall | None:
        with self._lock:
            while batch.waiting:
                call = batch.waiting.popleft()
                if not call.is_abandoned:
                    call.thread = thread
                    return call
        return None

    def _finish(self, call: ThreadedCall, batch: CallBatch) -> bool:
        """Mark a call as finished. Returns whether it was abandoned, which ends this thread."""
        with self._lock:
            call.is_finished = True
            if call.is_abandoned:
                self._num_abandoned -= 1
                return True
            batch.count_down()
            return False


def _set_niceness(thread_id: int, niceness: int) -> None:
    if sys.platform.startswith("linux"):  # elsewhere it would apply to the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
