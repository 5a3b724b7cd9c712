"""The router's connections to replicas: what a request costs with many of them idle, and that no
dead one is used."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

import httpx
import pytest
from httpcore._backends.anyio import AnyIOStream

from frame.entrypoints.router.connections import open_client

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK"


async def test_a_request_asks_the_system_about_one_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, opened = [0], list[asyncio.StreamWriter]()
    get_info = AnyIOStream.get_extra_info

    def count(self: AnyIOStream, info: str) -> Any:
        asked[0] += info == "is_readable"
        return get_info(self, info)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        while await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(0.05)
            writer.write(OK)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with open_client() as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        await asyncio.gather(*(client.get(url) for _ in range(40)))
        assert len(opened) == 40
        monkeypatch.setattr(AnyIOStream, "get_extra_info", count)
        assert (await client.get(url)).text == "OK"
        assert asked == [1] and len(opened) == 40
        for writer in opened:
            writer.close()
        await asyncio.sleep(0.05)
        found = await asyncio.gather(*(client.get(url) for _ in range(40)), return_exceptions=True)
        assert {each.text for each in found if isinstance(each, httpx.Response)} == {"OK"}
        assert len(found) == 40 and not [each for each in found if isinstance(each, Exception)]
    server.close()


def test_a_request_searches_for_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpcore imports sniffio at each request; a failed import searches `sys.path`."""
    searched = list[str]()

    class Finder:  # of a place where it is not installed
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "sniffio":
                searched.append(name)
                raise ModuleNotFoundError(name)

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(OK)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
        monkeypatch.setitem(sys.modules, "sniffio", None)
        del sys.modules["sniffio"]
        async with open_client() as client:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            for _ in range(2):
                assert (await client.get(url)).text == "OK"
        server.close()

    asyncio.run(main())
    assert searched == []
