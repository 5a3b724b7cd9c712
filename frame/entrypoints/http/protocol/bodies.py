"""`Bodies`: bounds on request bodies in bytes and time, alone and together; `problem_of`: bounds on
JSON before it is decoded.

Decoding blocks the event loop, so its time is bounded before: a list or an object takes up to 0.5
us, a key up to 1 us, another value 0.1 us, and the bytes of texts almost nothing. Used by
`RequestContext`. Must not depend on a route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frame.entrypoints.engine_client.quotas import FairSemaphore, LoopTurns
from frame.entrypoints.http.errors import CLOSE, ApiError
from frame.host.host_memory import return_freed_memory

MAX_LEVELS = 128  # of JSON: deeper nesting is refused before anything recursive reads it
MAX_MESSAGES = 4096
MAX_FIELD_CHARS = 256 * 1024  # of a text that is no prompt: a name, a grammar
PROMPT_FIELDS = frozenset(
    {"prompt", "text", "input", "instructions", "instruction", "system", "query", "queries", "text_1", "text_2", "items", "documents"}
    | {"image_data", "video_data", "audio_data"}
)
MAX_NODES = 32 * 1024  # lists, objects and keys of one body
MAX_VALUES = 256 * 1024  # elements of lists and objects of one body, where the context is not larger
MIN_BODY = 4 * 1024 * 1024  # bytes that a body may have whatever the context
TOKEN_BYTES = 16  # of a body for each token of the context
SMALL_BODY = 1024 * 1024  # bytes of a body that holds no prompt
AT_ONCE = 16  # bodies of the largest size that are held together
PATIENCE = 10  # the longest time of a whole body, in longest pauses between two pieces
MIN_RATE = 8 * 1024  # bytes a second that a body needs once the first pause is used up
TURN_BYTES = 16 * 1024  # of bodies that are decoded, validated and converted in one pass of the event loop: 2 to 15 ms
TRIM_BYTES = 64 * 1024 * 1024  # after this many, freed memory is returned to the system, which the C library keeps
TRIM_DELAY = 5.0  # seconds without such an amount: returning it stops the server for some 20 ms, and new memory is slow
_SLICE = 64 * 1024
_QUOTE, _COMMA = b'",'
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1


@dataclass(slots=True)
class Bodies:
    """The bodies of one server. `maximum`: bytes that are held at once. `pause`: seconds between
    two pieces of a body at most. `max_values`: values of one body's JSON.

    An owner is a key's tenant, or a client's address. It may hold as many bytes as it leaves free,
    so that however many are held by some, others find room. turns: of the work on complete bodies.
    `searching`: the place of the body that a thread searches; several such threads would take the
    interpreter's lock in turns with the event loop.
    """

    maximum: int
    pause: float
    max_values: int = MAX_VALUES
    turns: LoopTurns = field(default_factory=lambda: LoopTurns(TURN_BYTES))
    searching: FairSemaphore = field(default_factory=lambda: FairSemaphore(1))
    held: int = 0
    held_by: dict[str, int] = field(default_factory=dict)
    peak: int = 0  # of `held`, since it fell to a quarter
    _trim: asyncio.TimerHandle | None = None

    def take(self, size: int, owner: str) -> None:
        """Hold `size` bytes more. Raises ApiError 503 beyond `maximum`, and 429 beyond the owner's
        share."""
        held, owned = self.held + size, self.held_by.get(owner, 0) + size
        if held > self.maximum:
            raise ApiError(503, "the server holds as many bytes of requests as it may; try again later", retry_after=1, headers=CLOSE)
        if owned > self.maximum - held:
            sentence = (
                f"the requests of this client would hold {owned} bytes, more than the {max(0, self.maximum - held)} that all clients "
                f"leave free of {self.maximum}; try again later"
            )
            raise ApiError(429, sentence, code="too_many_bytes_of_client", retry_after=1, headers=CLOSE)
        self.held, self.held_by[owner] = held, owned
        self.peak = max(self.peak, held)

    def give_back(self, size: int, owner: str) -> None:
        self.held -= size
        owned = self.held_by.pop(owner, 0) - size
        if owned > 0:
            self.held_by[owner] = owned
        if self.peak >= TRIM_BYTES and self.held <= self.peak // 4:
            self.peak = self.held
            if self._trim is not None:
                self._trim.cancel()
            loop = asyncio.get_running_loop()
            self._trim = loop.call_later(TRIM_DELAY, loop.run_in_executor, None, return_freed_memory)


def prompt_limit(max_context: int) -> int:
    """Bytes of a body with prompts, for a context of `max_context` tokens."""
    return max(MIN_BODY, TOKEN_BYTES * max_context)


def value_limit(max_context: int) -> int:
    """Values of a body's JSON: a prompt of token ids that fills the context fits twice."""
    return max(MAX_VALUES, 2 * max_context)


