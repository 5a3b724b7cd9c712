"""Another host's side of the launcher `rendezvous`: starts the ranks that the first host asks for.

Who has the shared secret can run commands here, as this user. When the connection is lost all ranks
are killed, and the host connects again. Must not know requests or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from frame.host import authenticated_link as frames
from frame.host.authenticated_link import Link, LinkError, SocketTunnel, authenticate
from frame.host.child_process import is_stopped, start_process
from frame.host.socket_directory import SocketDirectory
from frame.interfaces.launcher import SHARED_SOCKETS

RETRY = 0.5  # seconds between two attempts to connect
LINGER = 5.0  # seconds for the first host to start again: the offline engine makes a new launcher


class Rank:
    """A process that the first host asked for."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.is_stopped = False  # by SIGSTOP, as the first host was told
        self.writer = ThreadPoolExecutor(1)  # a process that does not read must not stop the loop

    def write(self, data: bytes) -> None:
        """To its input; empty: close it."""
        self.writer.submit(self._write, data)

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            if data:
                self.process.stdin.write(data)
                self.process.stdin.flush()
            else:
                self.process.stdin.close()


async def serve_node(number: int, host: str, port: int, key: bytes) -> None:
    """Run ranks until the first host has said that it ends, and does not start again."""
    end = float("inf")
    while time.monotonic() < end:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            link = await authenticate(reader, writer, key, is_listener=False)
        except OSError as error:
            if end == float("inf"):
                _say(f"cannot reach {host}:{port} ({error}); trying again")
            await asyncio.sleep(RETRY)
            continue
        end = time.monotonic() + LINGER if await _serve(link, number) else float("inf")
        await asyncio.sleep(RETRY)


async def _serve(link: Link, number: int) -> bool:
    """Serve one connection. -> whether the first host ends in order."""
    sockets = SocketDirectory()
    folder = sockets.path
    tunnel, ranks, loop = SocketTunnel(link, folder, 1), dict[int, Rank](), asyncio.get_running_loop()
    link.post(frames.STARTED, number, link.local_host.encode())
    tasks = [asyncio.create_task(link.beat()), asyncio.create_task(_report_stops(link, ranks))]
    _say(f"host {number} is connected")
    try:
        for name in SHARED_SOCKETS:
            await tunnel.listen(name)
        while True:
            kind, channel, content = await link.receive()
            if kind in (frames.OPEN, frames.DATA, frames.CLOSE):
                await tunnel.handle(kind, channel, content, lambda name: "/" not in name and name not in SHARED_SOCKETS)
            elif kind == frames.START:
                _start(link, loop, ranks, channel, json.loads(content), folder)
            elif kind == frames.BYE:
                return True
            elif kind == frames.FAILED:
                _say(f"the first host refuses this one: {content.decode('utf-8', 'replace')}; trying again")
                return False
            elif (rank := ranks.get(channel)) is not None and kind == frames.INPUT:
                rank.write(content)
            elif rank is not None and kind == frames.SIGNAL:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.send_signal(int(content))
    except LinkError as error:
        _say(str(error))
        return False
    finally:
        for task in tasks:
            task.cancel()
        tunnel.close()
        link.close()
        for rank in ranks.values():
            rank.process.kill()
            rank.writer.shutdown(wait=False)
        sockets.remove()


async def _report_stops(link: Link, ranks: Mapping[int, Rank]) -> None:
    """Tell which processes are stopped (SIGSTOP), until cancelled."""
    while True:
        await asyncio.sleep(frames.BEAT)
        for channel, rank in ranks.items():
            if (now := is_stopped(rank.process.pid)) != rank.is_stopped:
                rank.is_stopped = now
                link.post(frames.STOPPED, channel, b"1" if now else b"")


def _start(
    link: Link, loop: asyncio.AbstractEventLoop, ranks: dict[int, Rank], channel: int, order: Mapping[str, Any], folder: Path
) -> None:
    places = {"{python}": sys.executable, "{folder}": str(folder)}
    command = [places.get(argument, argument) for argument in order["command"]]
    try:
        process = start_process(command, order["environment"], pipes_errors=bool(order["pipes_errors"]))
    except OSError as error:
        link.post(frames.FAILED, channel, str(error).encode())
        return
    ranks[channel] = Rank(process)
    link.post(frames.STARTED, channel, str(process.pid).encode())

    def watch() -> None:
        if process.stderr is not None:
            while data := os.read(process.stderr.fileno(), 65536):
                _post(loop, link, frames.ERRORS, channel, data)
            process.stderr.close()
        code = process.wait()
        _post(loop, link, frames.EXIT, channel, str(code).encode())
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ranks.pop, channel, None)

    threading.Thread(target=watch, daemon=True).start()


def _post(loop: asyncio.AbstractEventLoop, link: Link, kind: int, channel: int, content: bytes) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(link.post, kind, channel, content)


def _say(text: str) -> None:
    sys.stderr.write(f"frame: {text}\n")
    sys.stderr.flush()
