"""The launcher `rendezvous`: ranks of several hosts, one `frame serve` on each (torchrun-style).

The first host listens at `parallel.dist_init_addr`; the others connect (`rendezvous_node`), start
the ranks that it asks for, and carry their sockets. Ranks are divided equally, in order. Rank r has
the device `r % (ranks a host)`. Must not know requests or models.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import IO, Any

from pydantic import BaseModel

from frame.core.errors import ConfigurationError
from frame.host import authenticated_link as frames
from frame.host.authenticated_link import Link, LinkError, Places, SocketTunnel, authenticate, read_key
from frame.host.child_process import start_process
from frame.interfaces.launcher import RANK_SOCKETS, SHARED_SOCKETS, Launcher, LauncherContext, Placement, RankPlace, RankProcess

LOOPBACK = "127.0.0.1"
FIRST_WAIT, LATER_WAIT = 600.0, 60.0  # seconds for the other hosts, at the first start and at a restart
REPLY = 30.0  # seconds for a host to start a process
MAX_UNKNOWN = 64  # connections that have not shown that they know the secret
MAX_CANDIDATES = 64  # connections that have shown it, and have not proved it yet
ACCEPTS = 16  # connections accepted at once: fewer than places, so that a host's first message is read before it can lose its place
BACKLOG = 1024  # connections that wait to be accepted

log = logging.getLogger(__name__)


class RemoteInput(io.RawIOBase):
    """The input of a process on another host."""

    def __init__(self, post: Callable[[bytes], None]) -> None:
        self._post = post

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._post(bytes(data))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._post(b"")
        super().close()


class RemoteProcess:
    """A rank's process on another host."""

    def __init__(self, post: Callable[[int, bytes], None], *, pipes_errors: bool) -> None:
        self.pid, self.is_stopped = 0, False
        self.stdin: IO[bytes] | None = RemoteInput(lambda data: post(frames.INPUT, data))  # type: ignore[assignment]
        self.stderr: IO[bytes] | None = None
        self.started: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._post, self._code = post, 0
        self._ended = threading.Event()
        self._errors: int | None = None
        if pipes_errors:
            read, self._errors = os.pipe()
            self.stderr = os.fdopen(read, "rb")

    def write_errors(self, data: bytes) -> None:
        """Standard error of the process; empty: its end."""
        if self._errors is not None and data:
            os.write(self._errors, data)
        elif self._errors is not None:
            os.close(self._errors)
            self._errors = None

    def end(self, code: int) -> None:
        """The process has ended."""
        if not self._ended.is_set():
            self._code = code
            self.write_errors(b"")
            self._ended.set()

    def poll(self) -> int | None:
        return self._code if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._code

    def send_signal(self, sig: int) -> None:
        self._post(frames.SIGNAL, str(int(sig)).encode())

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Node:
    """Another host that has connected: its processes by channel. Runs in the launcher's loop."""

    def __init__(self, link: Link, host: str, tunnel: SocketTunnel) -> None:
        self.link, self.host, self.tunnel = link, host, tunnel
        self.processes: dict[int, RemoteProcess] = {}
        self._last = 0

    def start(self, process: RemoteProcess, channel: int, order: Mapping[str, Any]) -> None:
        self.processes[channel] = process
        self.link.post(frames.START, channel, json.dumps(order).encode())

    def take_channel(self) -> int:
        self._last += 1
        return self._last

    async def run(self) -> None:
        """Handle its frames until the connection ends. Raises LinkError."""
        while True:
            kind, channel, content = await self.link.receive()
            if kind in (frames.OPEN, frames.DATA, frames.CLOSE):
                await self.tunnel.handle(kind, channel, content, lambda name: name in SHARED_SOCKETS)
                continue
            process = self.processes.get(channel)
            if process is None:
                continue
            if kind == frames.STARTED:
                process.started.set_result(int(content))
            elif kind == frames.FAILED:
                process.started.set_exception(OSError(content.decode("utf-8", "replace")))
            elif kind == frames.STOPPED:
                process.is_stopped = bool(content)
            elif kind == frames.ERRORS:
                process.write_errors(content)
            elif kind == frames.EXIT:
                del self.processes[channel]
                process.end(int(content))

    def lose(self) -> None:
        """The host is gone: its processes count as killed."""
        self.tunnel.close()
        self.link.close()
        for process in self.processes.values():
            if not process.started.done():
                process.started.set_exception(OSError("the host is lost"))
            process.end(-signal.SIGKILL)


