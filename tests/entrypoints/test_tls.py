"""TLS: HTTP and gRPC under one certificate, streams included; what is no pair is refused before
anything slow starts."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from click.testing import CliRunner
from websockets.sync.client import connect

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.cli.main import cli
from frame.entrypoints.tls import load_certificate
from tests.entrypoints.grpc.test_service import IDS, Client, listening, params
from tests.entrypoints.serving import RunningRouter, RunningServer

FILES = Path(__file__).parent / "certificates"
CHAIN, KEY = FILES / "chain.pem", FILES / "key.pem"  # of localhost, for a hundred years, signed by itself


def test_without_settings_there_is_no_tls() -> None:
    assert load_certificate(ServerSection()) is None


def test_one_file_may_hold_both(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(KEY.read_bytes() + CHAIN.read_bytes())
    certificate = load_certificate(ServerSection(ssl_certfile=str(both)))
    assert certificate is not None and certificate.read_pems() == (both.read_bytes(), both.read_bytes())


@pytest.mark.parametrize(
    ("chain", "key", "part"),
    [
        (None, str(KEY), "without server.ssl_certfile"),
        (str(CHAIN), "/nowhere/key.pem", "No such file"),
        (str(CHAIN), None, "PEM chain and its key"),
        (str(KEY), str(KEY), "PEM chain and its key"),
        (__file__, str(KEY), "PEM chain and its key"),
    ],
)
def test_what_is_no_pair_is_refused(chain: str | None, key: str | None, part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        load_certificate(ServerSection(ssl_certfile=chain, ssl_keyfile=key))


def test_clients_of_the_router_may_need_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRAME_ADMIN_KEY", raising=False)
    flags = ("--ssl-certfile", str(CHAIN), "--ssl-keyfile", str(KEY), "--ssl-ca-certs", str(CHAIN))
    with RunningRouter("http://127.0.0.1:9", flags=flags) as router:
        assert router.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(CHAIN))
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
            httpx.get(f"{router.url}/livez", verify=trusting)
        trusting.load_cert_chain(CHAIN, KEY)
        assert httpx.get(f"{router.url}/livez", verify=trusting).status_code == 200
    for given in (("--ssl-ca-certs", str(CHAIN)), ("--ssl-keyfile", str(KEY)), (*flags[:4], "--ssl-ca-certs", "/nowhere")):
        result = CliRunner().invoke(cli, ["router", "--replica", "http://127.0.0.1:9", *given])
        assert (result.exit_code, "--ssl-certfile" in result.output) == (78, True), result.output


def test_http_for_users_and_operators(checkpoint: Path, tmp_path: Path) -> None:
    admin = ("--admin-port", "0", "--admin-socket", str(tmp_path / "admin"))
    flags = ("--max-model-len", "512", "--max-total-tokens", "4096", "--ssl-certfile", str(CHAIN), "--ssl-keyfile", str(KEY))
    with RunningServer(checkpoint, *flags, *admin) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(CHAIN))
        with httpx.Client(base_url=server.url, verify=trusting, timeout=30) as client:
            assert client.get("/health/ready").status_code == 200
            body = {"model": client.get("/v1/models").json()["data"][0]["id"], "prompt": [5, 6, 7], "max_tokens": 5}
            body |= {"ignore_eos": True, "temperature": 0}
            whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                *parts, end = [line.removeprefix("data: ") for line in response.iter_lines() if line]
            assert end == "[DONE]" and "".join(json.loads(part)["choices"][0]["text"] for part in parts) == whole != ""
        with connect(server.url.replace("https", "wss") + "/v1/realtime", ssl=trusting, compression=None) as socket:
            assert json.loads(socket.recv())["type"] == "session.created"
            socket.send("{}")
            assert json.loads(socket.recv())["type"] == "error"
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health/live")  # signed by no authority that the client trusts
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(server.url.replace("https", "http") + "/health/live")
        url = next(line.split()[-1] for line in server.lines if "admin routes on https" in line)
        with httpx.Client(base_url=url, verify=trusting) as operator:
            assert operator.post("/flush_cache").json()["success"]
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url.replace("https", "http") + "/server_info")
        with httpx.Client(base_url="http://x", transport=httpx.HTTPTransport(uds=str(tmp_path / "admin"))) as operator:
            assert operator.get("/server_info").status_code == 200  # no TLS within a machine
        assert server.stop() == 0


async def test_grpc() -> None:
    sections = {"server": {"ssl_certfile": str(CHAIN), "ssl_keyfile": str(KEY)}}
    trusting = grpc.ssl_channel_credentials(CHAIN.read_bytes())
    async with listening(sections) as (_, address), grpc.aio.secure_channel(address, trusting) as channel:
        replies = [reply async for reply in Client(channel).call("Generate", {"token_ids": IDS, "sampling_params": params()}, timeout=30)]
        assert replies[-1].finish.reason == "length"
