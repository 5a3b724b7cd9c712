"""`PacedBody`: a large JSON response, which is formatted and encoded a few milliseconds at a time.

`Entries` in it are arrays whose elements are made while they are encoded, so their objects do not
exist all at once, either. All large responses of a server share one place on the event loop, by
tenant. Small responses take no part in this. Used by the routes and the streams. Must not depend on
a dialect's shapes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from frame.entrypoints.engine_client.quotas import FairSemaphore
from frame.entrypoints.http.errors import DisconnectedError

TURN = 0.005  # seconds of work before other tasks run
INLINE_VALUES = 4096  # log-probabilities or numbers of a response that is formatted at once
PIECE_BYTES = 256 * 1024
Event = bytes | Iterator[bytes]  # of a stream: at once, or in steps
_encode = msgspec.json.encode


class Entries:
    """An array that is encoded once. `batch`: elements that are encoded together. `is_nested`: the
    elements are objects with further `Entries`."""

    __slots__ = ("batch", "is_nested", "items")

    def __init__(self, items: Iterable[Any], batch: int = 16, is_nested: bool = False) -> None:
        self.items = iter(items)
        self.batch = batch
        self.is_nested = is_nested


@dataclass(frozen=True, slots=True)
class PacedBody:
    """A response with `Entries`, and with functions that make a value when its turn comes. Plain
    lists in it contain none of either."""

    value: Any


def array_type(count: int) -> Callable[[Iterable[Any]], Any]:
    """What makes an array of a response with so many values: a list, or `Entries`."""
    return list if count <= INLINE_VALUES else Entries


def in_steps(value: dict[str, Any]) -> dict[str, Any]:
    """An object whose lists are encoded in steps, those of its objects too."""
    return {name: in_steps(each) if isinstance(each, dict) else Entries(each) if isinstance(each, list) else each
            for name, each in value.items()}  # fmt: skip


def encode_steps(value: Any) -> Iterator[bytes]:
    """The JSON of a value with `Entries`, in small steps."""
    if isinstance(value, Entries):
        yield from _encode_entries(value)
    elif callable(value):
        yield from encode_steps(value())
    elif isinstance(value, dict):
        start = b"{"
        for name, each in value.items():
            yield start + _encode(name) + b":"
            yield from encode_steps(each)
            start = b","
        yield b"}" if value else b"{}"
    else:
        yield _encode(value)


def _encode_entries(entries: Entries) -> Iterator[bytes]:
    start = b"["
    if entries.is_nested:
        for item in entries.items:
            yield start
            yield from encode_steps(item)
            start = b","
    else:
        while batch := list(islice(entries.items, entries.batch)):
            yield start + _encode(batch)[1:-1]
            start = b","
    yield b"]" if start == b"," else b"[]"


def join_events(events: Sequence[Event]) -> Event:
    """One event or more as one."""
    try:
        return b"".join(events)  # type: ignore[arg-type]
    except TypeError:  # one is made in steps
        return _chain(events)


def _chain(events: Sequence[Event]) -> Iterator[bytes]:
    for event in events:
        if isinstance(event, bytes):
            yield event
        else:
            yield from event


async def collect_pieces(
    turns: FairSemaphore, tenant: str, steps: Iterator[bytes], is_over: Callable[[], bool] | None = None
) -> list[bytes]:
    """The bytes of all steps, in pieces. Raises as `run_turns`."""
    pieces: list[bytes] = []
    buffer = bytearray()

    def collect() -> Iterator[None]:
        for step in steps:
            buffer.extend(step)
            if len(buffer) >= PIECE_BYTES:
                pieces.append(bytes(buffer))
                buffer.clear()
            yield

    await run_turns(turns, tenant, collect(), is_over)
    pieces.append(bytes(buffer))
    return pieces


async def run_turns(turns: FairSemaphore, tenant: str, steps: Iterator[Any], is_over: Callable[[], bool] | None = None) -> None:
    """Run all steps. `turns`: the one place of large responses. Raises DisconnectedError once
    `is_over`."""
    is_done = False
    while not is_done:
        async with turns.hold_slot(tenant):
            until, is_done = time.perf_counter() + TURN, True
            for _ in steps:
                if time.perf_counter() >= until:
                    is_done = False
                    break
            await asyncio.sleep(0)  # with the place, so that one turn runs in a pass of the event loop
        if is_over is not None and is_over():
            raise DisconnectedError


async def each_piece(pieces: list[bytes]) -> AsyncIterator[bytes]:
    """The pieces, which are released one by one; other tasks run between them."""
    pieces.reverse()
    while pieces:
        yield pieces.pop()
        await asyncio.sleep(0)