class RendezvousLauncher(Launcher):
    """Ranks of `context.num_hosts` hosts. Without others, those of this host meet by TCP. `key`:
    the secret of the hosts, if not that of the environment."""

    def __init__(self, context: LauncherContext, options: BaseModel | None = None, key: bytes = b"") -> None:
        super().__init__(context, options)
        self.per_host = context.size // context.num_hosts
        self.host, self.port = split_address(context.address) if context.address else (LOOPBACK, 0)
        self.nodes: dict[int, Node] = {}
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: asyncio.Server | None = None
        self._unknown, self._candidates = Places(MAX_UNKNOWN), Places(max(MAX_CANDIDATES, context.num_hosts))
        self._num_refused = 0  # connections
        self._is_first, self._is_closing = True, False
        self._key = key or (read_key() if context.num_hosts > 1 else b"")

    def place(self) -> Placement:
        hosts = self.context.num_hosts
        if hosts > 1:
            self._listen()
            self._wait_for_nodes(FIRST_WAIT if self._is_first else LATER_WAIT)
            self._is_first = False
        addresses = [self.host, *(self.nodes[number].host for number in range(1, hosts))]
        ranks = (divmod(rank, self.per_host) for rank in range(self.context.size))
        places = tuple(RankPlace(rank, addresses[node], device) for rank, (node, device) in enumerate(ranks))
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.bind((self.host, 0))
            port = probe.getsockname()[1]
        return Placement(places, f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{port}")

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        number = place.rank // self.per_host
        if number == 0:
            return start_process(command, environment, pipes_errors=pipes_errors)
        node = self.nodes.get(number)
        if node is None or self._loop is None:
            raise OSError(f"host {number} is lost")
        loop, channel = self._loop, node.take_channel()
        process = RemoteProcess(lambda kind, data: _post(loop, node.link, kind, channel, data), pipes_errors=pipes_errors)
        order = {"command": mask_command(command, str(self.context.folder)), "environment": dict(environment), "pipes_errors": pipes_errors}
        loop.call_soon_threadsafe(node.start, process, channel, order)
        try:
            process.pid = process.started.result(REPLY)
        except TimeoutError:
            raise OSError(f"host {number} does not answer") from None
        return process

    def serve_node(self) -> None:
        from frame.plugins.launchers.rendezvous_node import serve_node  # this host's side alone

        asyncio.run(serve_node(self.context.host_rank, self.host, self.port, self._key))

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    # the loop's thread ----------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take connections from now on. Raises OSError."""
        if self._loop is not None:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rendezvous", daemon=True)
        self._thread.start()
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listener = socket.create_server((self.host, self.port), family=family)
            self._server = self._run(asyncio.start_server(self._accept, sock=listener, backlog=ACCEPTS))
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigurationError(f"parallel.dist_init_addr: cannot listen on {self.host}:{self.port} ({error.strerror})") from None

    def _run(self, what: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(REPLY)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer, number = writer.get_extra_info("peername"), 0

        def become_candidate() -> None:
            self._unknown.discard(writer)
            self._candidates.add(writer)

        self._unknown.add(writer)
        try:
            try:
                link = await authenticate(reader, writer, self._key, is_listener=True, when_known=become_candidate)
            finally:
                self._unknown.discard(writer)
                self._candidates.discard(writer)
            _, number, content = await link.receive()
            if not 1 <= number < self.context.num_hosts or number in self.nodes:
                link.post(frames.FAILED, 0, f"parallel.node_rank {number} is not free".encode())
                await link.drain()
                raise LinkError(f"a host connects as parallel.node_rank {number}, which is not free")
        except (LinkError, OSError) as error:
            self._num_refused += 1
            if self._num_refused.bit_count() == 1:  # the 1st, 2nd, 4th, …: unknown hosts must not fill the log
                log.warning("refused %s: %s (%d connections so far)", peer, error, self._num_refused)
            writer.close()
            return
        await self._run_node(number, Node(link, content.decode(), SocketTunnel(link, self.context.folder, 2)))

    async def _run_node(self, number: int, node: Node) -> None:
        beating = asyncio.create_task(node.link.beat())
        for rank in range(number * self.per_host, (number + 1) * self.per_host):
            for name in RANK_SOCKETS:
                await node.tunnel.listen(name.format(rank=rank))
        with self._changed:
            self.nodes[number] = node
            self._changed.notify_all()
        try:
            await node.run()
        except LinkError as error:
            if not self._is_closing:
                log.warning("host %d (%s) is lost: %s", number, node.host, error)
        finally:
            beating.cancel()
            with self._changed:
                self.nodes.pop(number, None)
            node.lose()

    async def _stop(self) -> None:
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for node in list(self.nodes.values()):
            node.link.post(frames.BYE)
            await node.link.drain()
            node.lose()

    def _wait_for_nodes(self, seconds: float) -> None:
        """Raises OSError where hosts are missing."""
        count = self.context.num_hosts - 1
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.nodes) == count, seconds):
                missing = sorted(set(range(1, count + 1)) - self.nodes.keys())
                raise OSError(f"the hosts with parallel.node_rank {', '.join(map(str, missing))} have not come in {seconds:g} s")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `parallel.dist_init_addr`. Raises ConfigurationError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"parallel.dist_init_addr is {address!r}; write the first host's address as HOST:PORT")
    return host, int(port)


def mask_command(command: Sequence[str], folder: str) -> list[str]:
    """The command with placeholders for this host's Python and folder."""
    return ["{python}" if argument == sys.executable else "{folder}" if argument == folder else argument for argument in command]


def _post(loop: asyncio.AbstractEventLoop, link: Link, kind: int, channel: int, data: bytes) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(link.post, kind, channel, data)
