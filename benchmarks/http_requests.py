"""Time per short HTTP request of two checkouts, in turn: ASGI calls into the application over the
fake engine, without a socket.

    python benchmarks/http_requests.py --before ../other-checkout --rounds 7 --out result.json

Each round starts one process per checkout. `seconds` are medians over groups of requests sent one
after the other; `per_second` is the rate of completions at 16 at once. `loop_cpu_seconds` is the
processor time of the event loop's thread, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMPLETION = {"model": "", "prompt": [5, 6, 7], "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
# name -> method, path, body
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "health": ("GET", "/health", None),
    "models": ("GET", "/v1/models", None),
    "detokenize": ("POST", "/detokenize", {"tokens": [5, 6]}),
    "completion": ("POST", "/v1/completions", COMPLETION),
    "chat": ("POST", "/v1/chat/completions", CHAT),
}
GROUPS, IN_GROUP, AT_ONCE = 30, 20, 16


async def measure() -> dict[str, Any]:
    """One process: the medians of this checkout."""
    from tests.entrypoints.inprocess import serving

    found: dict[str, Any] = {"seconds": {}, "loop_cpu_seconds": {}}
    async with serving({"log": {"level": "error"}}) as server:
        gc.collect()
        gc.freeze()  # as the server does once it is ready
        for name, (method, path, body) in REQUESTS.items():
            data = b"" if body is None else json.dumps(body).encode()
            times, cpu = [], []
            for group in range(GROUPS + 3):
                started, spent = time.perf_counter(), time.thread_time()
                for _ in range(IN_GROUP):
                    assert (await server.request(method, path, data)).status == 200
                if group >= 3:
                    times.append((time.perf_counter() - started) / IN_GROUP)
                    cpu.append((time.thread_time() - spent) / IN_GROUP)
            found["seconds"][name], found["loop_cpu_seconds"][name] = statistics.median(times), statistics.median(cpu)
        data = json.dumps(COMPLETION).encode()
        started, spent = time.perf_counter(), time.thread_time()
        for _ in range(60):
            await asyncio.gather(*(server.request("POST", "/v1/completions", data) for _ in range(AT_ONCE)))
        found["per_second"] = 60 * AT_ONCE / (time.perf_counter() - started)
        found["per_loop_cpu_second"] = 60 * AT_ONCE / (time.thread_time() - spent)
    return found


def run(checkout: Path) -> dict[str, Any]:
    """One process over a checkout, from a folder where the tests find their models."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).resolve()
    done = subprocess.run(
        [sys.executable, str(script), "--measure"], env=environment, cwd=checkout, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help="measure this process's checkout")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(asyncio.run(measure())))
        return
    here = Path(__file__).resolve().parent.parent
    checkouts = {"before": arguments.before.resolve(), "after": here}
    rounds = []
    for number in range(arguments.rounds):
        order = list(checkouts) if number % 2 == 0 else list(checkouts)[::-1]
        rounds.append({name: run(checkouts[name]) for name in order})
        print(number, {name: f"{each['per_second']:.0f}/s" for name, each in rounds[-1].items()}, flush=True)
    summary: dict[str, Any] = {}
    for name in REQUESTS:
        for kind in ("seconds", "loop_cpu_seconds"):
            before, after = (statistics.median(each[side][kind][name] for each in rounds) * 1e6 for side in checkouts)
            summary[f"{name} {kind}"] = {"before_us": round(before, 1), "after_us": round(after, 1), "more_us": round(after - before, 1)}
    for kind in ("per_second", "per_loop_cpu_second"):
        summary[f"{kind} ratio"] = round(statistics.median(each["after"][kind] / each["before"][kind] for each in rounds), 4)
    print(json.dumps(summary, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"summary": summary, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
