"""`FairQueue`: jobs of several keys that wait for a place, taken round-robin by key.

Used by the grammar compiler and, as `FairSemaphore`, by the servers. Must not know what a job or a
key is. Threads may share it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """`places` jobs run at once. Once jobs of two keys have been seen, one key gets `max_per_key`
    places, all but one by default, so that a job of another key never waits for the end of the
    first key's jobs. Entries exist while a key has jobs."""

    def __init__(self, places: int, max_per_key: int | None = None) -> None:
        self._free = self._max_per_key = places
        self._shared_max = max(1, places - 1) if max_per_key is None else max_per_key
        self._waiting: dict[str, deque[Job]] = {}  # by key, in the order of their turns
        self._num_running: Counter[str] = Counter()  # by key
        self._first_key: str | None = None
        self._lock = threading.Lock()

    def put(self, key: str, job: Job) -> None:
        """Add a job behind the others of its key."""
        with self._lock:
            if self._first_key is None:
                self._first_key = key
            elif key != self._first_key:
                self._max_per_key = self._shared_max
            self._waiting.setdefault(key, deque()).append(job)

    def take(self) -> tuple[str, Job] | None:
        """Remove the next job that may run, which holds a place until `release`. None: no job waits
        for which there is a place."""
        with self._lock:
            may_run = (key for key in self._waiting if self._num_running[key] < self._max_per_key)
            key = next(may_run, None) if self._free else None
            if key is None:
                return None
            queue = self._waiting.pop(key)
            job = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind the other keys
            self._free -= 1
            self._num_running[key] += 1
            return key, job

    def release(self, key: str) -> None:
        """Free the place of a job of this key."""
        with self._lock:
            self._free += 1
            self._num_running[key] -= 1
            if not self._num_running[key]:
                del self._num_running[key]

    def discard(self, key: str, job: Job) -> None:
        """Remove a job that waits, if it does."""
        with self._lock:
            queue = self._waiting.get(key, deque())
            if job in queue:
                queue.remove(job)
            if not queue:
                self._waiting.pop(key, None)
