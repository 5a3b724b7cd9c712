"""The time of requests that share a prefix, through `frame router` and through the same router
choosing replicas by turns, in turn on one machine.

Two servers of the embedded model run on the CPU, one thread each. Needs PyTorch and this
repository.

    python benchmarks/router_hot_prefix.py --json benchmarks/results/router_hot_prefix.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import httpx

PREFIX = "The same beginning of every request. " * 40


def find_ports(count: int) -> list[int]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in opened]
    for each in opened:
        each.close()
    return ports


async def wait_ready(port: int) -> None:
    async with httpx.AsyncClient() as client:
        for _ in range(600):
            try:
                if (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit(f"port {port} does not answer")


async def measure(port: int, requests: int, together: int, tokens: int) -> float:
    """Seconds for all requests, so many at a time."""
    gate = asyncio.Semaphore(together)
    limits = httpx.Limits(max_connections=together)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def ask(number: int) -> None:
            body = {"model": "frame", "prompt": f"{PREFIX}{number}", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
            async with gate:
                answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
            answer.raise_for_status()

        began = time.perf_counter()
        await asyncio.gather(*(ask(number) for number in range(requests)))
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--events", action="store_true", help="the router reads the servers' KV events")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    first, second, by_prefix, by_turns, *publish = find_ports(8)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"FRAME_FLEET_KEY": "the key of this benchmark"} if arguments.events else {})}
    replicas = [part for port in (first, second) for part in ("--replica", f"http://127.0.0.1:{port}")]
    serve = [[sys.executable, "-m", "frame", "serve", "--port", str(port), "--served-model-name", "frame"] for port in (first, second)]
    for command, event_port, replay_port in zip(serve, publish[::2], publish[1::2], strict=True) if arguments.events else ():
        places = {"endpoint": f"tcp://127.0.0.1:{event_port}", "replay_endpoint": f"tcp://127.0.0.1:{replay_port}"}
        command += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, **places})]
    routers = [
        [sys.executable, "-m", "frame", "router", "--port", str(by_prefix), *replicas],
        [sys.executable, "-m", "frame", "router", "--port", str(by_turns), "--policy", "round_robin", *replicas],
    ]
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for command in serve + routers]
    try:
        for port in (first, second, by_prefix, by_turns):
            asyncio.run(wait_ready(port))
        taken: dict[int, list[float]] = {by_prefix: [], by_turns: []}
        for number in range(arguments.rounds + 1):  # the first round fills the caches
            for port in (by_prefix, by_turns) if number % 2 else (by_turns, by_prefix):
                seconds = asyncio.run(measure(port, arguments.requests, arguments.together, arguments.tokens))
                if number:
                    taken[port].append(round(seconds, 4))
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait(30)
    ratios = sorted(a / b for a, b in zip(taken[by_prefix], taken[by_turns], strict=True))
    report = {
        "requests": arguments.requests, "together": arguments.together, "tokens": arguments.tokens, "events": arguments.events,
        "router s": taken[by_prefix], "by turns s": taken[by_turns],
        "ratio": round(median(ratios), 4), "ratios": [round(each, 4) for each in ratios],
    }  # fmt: skip
    print(json.dumps(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
