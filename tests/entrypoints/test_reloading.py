"""SIGHUP renews keys, the certificate and the log's level while requests run; on a terminal it ends
the server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest

from frame.core.ipc.transport import ZmqSender
from frame.core.messages import Tokenized
from tests.entrypoints.serving import FAKE_SERVE, RunningServer, wait_until
from tests.entrypoints.test_tls import CHAIN, KEY

NEW = CHAIN.parent / "renewed.pem"  # chain and key in one file


def presented(address: str) -> bytes:
    """The certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=10))


def der(path: Path) -> bytes:
    text = path.read_text()
    return ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERT") :].strip())


def warn(server: RunningServer) -> None:
    """Make the engine log a warning."""
    command = server.children()["scheduler"].cmdline()
    sender = ZmqSender(f"ipc://{command[command.index('--sockets') + 1]}/engine")
    sender.send(Tokenized(id="x"))  # which engines do not take
    sender.close()


def test_what_sighup_renews(checkpoint: Path, tmp_path: Path) -> None:
    keys, chain, key, config = (tmp_path / name for name in ("keys", "chain.pem", "key.pem", "frame.yaml"))
    keys.write_text("old\nstays\n")
    shutil.copy(CHAIN, chain)
    shutil.copy(KEY, key)
    config.write_text("log: {level: error}\nserver: {grpc_port: 0, admin_port: 0}\n")
    files = ("--api-keys", str(keys), "--ssl-certfile", str(chain), "--ssl-keyfile", str(key), "--config", str(config))
    with RunningServer(checkpoint, *files, "--max-model-len", "512", "--max-total-tokens", "1024") as server:
        where = [server.url.removeprefix("https://"), server.grpc_address]
        where.append(next(line.split("//")[-1].strip() for line in server.lines if "admin routes on https" in line))
        assert {presented(address) for address in where} == {der(CHAIN)}
        warn(server)

        def status(name: str) -> int:
            headers = {"authorization": f"Bearer {name}"}
            return httpx.get(server.url + "/v1/models", headers=headers, verify=False, timeout=30).status_code

        assert (status("old"), status("stays"), status("new")) == (200, 200, 401)

        def hang_up(said: str) -> None:
            before = len(server.lines)
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: any(said in line for line in server.lines[before:]) or server.process.poll() is not None)
            assert server.process.poll() is None

        keys.write_text("sha256:short\n")
        hang_up("nothing is reloaded, and what was read before stays in use: server.api_keys: line 1")
        assert status("old") == 200
        keys.write_text("stays\nnew\n")
        chain.write_bytes(NEW.read_bytes())
        hang_up("nothing is reloaded")  # the key is another one's
        assert (status("old"), presented(where[0])) == (200, der(CHAIN))
        key.write_bytes(NEW.read_bytes())
        config.write_text("log: {level: debug}\nserver: {grpc_port: 0, admin_port: 0}\n")
        hang_up("SIGHUP: reloaded log level debug, the API keys of 2 tenants, the certificate")
        assert (status("old"), status("stays"), status("new")) == (401, 200, 200)
        assert {presented(address) for address in where} == {der(NEW)}
        assert not any("does not take Tokenized" in line for line in server.lines)
        warn(server)
        wait_until(lambda: any("does not take Tokenized" in line for line in server.lines))
        server.children()["scheduler"].kill()
        wait_until(lambda: any("engine ready again" in line for line in server.lines))
        before = len(server.lines)
        warn(server)
        wait_until(lambda: any("does not take Tokenized" in line for line in server.lines[before:]))  # its successor has the new level too
        channel = grpc.secure_channel(where[1], grpc.ssl_channel_credentials(NEW.read_bytes()))
        call = channel.unary_unary("/frame.v1.Frame/ServerInfo")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", metadata=(("x-api-key", "old"),), timeout=30)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        channel.close()
        assert server.stop() == 0


@pytest.mark.slow
def test_the_end_of_a_terminal_ends_the_server(checkpoint: Path) -> None:
    controller, terminal = os.openpty()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*FAKE_SERVE, "--model", str(checkpoint), "--port", str(port)]
    process = subprocess.Popen(command, stdin=terminal, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        while b"ready on" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=300)
        assert process.returncode == 0
    finally:
        process.kill()
        os.close(controller)
        os.close(terminal)
