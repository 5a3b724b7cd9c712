"""Connections of hosts without the secret, as a program: HOST PORT HOW COUNT. Prints a line once
all have been open, and opens another for each that is closed, until its input closes."""

from __future__ import annotations

import asyncio
import contextlib
import sys

HELLO = b"frame-link-2"


async def connect(host: str, port: int, how: str, kept: list[asyncio.StreamWriter], opened: asyncio.Event) -> None:
    """One connection, until the other end closes it."""
    reader, writer = await asyncio.open_connection(host, port)
    kept.append(writer)
    opened.set()
    if len(kept) > 400:
        kept.pop(0).close()
    if how == "half":
        writer.write(HELLO + bytes(32))
    elif how == "large":
        writer.write(b"\xff" * 500_000)
    elif how == "wrong":
        writer.write(HELLO + bytes(64 + 32))
    while how == "trickle" and not reader.at_eof():
        writer.write(b"f")
        await asyncio.sleep(0.02)
    await reader.read()


async def keep_connected(host: str, port: int, how: str, kept: list[asyncio.StreamWriter], opened: asyncio.Event) -> None:
    while True:
        with contextlib.suppress(OSError):
            await connect(host, port, how, kept, opened)


async def main(host: str, port: str, how: str, count: str) -> None:
    opened = [asyncio.Event() for _ in range(int(count))]
    kept: list[asyncio.StreamWriter] = []
    tasks = [asyncio.create_task(keep_connected(host, int(port), how, kept, each)) for each in opened]
    await asyncio.gather(*(each.wait() for each in opened))
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
