"""Replicas that several sources of a router name: when they leave, how many there are, and
addresses that are the same server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from frame.core.errors import ConfigError
from frame.entrypoints.router.connections import open_client
from frame.entrypoints.router.discovery import MAX_REPLICAS, Source, check_url, watch_sources
from frame.entrypoints.router.replicas import Backends
from tests.entrypoints.router.fake_replica import FakeReplica, routed
from tests.entrypoints.router.test_membership import admin_of, reach, states


async def test_a_replica_leaves_when_the_last_source_drops_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two files, the command line and an operator. Until then it serves without a break."""
    caplog.set_level(logging.INFO)
    replica, other = FakeReplica(), FakeReplica()
    files = [tmp_path / "a", tmp_path / "b"]

    def num_drains() -> int:
        return sum("it drains" in record.message for record in caplog.records)

    async with routed(other) as (_, backends, _), admin_of(backends) as admin:
        await replica.start()
        for file in files:
            file.write_text(f"{replica.url}\n{other.url}\n")
        sources = [Source(str(file)) for file in files]
        watching = asyncio.gather(backends.watch(), watch_sources(sources, 0.05, backends.update, {}))
        await reach(lambda: states(backends) == {other.url: "serving", replica.url: "serving"})
        files[0].write_text("#\n")
        await asyncio.sleep(0.6)
        assert (states(backends), num_drains()) == ({other.url: "serving", replica.url: "serving"}, 0)
        assert [each["source"] for each in (await admin.get("/replicas")).json()["replicas"]] == [str(files[1])] * 2
        await admin.post("/replicas", json={"url": replica.url})
        files[1].write_text("#\n")
        await asyncio.sleep(0.6)
        assert (states(backends), num_drains()) == ({other.url: "serving", replica.url: "serving"}, 0)
        files[0].write_text(f"\ufeff{replica.url}\n")  # as editors of Windows write
        await reach(lambda: len(backends.all[1].sources) == 2)
        await admin.request("DELETE", "/replicas", json={"url": replica.url})
        files[1].write_text(f"{replica.url}\n")
        await asyncio.sleep(0.6)
        assert states(backends)[replica.url] == "draining"
        files[0].write_text("#\n")
        await asyncio.sleep(0.6)
        assert states(backends)[replica.url] == "draining"  # the other file names it
        files[1].write_text("#\n")
        await reach(lambda: states(backends) == {other.url: "serving"})
        assert num_drains() == 1
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await replica.kill()


async def test_a_removed_replica_of_the_command_line_stays_away_while_a_file_names_it() -> None:
    replica = FakeReplica()
    async with routed(replica) as (_, backends, _), admin_of(backends) as admin:
        backends.update("a file", [replica.url])
        watching = asyncio.create_task(backends.watch())
        await admin.request("DELETE", "/replicas", json={"url": replica.url})
        for _ in range(5):
            await asyncio.sleep(0.1)
            backends.update("a file", [replica.url])
            assert states(backends) == {replica.url: "draining"}
        assert (await admin.post("/replicas", json={"url": replica.url})).status_code == 200
        await reach(lambda: states(backends) == {replica.url: "serving"})
        watching.cancel()


async def test_all_sources_together_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Replicas beyond it wait until others have left."""
    urls = [f"http://10.1.{number >> 8}.{number & 255}:1" for number in range(MAX_REPLICAS + 2)]
    backends = Backends(urls[:1], open_client(), 1.0)
    backends.update("a", urls[1:1000])
    for _ in range(2):
        backends.update("b", urls[990:])
    assert ([*states(backends)], len(caplog.records)) == (urls[:MAX_REPLICAS], 1)
    backends.update("a", urls[10:1000])
    backends.update("b", urls[990:])
    assert len(backends.all) == MAX_REPLICAS  # they drain
    backends._drop_left()
    backends.update("b", urls[990:])
    assert {*states(backends)} == {*urls[:1], *urls[10:]}


@pytest.mark.parametrize(
    ("spelling", "address"),
    [("HTTP://Host.Example:08000/", "http://host.example:8000"),
     ("http://host:", "http://host"),
     ("http://host:80/", "http://host"),
     ("https://host:443", "https://host"),
     ("https://host:80", "https://host:80"),
     ("http://host:443", "http://host:443"),
     ("http://[0:0::0001]:8000", "http://[::1]:8000"),
     ("http://[FD00::A]:80", "http://[fd00::a]"),
     ("http://host.:8000", "http://host.:8000"),
     ("http://a_b-c.svc:1", "http://a_b-c.svc:1"),
     (f"http://{'a' * 63}.b:1", f"http://{'a' * 63}.b:1")],
)  # fmt: skip
def test_spellings_of_an_address_are_one(spelling: str, address: str) -> None:
    assert (check_url(spelling), check_url(address)) == (address, address)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("http://host:0", "a port from 1 to 65535"),
     ("http://host:00", "a port from 1 to 65535"),
     (f"http://{'a' * 64}:1", "labels have 1 to 63"),
     (f"http://{'a.' * 127}b:1", "at most 253 characters"),
     ("http://a..b:1", "labels have 1 to 63"),
     ("http://.a:1", "labels have 1 to 63"),
     ("http://.:1", "labels have 1 to 63"),
     ("http://-:1", "not dashes alone"),
     ("http://a.--.b:1", "not dashes alone"),
     ("http://[v1.a]:1", "write http://HOST:PORT or"),
     ("http://[::1::]:1", "write http://HOST:PORT or"),
     ("http://" + "a." * 5000 + "b", "at most 253 characters")],
)  # fmt: skip
def test_addresses_that_no_server_can_have(wrong: str, words: str) -> None:
    with pytest.raises(ConfigError, match="write http://HOST:PORT") as refusal:
        check_url(wrong)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 300


async def test_an_operator_names_one_server_by_any_spelling() -> None:
    replica = FakeReplica()
    async with routed(replica) as (_, backends, _), admin_of(backends) as admin:
        port = replica.url.rpartition(":")[2]
        for spelling in (f"HTTP://127.0.0.1:{port}", f"http://127.0.0.1:0{port}/"):
            reply = await admin.post("/replicas", json={"url": spelling})
            assert (reply.status_code, reply.json()["url"], len(backends.all)) == (200, replica.url, 1)
        for wrong in ("http://127.0.0.1:0", "http://..:80"):
            assert (await admin.post("/replicas", json={"url": wrong})).status_code == 400
