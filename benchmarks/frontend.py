"""Processor time of everything but the model: scheduler, detokenizer and HTTP server over a fake
model, a step at N streaming requests.

    python benchmarks/frontend.py --requests 64 --step 0.02 --seconds 10

Starts a real server (real processes, sockets and routes) whose model costs nothing and takes
`--step` seconds a step, streams N chat completions from this process, and prints JSON: milliseconds
of CPU a step by process, user and system, while all N run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

READY = re.compile(r"ready on http://([^:]+):(\d+)")


def make_folder(folder: Path) -> Path:
    """A checkpoint without weights: the embedded tokenizer and a small dense configuration with a
    long context."""
    import frame

    source = Path(frame.__file__).parent / "models" / "frame_tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "max_position_embeddings": 32768, **sizes}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32", "eos_token_id": 1}))
    return folder


def start(folder: Path, step: float, requests: int, flags: list[str]) -> tuple[subprocess.Popen[str], str, int]:
    command = [sys.executable, "-m", "tests.entrypoints.fake_engine", "serve", "--model", str(folder), "--port", "0"]
    sizes = ["--max-running-requests", str(requests), "--max-total-tokens", str(requests * 32768)]
    environment = {**os.environ, "FRAME_FAKE_PLAIN": "1", "FRAME_FAKE_STEP": str(step)}
    server = subprocess.Popen([*command, *sizes, *flags], stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    for line in server.stderr:
        sys.stderr.write(line)
        found = READY.search(line)
        if found:
            return server, found[1], int(found[2])
    raise SystemExit("the server did not start")


async def read_stream(host: str, port: int, counts: list[int], index: int, body: bytes) -> None:
    """One streaming client, as cheap as can be: it counts events."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    try:
        while data := await reader.read(65536):
            counts[index] += data.count(b"data: ")
    finally:
        writer.close()


def times(server: psutil.Process) -> dict[str, tuple[float, float]]:
    """CPU seconds (user, system) by process."""
    found = {"http": server, **{child.cmdline()[4]: child for child in server.children()}}
    return {name: (t.user, t.system) for name, p in found.items() for t in (p.cpu_times(),)}


def steps(host: str, port: int) -> int:
    return int(httpx.get(f"http://{host}:{port}/server_info", timeout=10).json()["step"])


async def measure(options: argparse.Namespace, server: psutil.Process, host: str, port: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    request = {"messages": messages, "max_tokens": 30000, "ignore_eos": True, "stream": True, "skip_special_tokens": False}
    counts = [0] * options.requests
    body = json.dumps(request).encode()
    clients = [asyncio.create_task(read_stream(host, port, counts, i, body)) for i in range(options.requests)]
    while min(counts) < 5:  # noqa: ASYNC110 - a benchmark may poll
        await asyncio.sleep(0.05)
    loop = asyncio.get_running_loop()
    first_step = await loop.run_in_executor(None, steps, host, port)
    before, events, started = times(server), sum(counts), time.perf_counter()
    windows = []
    for _ in range(max(1, int(options.seconds))):
        mark, window = sum(map(sum, times(server).values())), time.perf_counter()
        await asyncio.sleep(1.0)
        used = sum(map(sum, times(server).values())) - mark
        windows.append(1e3 * used / ((time.perf_counter() - window) / options.step))
    after, seconds = times(server), time.perf_counter() - started
    events = sum(counts) - events
    done = await loop.run_in_executor(None, steps, host, port) - first_step
    for client in clients:
        client.cancel()
    by_process = {
        name: {"user_ms": 1e3 * (after[name][0] - before[name][0]) / done, "system_ms": 1e3 * (after[name][1] - before[name][1]) / done}
        for name in after
    }
    total = sum(value for each in by_process.values() for value in each.values())
    return {
        "requests": options.requests,
        "steps": done,
        "steps_per_second": done / seconds,
        "events_per_step": events / done,
        "tokens_per_second": done * options.requests / seconds,
        "cpu_ms_per_step": total,
        "cpu_ms_per_step_of_seconds": sorted(round(window, 3) for window in windows),
        "cpu_us_per_token": 1e3 * total / options.requests,
        "by_process": by_process,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--step", type=float, default=0.02, help="seconds that the fake model takes for a step")
    parser.add_argument("--seconds", type=float, default=8.0)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        server, host, port = start(make_folder(Path(folder)), options.step, options.requests, flags)
        try:
            result = asyncio.run(measure(options, psutil.Process(server.pid), host, port))
        finally:
            server.terminate()
            server.wait(20)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
