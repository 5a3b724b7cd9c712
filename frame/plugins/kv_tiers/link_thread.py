"""An event loop in a thread, for the links between disaggregated servers, and what both ends of a
link say. Used by `LeaseServer` and `PeerLinks`. Must not know a block's contents."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from frame.host.authenticated_link import Link

T = TypeVar("T")
# kinds of frames, beside those of `authenticated_link`; the channel is the number of the request
HELLO, ACQUIRE, RELEASE, REPLY, REFUSAL = range(64, 69)


class Acquire(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the blocks of a lease. `num_registered`: of the last description that the decode
    server got."""

    lease: str
    num_registered: int = 0


class Blocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a lease: where they are in the prefill server's memory, and their digests.
    `description`: of the NIXL agent where it has changed; else empty. `device`: the number of the
    memory's device."""

    addresses: list[int]
    digests: list[bytes]
    num_registered: int
    description: bytes = b""
    device: int = 0


def find_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """One sentence that names the first property in which two servers differ, with both values; ""
    where there is none."""
    for name in (*ours, *(name for name in theirs if name not in ours)):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)} on the prefill server and {theirs.get(name)} on the decode server; start both with the same"
    return ""


class LinkThread:
    """Runs coroutines in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine. Threads may wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, which may have ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close(self, timeout: float) -> None:
        """Cancel what runs, and end the thread, waiting up to `timeout` seconds."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel_all)
            self._thread.join(timeout)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(0.05, self._loop.stop)  # after the cancelled tasks have ended


@contextlib.asynccontextmanager
async def beating(link: Link) -> Any:
    """Send heartbeats of a link during the block, and close it at the end."""
    task = asyncio.ensure_future(link.beat())
    try:
        yield
    finally:
        task.cancel()
        link.close()
