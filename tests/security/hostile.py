"""A hostile client with many connections and one key: `python tests/security/hostile.py URL KEY
CONNECTIONS SEED`, until it is killed.

It sends what a client may send: long prompts, many short ones, many sequences, invalid grammars,
slow readers, aborts, uploads.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

MAX_LENGTH = 2000  # tokens of a prompt, as the server's context allows
MB = 1024 * 1024


class Hostile:
    def __init__(self, url: str, key: str, seed: int) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname, parts.port)
        self.key = key
        self.random = random.Random(seed)
        self.statuses: Counter[str] = Counter()

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(10, 300) for _ in range(count)]

    def generation(self) -> tuple[str, dict[str, Any]]:
        """A path and a body."""
        choose, long = self.random.choice, {"max_tokens": 1000, "ignore_eos": True}
        return choose([
            lambda: ("/v1/completions", {"prompt": self.ids(MAX_LENGTH), "max_tokens": 20, "ignore_eos": True}),
            lambda: ("/v1/completions", {"prompt": [self.ids(5) for _ in range(100)], **long}),
            lambda: ("/v1/completions", {"prompt": self.ids(50), "n": 128, **long}),
            lambda: ("/v1/completions", {"prompt": "word " * 1500, **long}),
            lambda: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1500}] * 20, **long}),
            lambda: ("/generate", {"text": "a", "sampling_params": {"regex": "(" * 2000, "max_new_tokens": 10}}),
            lambda: ("/generate", {"text": "a", "sampling_params": {"ebnf": "root ::= root", "max_new_tokens": 10}}),
            lambda: ("/generate", {"text": "a", "sampling_params": {"json_schema": json.dumps(self.schema()), "max_new_tokens": 50}}),
            lambda: ("/generate", {"text": ["a"] * 1000, "sampling_params": {"max_new_tokens": 1000}}),
            lambda: ("/v1/completions", {"prompt": "a", "n": 100_000}),
        ])()  # fmt: skip

    def schema(self) -> dict[str, Any]:
        names = [f"f{self.random.randrange(10**9)}" for _ in range(50)]
        return {"type": "object", "properties": {name: {"type": "string", "pattern": "[a-z]{1,50}"} for name in names}, "required": names}

    async def connect(self, path: str, body: bytes, kind: str = "application/json") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address, limit=2**16)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.key}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def attack(self) -> None:
        path, body = self.generation()
        way = self.random.choice(["read", "read", "read", "slow", "abort", "upload"])
        data, kind = json.dumps(body | {"stream": way in ("slow", "abort")}).encode(), "application/json"
        if way == "upload":
            path, kind = "/v1/files", "multipart/form-data; boundary=x"
            data = (
                b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\nContent-Disposition: form-data; name="file"'
            )
            data += b'; filename="a"\r\n\r\n' + b"z" * (8 * MB) + b"\r\n--x--\r\n"
        reader, writer = await self.connect(path, data, kind)
        try:
            line = await reader.readline()
            self.statuses[line.split()[1].decode() if line else "none"] += 1
            if way == "abort":
                await asyncio.sleep(self.random.random() / 5)
            elif way == "slow":
                for _ in range(20):
                    await reader.read(10)
                    await asyncio.sleep(0.1)
            else:
                while await reader.read(2**16):
                    pass
        finally:
            writer.transport.abort()

    async def attack_forever(self) -> None:
        while True:
            with suppress(OSError, IndexError, TimeoutError):
                async with asyncio.timeout(self.random.expovariate(0.5)):  # then it disconnects
                    await self.attack()


async def main(url: str, key: str, connections: int, seed: int) -> None:
    hostile = Hostile(url, key, seed)
    for _ in range(connections):
        task = asyncio.create_task(hostile.attack_forever())
        hostile.statuses["connections"] += bool(task)
        await asyncio.sleep(0)
    while True:
        await asyncio.sleep(0.5)
        print(json.dumps(hostile.statuses), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
