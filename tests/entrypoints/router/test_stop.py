"""A router that is stopped ends the requests that run with a status or a last event."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx

from tests.entrypoints.router.fake_replica import FakeReplica
from tests.entrypoints.serving import RunningRouter

PROMPT = {"prompt": "x", "max_tokens": 4}


async def test_requests_that_run_end_with_the_reason() -> None:
    replica = FakeReplica()
    replica.token_pause = 30.0
    await replica.start()
    router = await asyncio.to_thread(RunningRouter, replica.url)
    try:
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
            whole = [asyncio.create_task(client.post("/v1/completions", json={**PROMPT, "kind": "hang"})) for _ in range(5)]
            streams = [asyncio.create_task(client.post("/v1/completions", json={**PROMPT, "stream": True})) for _ in range(5)]
            async with asyncio.timeout(30):
                while replica.running < 10:  # noqa: ASYNC110 - of the replica, which has no event for it
                    await asyncio.sleep(0.05)
            for _ in range(2):
                os.kill(router.process.pid, signal.SIGTERM)
                await asyncio.sleep(0.3)
            for reply in await asyncio.gather(*whole):
                assert reply.status_code == 503, reply.text
                assert "the router is shutting down; try again later" in reply.json()["error"]["message"]
            for reply in await asyncio.gather(*streams):
                assert reply.status_code == 200
                assert "the router is shutting down, and the answer to request" in reply.text.strip().splitlines()[-1]
        assert await asyncio.to_thread(router.wait) == 0
        assert not [line for line in router.lines if "Traceback" in line or "Error" in line or "is unhealthy" in line], router.lines
    finally:
        await asyncio.to_thread(router.stop)
        await replica.kill()
