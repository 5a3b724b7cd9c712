"""DeepSeek-V3.1 with random weights in the checkpoint's own layout, served as
examples/deepseek.yaml says, in two parts of ten minutes each; prints a line of JSON for each phase
and stores all of them.

Part 1: a cold start by phase, memory planned and used, the reference workloads over HTTP, latency
at several rates. Part 2, on the same host: a warm start, texts under two SIGKILLs of ranks against
undisturbed ones, then the workloads with other settings (`--set`).

    python benchmarks/deepseek_full.py --part 1 --json part1.json
    python benchmarks/deepseek_full.py --part 2 --set parallel.ep=8 --json part2.json

A rehearsal with few layers on two cards: `--layers 16 --tp 2 --rates 2,8 --seconds 8`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from frame.entrypoints.configuration.sources import load_config
from frame.entrypoints.tools.bench.load import Target, run
from frame.entrypoints.tools.bench.report import report
from frame.entrypoints.tools.bench.summary import row
from frame.entrypoints.tools.bench.workload import Arrivals, Shape, reference_workloads
from frame.entrypoints.tools.plan.machines import parse_machine
from frame.entrypoints.tools.plan.planner import PUBLISHED, plan_deployment
from frame.kernels.cache import CACHE_DIR_VARIABLE

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/deepseek.yaml"
READY = re.compile(r"ready on (http://\S+) after ([\d.]+) s")
ORDER = ("single", "batch8", "prefill", "prefix", "longctx", "mixed256")
ENDING = 25.0  # seconds of the budget kept for the end of the server and the report
KEY = "benchmark"
TOKENS = {"return_token_ids": True}  # otherwise tokens without text make no event
HEADERS = {"authorization": f"Bearer {KEY}"}
RANKS = ("scheduler", "follower")  # roles of the processes of ranks


@dataclass
class Report:
    """What was measured, written to the file after each phase."""

    path: Path | None
    about: dict[str, Any]
    deadline: float
    rows: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic() - ENDING

    def add(self, name: str, found: Any) -> None:
        self.rows[name] = found
        print(json.dumps({"phase": name, "left": round(self.left), "found": found}), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(report("deepseek-full", self.rows, **self.about), indent=2) + "\n")


@contextmanager
def model_folder(config: Path, layers: int | None) -> Iterator[Path]:
    """A folder with the checkpoint's config.json, of `layers` layers."""
    found = json.loads((config / "config.json").read_text())
    if layers is not None:
        found["num_hidden_layers"] = layers
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(found))
        yield Path(name)


class Server:
    """`frame serve` in a process of its own. `lines`: of its log. `url`: once it is ready."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, settings: Sequence[str]) -> None:
        fixed = [
            f"model.path={folder}", "model.served_name=deepseek", "model.load_format=dummy", "model.skip_tokenizer_init=true",
            "server.host=127.0.0.1", "server.port=0", f"server.api_key={KEY}", f"server.admin_key={KEY}", f"parallel.tp={arguments.tp}",
        ]  # fmt: skip
        flags = [part for setting in (*fixed, *settings) for part in ("--set", setting)]
        command = [sys.executable, "-m", "frame", "serve", "--config", str(EXAMPLE), *flags]
        environment = {**os.environ, "HOME": str(arguments.home), CACHE_DIR_VARIABLE: str(arguments.home / "triton")}
        self.lines: list[str] = []
        self.url, self.seconds = "", 0.0
        self._changed = threading.Event()
        self._began = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True, cwd=ROOT)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := READY.search(line):
                self.url, self.seconds = found[1], time.monotonic() - self._began
                self._changed.set()
        self._changed.set()

    def wait_ready(self, limit: float) -> None:
        self._changed.wait(max(1.0, limit))
        if not self.url:
            self.stop()
            raise SystemExit("the server is not ready:\n" + "\n".join(self.lines[-30:]))

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=60, headers=HEADERS).raise_for_status().json()

    def find_ranks(self) -> dict[str, int]:
        """The process ids of the ranks, by role and rank."""
        found: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                words = child.cmdline()
            except psutil.Error:  # it has ended
                continue
            if len(words) > 4 and words[4] in RANKS:
                rank = words[words.index("--rank") + 1] if "--rank" in words else "0"
                found[f"{words[4]} {rank}"] = child.pid
        return found

    def stop(self) -> None:
        """End the server and its ranks."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(ENDING / 2)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


