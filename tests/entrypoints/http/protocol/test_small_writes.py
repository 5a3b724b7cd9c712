"""What a server writes in pieces is sent at once. Without TCP_NODELAY the second piece waits for
the client's acknowledgement of the first, up to 40 ms."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from frame.entrypoints.http.protocol.listening import bound_port


async def accept() -> int:
    """TCP_NODELAY of a connection that was accepted on a listener of frame's."""
    listener = bound_port("127.0.0.1", 0, "--port")
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[int] = loop.create_future()

    class Peer(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            accepted.set_result(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async with await loop.create_server(Peer, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        option = await asyncio.wait_for(accepted, 10)
        writer.close()
    return option


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_send_small_pieces_at_once(run: Callable[..., int]) -> None:
    assert run(accept()) == 1
