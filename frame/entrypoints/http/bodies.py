"""`Bodies`: what the bodies of all requests together may take, in bytes and in time; and how deeply JSON may be nested. Knows no route."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frame.entrypoints.http.errors import ApiError

MOST_LEVELS = 128  # of JSON: deeper nesting is refused before anything recursive reads it
AT_ONCE = 16  # bodies of the largest size that are held together
PATIENCE = 10  # a whole body may take so many times the pause that is allowed within it
_SLICE = 64 * 1024
_QUOTE = ord('"')
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1


@dataclass(slots=True)
class Bodies:
    """One a server. `most` bytes are held at once; `pause` is the longest time between two pieces of a body, in seconds."""

    most: int
    pause: float
    held: int = 0

    def take(self, size: int) -> None:
        """Hold `size` bytes more. Raises ApiError 503 when there is no room for them."""
        if self.held + size > self.most:
            error = ApiError(503, "the server holds as many bytes of requests as it may; try again later", retry_after=1)
            error.headers = ((b"connection", b"close"),)  # the rest of the body is not read
            raise error
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size


def is_too_deep(data: bytes) -> bool:
    """Whether JSON is nested deeper than `MOST_LEVELS`. Cheap for what is plainly not; looks no further than the first place that is."""
    if data.count(b"{") + data.count(b"[") <= MOST_LEVELS:
        return False
    if b"\\" in data:
        data = data.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    level, is_string = 0, 0
    for start in range(0, len(data), _SLICE):
        part = np.frombuffer(data, np.uint8, min(_SLICE, len(data) - start), start)
        inside = (part == _QUOTE).cumsum(dtype=np.int32) + is_string & 1
        steps = (_STEPS[part] * (1 - inside)).cumsum(dtype=np.int32)
        if level + int(steps.max()) > MOST_LEVELS:
            return True
        level += int(steps[-1])
        is_string = int(inside[-1])
    return False
