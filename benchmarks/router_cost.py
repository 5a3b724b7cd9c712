"""What `frame router` costs: latency that it adds at a fixed rate of requests, throughput of
streams through it and of those without it, and its processor time for each request and event.

The replica is a bare HTTP server in a process of its own, so that its time is small and equal in
both. Direct and routed rounds alternate. Processor time is that of the router's process, which
other work on the machine changes little. Needs this repository.

    python benchmarks/router_cost.py --json benchmarks/results/router_cost.json

With `--events` it compares two routers with a fleet key in turn: one that reads KV events, and asks
for the blocks of each prompt, and one whose replica publishes none. Each request brings one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import zmq
from router_hot_prefix import find_ports, wait_ready

from frame.entrypoints.handoff import VERSION
from frame.kv_events.prompt_blocks import tell_blocks
from frame.kv_events.publisher import BlockRemoved, BlockStored, EventBatch

EVENTS = 100  # of a stream
PACE = 0.02  # seconds between two of them
BODY = {"model": "frame", "messages": [{"role": "user", "content": "Say why. " * 60}], "max_tokens": 16}
ANSWER = json.dumps({"id": "a", "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 200}}]}).encode()
EVENT = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"token"}}]}\n\n'


async def serve_replica(port: int, event_port: int = 0) -> None:
    events = zmq.Context().socket(zmq.PUB)
    fleet, told = f"x-frame-fleet: a b {VERSION}\r\n", f"x-frame-events: {event_port} 0 1\r\n" if event_port else ""
    blocks, numbers = b"x-frame-blocks: " + tell_blocks(list(range(1200)), "", 16) + b"\r\n", itertools.count()
    names = list(range(1, 40))
    changes = [BlockStored(names, None, [1] * 640, 16, None, "GPU", None), BlockRemoved(names, "GPU")]
    batch = msgspec.msgpack.encode(EventBatch(0.0, changes))
    if event_port:
        events.bind(f"tcp://127.0.0.1:{event_port}")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
                body = await reader.readexactly(size)
                if b'"stream": true' not in body:
                    is_check = head.startswith(b"GET")
                    data = b"{}" if is_check else ANSWER
                    more = (fleet + told).encode() if is_check else blocks if b"x-frame-blocks" in head.lower() else b""
                    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + more
                    writer.write(head + b"content-length: %d\r\n\r\n" % len(data) + data)
                    if event_port and not is_check:
                        events.send_multipart((b"", next(numbers).to_bytes(8), batch))
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                begun = time.perf_counter()
                for number in range(EVENTS):
                    await asyncio.sleep(max(0.0, begun + number * PACE - time.perf_counter()))
                    writer.write(b"%x\r\n" % len(EVENT) + EVENT + b"\r\n")
                writer.write(b"0\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


class Connections:
    """Kept connections to a port."""

    def __init__(self, port: int) -> None:
        self._port, self._free = port, list[Any]()

    async def ask(self, body: bytes) -> float:
        """Seconds until the whole answer has come."""
        if not self._free:
            self._free.append(await asyncio.open_connection("127.0.0.1", self._port))
        reader, writer = self._free.pop()
        begun = time.perf_counter()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in head, head
        if b"chunked" in head:
            while (size := int(await reader.readline(), 16)) or not await reader.readexactly(2):
                await reader.readexactly(size + 2)
        else:
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        took = time.perf_counter() - begun
        self._free.append((reader, writer))
        return took


async def measure_latency(port: int, rate: float, seconds: float) -> list[float]:
    """Seconds of each request, sent at a fixed rate."""
    connections, body, tasks = Connections(port), json.dumps(BODY), []
    begun = time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(connections.ask(body.replace("why", f"{number:03}", 1).encode())))
    return list(await asyncio.gather(*tasks))


async def measure_streams(port: int, streams: int) -> float:
    """Events a second of streams at once."""
    connections, body = Connections(port), json.dumps(BODY | {"stream": True}).encode()
    begun = time.perf_counter()
    await asyncio.gather(*(connections.ask(body) for _ in range(streams)))
    return streams * EVENTS / (time.perf_counter() - begun)


def read_cpu(pid: int) -> float:
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(options: argparse.Namespace, replica: int, router: int, pid: int) -> dict[str, Any]:
    found: dict[str, Any] = {"load": [], "direct_ms": [], "routed_ms": [], "cpu_ms_per_request": [], "direct_events": [],
                             "routed_events": [], "cpu_us_per_event": []}  # fmt: skip
    for port in (replica, router):
        await measure_latency(port, options.rate, 1.0)  # warm
    for _ in range(options.rounds):
        found["load"].append(round(os.getloadavg()[0], 1))
        found["direct_ms"].append(1000 * median(await measure_latency(replica, options.rate, options.seconds)))
        before = read_cpu(pid)
        found["routed_ms"].append(1000 * median(await measure_latency(router, options.rate, options.seconds)))
        found["cpu_ms_per_request"].append(1000 * (read_cpu(pid) - before) / (options.rate * options.seconds))
        found["direct_events"].append(await measure_streams(replica, options.streams))
        before = read_cpu(pid)
        found["routed_events"].append(await measure_streams(router, options.streams))
        found["cpu_us_per_event"].append(1e6 * (read_cpu(pid) - before) / (options.streams * EVENTS))
    found["added_ms"] = median(found["routed_ms"]) - median(found["direct_ms"])
    found["stream_ratio"] = median(found["routed_events"]) / median(found["direct_events"])
    return found


async def compare_events(options: argparse.Namespace) -> None:
    ports = find_ports(5)
    commands = [[sys.executable, __file__, "--replica", str(ports[0]), "--event-port", str(ports[4])],
                [sys.executable, __file__, "--replica", str(ports[1])]]  # fmt: skip
    for replica, port in zip(ports[:2], ports[2:4], strict=True):
        commands += [[sys.executable, "-m", "frame", "router", "--replica", f"http://127.0.0.1:{replica}", "--port", str(port)]]
    environment = {**os.environ, "FRAME_FLEET_KEY": "the key of this benchmark"}
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for command in commands]  # noqa: ASYNC220 - at the start
    found: dict[str, Any] = {"load": []}
    try:
        for port in ports[:4]:
            await wait_ready(port)
        for port in (ports[2], ports[3], ports[1]):
            await measure_latency(port, options.rate, 2.0)  # warm
        for number in range(options.rounds):
            found["load"].append(round(os.getloadavg()[0], 1))
            direct = 1000 * median(await measure_latency(ports[1], options.rate, options.seconds))
            for place, name in ((2, "events"), (3, "none"))[:: -1 if number % 2 else 1]:
                before = read_cpu(processes[place].pid)
                routed = sorted(await measure_latency(ports[place], options.rate, options.seconds))
                cpu = 1000 * (read_cpu(processes[place].pid) - before) / len(routed)
                figures = {"added_ms": 1000 * median(routed) - direct, "cpu_ms": cpu, "p99_ms": 1000 * routed[len(routed) * 99 // 100]}
                for key, value in figures.items():
                    found.setdefault(f"{name}_{key}", []).append(round(value, 4))
    finally:
        for process in processes:
            process.terminate()
    medians = {name: round(median(values), 3) for name, values in found.items()}
    for key in ("cpu_ms", "added_ms"):
        medians[f"{key}_ratio"] = round(median(a / b for a, b in zip(found[f"events_{key}"], found[f"none_{key}"], strict=True)), 3)
    print(json.dumps(medians, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps({"rate": options.rate, "rounds": found, "medians": medians}, indent=1) + "\n")  # noqa: ASYNC240 - at the end


async def main(options: argparse.Namespace) -> None:
    replica, router = find_ports(2)
    commands = [[sys.executable, __file__, "--replica", str(replica)],
                [sys.executable, "-m", "frame", "router", "--replica", f"http://127.0.0.1:{replica}", "--port", str(router)]]  # fmt: skip
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]  # noqa: ASYNC220 - at the start
    try:
        for port in (replica, router):
            await wait_ready(port)
        found = await measure(options, replica, router, processes[1].pid)
    finally:
        for process in processes:
            process.terminate()
    medians = {name: round(median(values), 3) if isinstance(values, list) else round(values, 3) for name, values in found.items()}
    print(json.dumps(medians, indent=1))
    if options.json:
        record = {"rate": options.rate, "streams": options.streams, "events": EVENTS, "pace": PACE, "rounds": found, "medians": medians}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")  # noqa: ASYNC240 - at the end


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--events", action="store_true", help="the cost of reading KV events")
    parser.add_argument("--event-port", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    run = compare_events if given.events else main
    asyncio.run(serve_replica(given.replica, given.event_port) if given.replica else run(given))