def problem_of(data: bytes, max_values: int = MAX_VALUES) -> str | None:
    """Why JSON is not decoded: it is nested too deeply, or has too many parts; None where it may be
    decoded. The content of texts does not count.

    Cheap for small bodies; stops at the first place beyond a bound. Mostly releases the
    interpreter's lock."""
    whole = np.frombuffer(data, np.uint8)
    opening = int(np.count_nonzero(whole == ord("[")) + np.count_nonzero(whole == ord("{")))
    nodes = opening + int(np.count_nonzero(whole == ord(":")))
    if opening <= MAX_LEVELS and nodes <= MAX_NODES and np.count_nonzero(whole == _COMMA) <= max_values:
        return None
    level, nodes, values = 0, 0, 0
    for outside in _outside_texts(data):
        steps = _STEPS[outside]
        if level + int(steps.cumsum(dtype=np.int32).max(initial=0)) > MAX_LEVELS:
            return f"the body is nested deeper than {MAX_LEVELS} levels; send fewer"
        level += int(steps.sum())
        nodes += int(np.count_nonzero(steps > 0)) + int(np.count_nonzero(outside == ord(":")))
        if nodes > MAX_NODES:
            return f"the body holds more than {MAX_NODES} lists, objects and keys; send less at once"
        values += int(np.count_nonzero(outside == _COMMA))
        if values > max_values:
            return f"the body holds more than {max_values} values; send less at once"
    return None


def count_names(data: bytes) -> int:
    """The number of names in the objects of a JSON text: its colons outside of texts."""
    if (maximum := data.count(b":")) < 2:
        return maximum
    return sum(int(np.count_nonzero(outside == ord(":"))) for outside in _outside_texts(data))


def check_text_sizes(fields: Mapping[str, Any]) -> None:
    """Raise ApiError 400 for a text of more than `MAX_FIELD_CHARS` that is not a prompt."""
    for name, value in fields.items():
        if isinstance(value, str) and len(value) > MAX_FIELD_CHARS and name not in PROMPT_FIELDS:
            raise ApiError(400, f"{name} has {len(value)} characters; it may have {MAX_FIELD_CHARS}", name)


def _outside_texts(data: bytes) -> Iterator[np.ndarray]:
    """The bytes of the JSON text that are in no text, in pieces: uint8."""
    is_string = 0
    for piece in _slices(data):
        content = np.frombuffer(piece, np.uint8)
        inside = (content == _QUOTE).cumsum(dtype=np.int32) + is_string & 1
        yield content[inside == 0]
        is_string = int(inside[-1])


def _slices(data: bytes) -> Iterator[bytes]:
    """Pieces of the JSON text, with escaped characters replaced."""
    start = 0
    while start < len(data):
        end = min(start + _SLICE, len(data))
        piece = data[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # no escape is cut in two
            end += 1
            piece = data[start:end]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        yield piece
        start = end
