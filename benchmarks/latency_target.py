"""TTFT and gaps between tokens at several rates of Poisson arrivals, with and without a target of
inter-token latency; prints a line for each, and stores raw results after each of them.

    python benchmarks/latency_target.py --json latency.json
    python benchmarks/latency_target.py --targets 0,20,40 --rates 24 --seconds 12
    python benchmarks/latency_target.py --model frame-tiny --device cpu --rates 2 --seconds 2

Llama-3.1-8B's shape with random weights; prompts of 512 to 1,536 tokens, outputs of 96 to 288. One
server for each target, on one card. All targets get the same requests at the same times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from with_wheels import prepare

if __name__ == "__main__":
    prepare()

from deterministic import LLAMA
from media import Server

from frame.entrypoints.tools.bench.load import Target, run
from frame.entrypoints.tools.bench.report import report
from frame.entrypoints.tools.bench.summary import row
from frame.entrypoints.tools.bench.workload import Arrivals, Shape

PORT = 30631
TOKENS = {"return_token_ids": True}  # otherwise tokens without text make no event


def measure(server: Server, rate: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Percentiles of one rate."""
    lengths = ((512, 1536), (96, 288)) if arguments.device == "cuda" else ((64, 192), (8, 24))
    jobs = Shape(max(2, int(rate * arguments.seconds)), *lengths).jobs(arguments.ids, int(rate * 100), Arrivals(rate))
    return row(asyncio.run(run(Target(server.url, "m", extra=TOKENS), jobs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of another model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", default="4,12,24", help="requests a second")
    parser.add_argument("--targets", default="0,30", help="milliseconds; 0: none")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals of each rate")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of everything; cells that do not fit are left out")
    parser.add_argument("--ids", type=int, default=900, help="token ids of prompts are below this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    deadline, rows = time.monotonic() + arguments.budget, dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        for target in map(float, arguments.targets.split(",")):
            flags = ["--skip-tokenizer-init", "--device", arguments.device, "--target-itl-ms", f"{target:g}"]
            server = Server(Path(arguments.model or folder), PORT, *flags)
            try:
                server.wait()
                asyncio.run(
                    run(Target(server.url, "m", extra=TOKENS), Shape(16, (64, 900), (16, 16)).jobs(arguments.ids, 7, Arrivals(40.0)))
                )
                for rate in map(float, arguments.rates.split(",")):
                    if deadline - time.monotonic() < arguments.seconds + 5:
                        break
                    name = f"{rate:g}/s, " + (f"target {target:g} ms" if target else "no target")
                    rows[name] = found = measure(server, rate, arguments)
                    shown = {key: found.get(key) for key in ("failed", "output_tokens_per_s", "first_token_ms", "between_events_ms")}
                    print(name, json.dumps(shown), flush=True)
                    if arguments.json:
                        arguments.json.write_text(json.dumps(report("latency-target", rows, seconds=arguments.seconds), indent=1) + "\n")
            finally:
                server.process.terminate()
                try:
                    server.process.wait(10)
                except subprocess.TimeoutExpired:
                    server.process.kill()


if __name__ == "__main__":
    main()