# ---- phases --------------------------------------------------------------------------------------


def describe_start(server: Server) -> dict[str, Any]:
    """Seconds from the command to the ready line, and the phases of rank 0."""
    info = server.get("/server_info")
    keys = ("phases", "kernels", "memory", "max_total_tokens", "plugins", "cuda_graph_max_bs", "start_seconds", "parallel")
    warnings = [line for line in server.lines if "memory plan" in line]
    return {"ready_seconds": round(server.seconds, 1), **{key: info.get(key) for key in keys}, "warnings": warnings}


def compare_memory(folder: Path, arguments: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Memory of a rank as planned without the machine, and what every card and rank 0 use."""
    loaded = load_config(str(EXAMPLE), sets=arguments.always, environ={}).config
    model = loaded.model.model_copy(update={"path": str(folder), "skip_tokenizer_init": True})
    parallel = loaded.parallel.model_copy(update={"tp": arguments.tp})
    machine = parse_machine(arguments.machine or f"{arguments.tp}xh200")
    plan = plan_deployment(loaded.model_copy(update={"model": model, "parallel": parallel}), machine)
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split() if shutil.which(query[0]) else []
    real = server.get("/server_info")
    return {
        "planned": plan.describe()["ranks"][0],
        "bounds": plan.describe()["phases"],
        "planned_tokens": plan.memory.tokens,
        "tokens": real["max_total_tokens"],
        "rank0": real.get("memory"),
        "cards_used_mib": [int(each) for each in used],
    }


def measure_workloads(server: Server, arguments: argparse.Namespace, found: Report, prefix: str = "") -> None:
    """The reference workloads, as far as the time suffices."""
    vocabulary = server.get("/server_info")["vocab_size"]
    target = Target(server.url, "deepseek", KEY, TOKENS)
    every = {name: workload.shrunk(arguments.shrink) for name, workload in reference_workloads().items()}
    asyncio.run(run(target, every["batch8"].jobs(vocabulary, -1)))
    for name in ORDER:
        figures: list[dict[str, Any]] = []
        for number in range(1 if name == "mixed256" else 2):
            if found.left < (1.5 * figures[0].get("seconds", 0) if figures else 0):
                break
            figures.append(row(asyncio.run(run(target, every[name].jobs(vocabulary, number)))))
        if figures:
            best = min(figures, key=lambda each: each.get("seconds", float("inf")))
            counts = "prompt_tokens_per_s" if every[name].counts == "prompt" else "output_tokens_per_s"
            every_run = [each.get("seconds") for each in figures]
            found.add(f"{prefix}{name}", {"tokens_per_s": best.get(counts), **best, "all_seconds": every_run})


def measure_latency(server: Server, arguments: argparse.Namespace, found: Report) -> None:
    """TTFT and ITL percentiles at each rate, Poisson arrivals."""
    vocabulary, target = server.get("/server_info")["vocab_size"], Target(server.url, "deepseek", KEY, TOKENS)
    for rate in map(float, arguments.rates.split(",")):
        if found.left < arguments.seconds:
            return
        lengths = tuple(max(1, length // arguments.shrink) for length in (512, 2048, 64, 192))
        shape = Shape(max(2, int(rate * arguments.seconds)), (lengths[0], lengths[1]), (lengths[2], lengths[3]))
        found.add(f"latency at {rate:g}/s", row(asyncio.run(run(target, shape.jobs(vocabulary, int(rate * 100), Arrivals(rate))))))


def compare_texts(server: Server, arguments: argparse.Namespace, found: Report) -> None:
    """Greedy tokens of 16 requests: twice undisturbed, then with a SIGKILL of a rank, twice."""
    vocabulary, draw = server.get("/server_info")["vocab_size"], random.Random(7)
    prompts = [[draw.randrange(10, min(10_000, vocabulary)) for _ in range(256 // arguments.shrink + 4)] for _ in range(16)]
    length = max(16, arguments.new_tokens // arguments.shrink)

    async def generate(disturb: Callable[[], None] | None) -> list[list[int] | str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=None, limits=limits) as client:
            params = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
            calls = [asyncio.create_task(client.post("/generate", json={"input_ids": ids, "sampling_params": params})) for ids in prompts]
            if disturb is not None:
                await asyncio.sleep(arguments.kill_after)
                disturb()
            answers = await asyncio.gather(*calls)
        return [answer.json()["output_ids"] if answer.status_code == 200 else answer.text for answer in answers]

    def count_equal(first: list[Any], second: list[Any]) -> int:
        return sum(a == b for a, b in zip(first, second, strict=True))

    plain, began = asyncio.run(generate(None)), time.monotonic()
    again = asyncio.run(generate(None))
    undisturbed = {"equal": count_equal(plain, again), "of": len(plain), "seconds": round(time.monotonic() - began, 1)}
    found.add("texts undisturbed", undisturbed)
    for number in range(2):
        if found.left < server.seconds + 20:
            return
        ranks = sorted(server.find_ranks().items())
        role, pid = ranks[(draw.randrange(len(ranks)) if len(ranks) > 2 else 0) - number]  # of two ranks, one after the other
        time.sleep(min(arguments.up_seconds, max(0.0, found.left - server.seconds - 20)))
        began, num_lines = time.monotonic(), len(server.lines)
        texts = asyncio.run(generate(lambda pid=pid: os.kill(pid, signal.SIGKILL)))  # type: ignore[misc]
        complete = sum(isinstance(text, list) and len(text) == length for text in texts)
        outcome = {"killed": role, "equal": count_equal(plain, texts), "complete": complete, "of": len(plain)}
        restart = next((line.partition("engine ready again")[2] for line in server.lines[num_lines:] if "engine ready again" in line), "")
        found.add(f"texts after SIGKILL {number + 1}", {**outcome, "seconds": round(time.monotonic() - began, 1), "restart": restart})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2), required=True)
    parser.add_argument("--config", type=Path, default=PUBLISHED / "DeepSeek-V3.1", help="folder with another config.json")
    parser.add_argument("--layers", type=int, help="layers of the model, for a rehearsal")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--machine", help="what memory is planned for; default: TPxh200")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--rates", default="2,8,16", help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rate")
    parser.add_argument("--shrink", type=int, default=1, help="divide requests and lengths by this, for small machines")
    parser.add_argument("--new-tokens", type=int, default=512, help="of the texts that a SIGKILL disturbs")
    parser.add_argument("--kill-after", type=float, default=2.0, help="seconds between the requests and a SIGKILL")
    parser.add_argument("--up-seconds", type=float, default=0.0, help="seconds that the server is up before each SIGKILL")
    parser.add_argument("--always", action="append", default=[], metavar="KEY=VALUE", help="a setting of all servers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of part 2's second server")
    parser.add_argument("--home", type=Path, default=Path("/tmp/frame-deepseek-home"), help="compiled kernels; part 1 empties it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = {"part": arguments.part, "layers": arguments.layers, "tp": arguments.tp, "settings": arguments.always, "second": arguments.set}
    found = Report(arguments.json, about, time.monotonic() + arguments.budget)
    if arguments.part == 1:
        shutil.rmtree(arguments.home, ignore_errors=True)
    arguments.home.mkdir(parents=True, exist_ok=True)
    with model_folder(arguments.config, arguments.layers) as folder:
        servers = [arguments.always]
        if arguments.part == 2 and arguments.set:
            servers.append([*arguments.always, *arguments.set])
        for number, settings in enumerate(servers):
            if number and found.left < 60:
                break
            server = Server(folder, arguments, settings)
            try:
                server.wait_ready(found.left)
                found.add(("start", "start with other settings")[number], describe_start(server))
                if arguments.part == 1:
                    found.add("memory", compare_memory(folder, arguments, server))
                    measure_workloads(server, arguments, found)
                    measure_latency(server, arguments, found)
                elif number == 0:
                    compare_texts(server, arguments, found)
                else:
                    measure_workloads(server, arguments, found, "other settings: ")
            finally:
                server.stop()


if __name__ == "__main__":
    main()
