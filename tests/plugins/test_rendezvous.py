"""The launcher `rendezvous`: two "hosts" are processes with folders of their own on this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from frame import Engine
from frame.config.resolve import ResolveError
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.entrypoints.configuration.prepare import prepare
from frame.host.authenticated_link import (
    INPUT,
    KEY_VARIABLE,
    LARGEST,
    Link,
    LinkError,
    Places,
    SocketTunnel,
    authenticate,
    read_key,
)  # fmt: skip
from frame.interfaces.launcher import LauncherContext
from frame.plugins.launchers.rendezvous import MAX_UNKNOWN, RendezvousLauncher, mask_command, split_address
from frame.plugins.launchers.rendezvous_node import serve_node
from tests.entrypoints.serving import free_port, wait_until

KEY = "a secret of this test"


async def connect(listener_key: bytes, node_key: bytes) -> tuple[Any, Any, tuple[Any, Any]]:
    """Both ends of a connection, or what each end raised; and the streams of the end that
    connects."""
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (found,) = await asyncio.gather(authenticate(reader, writer, listener_key, is_listener=True), return_exceptions=True)
        made.set_result(found)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    streams = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    (node,) = await asyncio.gather(authenticate(*streams, node_key, is_listener=False), return_exceptions=True)
    server.close()
    return await made, node, streams


def test_both_ends_prove_the_secret() -> None:
    async def main() -> None:
        listener, node, _ = await connect(b"a" * 16, b"b" * 16)
        assert isinstance(listener, LinkError)
        assert isinstance(node, LinkError)
        listener, node, _ = await connect(b"a" * 16, b"a" * 16)
        assert isinstance(listener, Link)
        node.post(INPUT, 7, b"content")
        assert await listener.receive() == (INPUT, 7, b"content")
        listener.post(INPUT, 8, b"")
        assert await node.receive() == (INPUT, 8, b"")

    asyncio.run(main())


def test_connections_that_prove_nothing_are_bounded(tmp_path: Path) -> None:
    """The oldest one loses its place to a new one; all are closed after a time."""
    launcher = RendezvousLauncher(LauncherContext(2, tmp_path, 2, 0, f"127.0.0.1:{free_port()}"), key=b"a" * 16)
    try:
        launcher._listen()
        where = (launcher.host, launcher.port)
        connections = [socket.create_connection(where, 10) for _ in range(MAX_UNKNOWN + 8)]
        for connection in connections:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        wait_until(lambda: not len(launcher._unknown), 10)
        for connection in connections:
            connection.close()
    finally:
        launcher.close()


class FakeWriter:
    """A connection from `address`; it is its own transport."""

    def __init__(self, address: str) -> None:
        self.address, self.is_aborted = address, False
        self.transport = self

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return self.address, 1

    def abort(self) -> None:
        self.is_aborted = True


def test_an_address_with_many_connections_loses_its_places() -> None:
    places, writers = Places(4), [FakeWriter(address) for address in "abbbbcc"]
    for writer in writers:
        places.add(writer)  # type: ignore[arg-type]
        assert len(places) <= 4
    assert [writer.is_aborted for writer in writers] == [False, True, True, True, False, False, False]
    places.discard(writers[0])  # type: ignore[arg-type]
    assert len(places) == 3


@pytest.mark.parametrize("attack", ["changed", "again", "large", "reflected"])
def test_frames_of_others_are_refused(attack: str) -> None:
    async def main() -> None:
        listener, node, (_, writer) = await connect(b"a" * 16, b"a" * 16)
        sent: list[bytes] = []
        write, writer.write = writer.write, sent.append
        node.post(INPUT, 1, b"an order")
        (frame,) = sent
        writer.write = write
        if attack == "changed":
            writer.write(frame.replace(b"order", b"crime"))
        elif attack == "again":
            writer.write(frame)
            assert await listener.receive() == (INPUT, 1, b"an order")
            writer.write(frame)
        elif attack == "large":
            writer.write((LARGEST + 1).to_bytes(4, "big") + frame[4:])
        else:  # what one end sends, sent back to it
            listener._writer.write(frame)
            listener = node
        with pytest.raises(LinkError, match=r"too large|does not have the code"):
            await listener.receive()

    asyncio.run(main())


def test_a_tunnel_connects_sockets_of_two_folders(tmp_path: Path) -> None:
    async def main() -> None:
        here, there = tmp_path / "a", tmp_path / "b"
        here.mkdir()
        there.mkdir()
        ends = (await connect(b"a" * 16, b"a" * 16))[:2]
        tunnels = [SocketTunnel(link, folder, number) for number, (link, folder) in enumerate(zip(ends, (here, there), strict=True))]

        async def serve(link: Link, tunnel: SocketTunnel) -> None:
            while True:
                await tunnel.handle(*await link.receive(), lambda name: name == "echo")

        tasks = [asyncio.create_task(serve(*pair)) for pair in zip(ends, tunnels, strict=True)]

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readexactly(5))[::-1])

        await asyncio.start_unix_server(echo, there / "echo")
        await tunnels[0].listen("echo")
        await tunnels[0].listen("other")
        reader, writer = await asyncio.open_unix_connection(here / "echo")
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"olleh"
        await asyncio.open_unix_connection(here / "other")
        (refused,) = await asyncio.gather(tasks[1], return_exceptions=True)
        assert "opens the socket 'other'" in str(refused)
        tasks[0].cancel()

    asyncio.run(main())


@contextmanager
def two_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RendezvousLauncher, subprocess.Popen[bytes], Path]]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    address = f"127.0.0.1:{free_port()}"
    code = f"""if True:
        from pathlib import Path
        from frame.interfaces.launcher import LauncherContext
        from frame.plugins.launchers.rendezvous import RendezvousLauncher
        RendezvousLauncher(LauncherContext(4, Path("."), 2, 1, {address!r})).serve_node()
    """
    with tempfile.TemporaryDirectory(prefix="node-", dir="/tmp") as temporary:  # pytest's folder may be too long for sockets
        node = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": temporary})
        launcher = RendezvousLauncher(LauncherContext(4, folder, 2, 0, address))
        try:
            yield launcher, node, Path(temporary)
        finally:
            launcher.close()
            node.wait(20)


def test_processes_of_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_hosts(tmp_path, monkeypatch) as (launcher, node, temporary):
        places = launcher.place().ranks
        assert [(place.rank, place.local_index) for place in places] == [(0, 0), (1, 1), (2, 0), (3, 1)]
        code = "import os, sys; print(os.environ['OWN'], sys.argv[1], sys.stdin.readline(), file=sys.stderr, flush=True); sys.exit(5)"
        command = [sys.executable, "-c", code, str(tmp_path)]
        process = launcher.start(places[3], command, {"OWN": "x"}, pipes_errors=True)
        assert process.pid in {child.pid for child in psutil.Process(node.pid).children()}
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"a line\n")
        own, folder, line = process.stderr.read().decode().split(maxsplit=2)
        assert (own, line.strip(), process.wait(10)) == ("x", "a line", 5)
        assert Path(folder).parent == temporary  # its own folder in place of the first host's
        sleeping = launcher.start(places[2], [sys.executable, "-c", "import time; time.sleep(60)"], {}, pipes_errors=False)
        with pytest.raises(subprocess.TimeoutExpired):
            sleeping.wait(0.1)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            sleeping.send_signal(number)
            wait_until(lambda expected=number == signal.SIGSTOP: sleeping.is_stopped is expected, 10)
        sleeping.kill()
        assert sleeping.wait(10) == -signal.SIGKILL
        with pytest.raises(OSError, match="no-such-program"):
            launcher.start(places[2], ["/no-such-program"], {}, pipes_errors=False)
        left = launcher.start(places[2], [sys.executable, "-c", "import time; time.sleep(60)"], {}, pipes_errors=False)
        node.kill()
        assert left.wait(10) == -signal.SIGKILL
        with pytest.raises(OSError, match="host 1 is lost"):
            launcher.start(places[2], [sys.executable], {}, pipes_errors=False)


@pytest.mark.slow
def test_a_model_on_two_hosts_survives_the_death_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens equal those of one process, before and after a rank of the second host is
    killed."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    (tmp_path / "node").mkdir()
    keys: dict[str, Any] = {"max_total_tokens": 256, "threads": 1}
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with Engine(dtype="float32", device="cpu", **keys) as engine:
        expected = engine.generate([5, 6, 7, 8], params).token_ids
    address = f"127.0.0.1:{free_port()}"
    flags = ["--tp", "2", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", address, "--device", "cpu"]
    node = subprocess.Popen([sys.executable, "-m", "frame", "serve", *flags], env={**os.environ, "TMPDIR": str(tmp_path / "node")})
    try:
        with Engine(dtype="float32", device="cpu", tp=2, nnodes=2, dist_init_addr=address, **keys) as engine:
            assert engine.info["plugins"]["launcher"] == ["rendezvous"]
            assert engine.generate([5, 6, 7, 8], params).token_ids == expected
            (rank,) = psutil.Process(node.pid).children()
            rank.kill()
            deadline = time.monotonic() + 30
            while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.05)
            assert engine.generate([5, 6, 7, 8], params).token_ids == expected
        assert node.wait(20) == 0
    finally:
        node.kill()


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        ({"nnodes": 2, "tp": 2}, "set parallel.dist_init_addr to HOST:PORT"),
        ({"dist_init_addr": "a:1"}, "parallel.dist_init_addr is 'a:1', but parallel.nnodes is 1"),
        ({"node_rank": 1}, "parallel.node_rank is 1, but parallel.nnodes is 1"),
        ({"nnodes": 2, "dist_init_addr": "a", "tp": 2}, "is 'a'; write the first host's address as HOST:PORT"),
        ({"nnodes": 2, "dist_init_addr": "a:1", "tp": 1}, "does not divide 1 rank"),
        ({"nnodes": 2, "dist_init_addr": "a:1", "tp": 2, "dp": 2}, "are on one host"),
        ({"nnodes": 2, "dist_init_addr": "a:1", "tp": 2, "launcher": "local"}, "starts ranks on this host only"),
    ],
)
def test_divisions_among_hosts_that_cannot_be(parallel: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ResolveError, match=sentence):
        prepare(FrameConfig.model_validate({"parallel": parallel, "execution": {"device": "cpu"}}))


def test_addresses_and_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert mask_command([sys.executable, "/folder", "x"], "/folder") == ["{python}", "{folder}", "x"]
    for wrong in ("host", ":80", "host:0", "host:²", "host:port"):
        with pytest.raises(ConfigurationError, match="HOST:PORT"):
            split_address(wrong)
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigurationError, match="at least 16 characters in FRAME_DIST_KEY"):
        read_key()
    assert asyncio.iscoroutinefunction(serve_node)
