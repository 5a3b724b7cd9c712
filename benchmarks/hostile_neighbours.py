"""What a hostile client costs its neighbours: 16 ordinary streams of one key and a health probe
beside attacks on the same server, one attack after another.

A paced ordinary load runs for the whole time. Windows with an attack alternate with windows
without. The report has, for each attack: latency of /health, tokens per second of the ordinary
streams divided by those of the quiet windows, failed ordinary requests, and the resident memory of
the server's processes. Needs this repository and, for the gRPC attacks, grpcio. Servers run on the
CPU, one thread each.

    python benchmarks/hostile_neighbours.py --seconds 20 --json benchmarks/results/hostile.json
    python benchmarks/hostile_neighbours.py --minutes 30 --router      # a soak through a router
    python benchmarks/hostile_neighbours.py --whisper FOLDER           # audio attacks alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hostile_attacks import (
    ATTACKS,
    HOSTILE,
    ORDINARY,
    Address,
    Targets,
    encode_file,
    encode_json,
    encode_request,
    encode_sound,
    parse_address,
    send,
)

STREAMS, TOKENS, PERIOD = 16, 48, 2.5  # a stream starts a request of so many tokens every PERIOD seconds
MB = 1024 * 1024
READY = re.compile(r"ready on https?://([\d.]+):(\d+)|router on https?://([\d.]+):(\d+)")
GRPC = re.compile(r"gRPC on \S*?([\d.]+):(\d+)")


# ---- the ordinary side ---------------------------------------------------------------------------


def probe_health(address: Address) -> None:
    """Print the time and latency of /health, 20 a second, from a process of its own."""
    import socket

    data = encode_request("/health", b"", "", method="GET")
    while True:
        began = time.time()
        try:
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(data)
                status = int(connection.recv(4096).split(b" ", 2)[1])
        except (OSError, IndexError):
            status = 0
        took = time.time() - began
        print(json.dumps([began, took, status]), flush=True)
        time.sleep(max(0.0, 0.05 - took))


async def load_ordinary(address: Address, whisper: bool) -> None:
    """Print start, end, tokens and status of each request, until it is killed."""
    sound = encode_sound(0.5)

    async def one(number: int) -> None:
        began = time.time()
        if whisper:
            data = encode_file("/v1/audio/transcriptions", {"model": "frame"}, sound, ORDINARY)
        else:
            body = {"model": "frame", "prompt": [5 + number % 200, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
            data = encode_json("/v1/completions", body, ORDINARY)
        try:
            status, content = await send(address, data)
        except (OSError, TimeoutError) as error:
            status, content = 0, repr(error).encode()
        is_whole = status == 200 and (whisper or b"[DONE]" in content)
        reason = "" if is_whole else content[:200].decode("latin-1")
        print(json.dumps([began, time.time(), TOKENS if is_whole else 0, status, reason]), flush=True)

    async def stream(index: int) -> None:
        due = time.time() + index * PERIOD / STREAMS
        number = index
        while True:
            await asyncio.sleep(max(0.0, due - time.time()))
            await one(number)
            number += STREAMS
            due = max(due + PERIOD, time.time() - PERIOD)

    await asyncio.gather(*(stream(index) for index in range(2 if whisper else STREAMS)))


# ---- the run -------------------------------------------------------------------------------------


class Process:
    """A child whose lines are read; JSON lines are kept."""

    def __init__(self, *command: str, reads: str = "stdout") -> None:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, reads: subprocess.PIPE}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.child = subprocess.Popen([sys.executable, *command], env=environment, text=True, start_new_session=True, **streams)  # type: ignore[call-overload]
        self.rows: list[Any] = []
        self.lines: list[str] = []
        self._stream = self.child.stdout or self.child.stderr
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stream:
            if line.startswith("["):
                self.rows.append(json.loads(line))
            elif len(self.lines) < 5000:
                self.lines.append(line)

    def find_address(self, pattern: re.Pattern[str], seconds: float = 120) -> str:
        for _ in range(int(seconds * 20)):
            for line in list(self.lines):
                if match := pattern.search(line):
                    return ":".join([each for each in match.groups() if each][:2])
            if self.child.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit("not ready:\n" + "".join(self.lines[-20:]))

    def stop(self) -> float:
        """CPU seconds that it and its children took."""
        spent = measure_cpu(self.child.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGTERM)
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
        return spent


def list_family(pid: int) -> list[Any]:
    import psutil

    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def measure_cpu(pid: int) -> float:
    import psutil

    spent = 0.0
    for each in list_family(pid):
        with suppress(psutil.Error):
            spent += sum(each.cpu_times()[:2])
    return round(spent, 2)


def measure_memory(pids: list[int]) -> float:
    """Resident MiB of the processes and their children."""
    import psutil

    total = 0
    for pid in pids:
        for each in list_family(pid):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return round(total / MB, 1)


def list_memory(pids: list[int]) -> list[list[Any]]:
    """The title and the resident MiB of each process."""
    import psutil

    found = []
    for each in (each for pid in pids for each in list_family(pid)):
        with suppress(psutil.Error):
            words = [word for word in each.cmdline() if "frame" in word or "spawn" in word]
            found.append([" ".join(words)[-60:], round(each.memory_info().rss / MB, 1)])
    return found


def summarize(probe: Process, load: Process, start: float, end: float) -> dict[str, Any]:
    # A probe or request that is still running has no row: its age counts.
    health = sorted(took for began, took, status in list(probe.rows) if start <= began < end or began < start <= began + took)
    if probe.rows and time.time() - probe.rows[-1][0] > 1:
        health.append(round(time.time() - sum(probe.rows[-1][:2]), 3))
    done = [row for row in list(load.rows) if start <= row[1] < end]
    failures = [row[3:] for row in done if not row[2]]
    took = sorted(row[1] - row[0] for row in done)
    return {
        "health ms p50/p99/max": [round(1000 * pick(health, share), 1) for share in (0.5, 0.99, 1.0)],
        "latency s p50/p99/max": [round(pick(took, share), 3) for share in (0.5, 0.99, 1.0)],
        "tokens/s": round(sum(row[2] for row in done) / (end - start), 1),
        "failed": len(failures),
        "failures": failures[:3],
    }


def pick(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def start_server(arguments: argparse.Namespace, folder: str) -> tuple[list[Process], str, str]:
    keys = Path(folder) / "keys"
    keys.write_text(f"{ORDINARY}\n{HOSTILE}\n")
    common = ["--api-keys", str(keys), "--port", "0"]
    common += ["--set", f"batches.folder={folder}/batches", *arguments.flags.split()]
    flags = ["--served-model-name", "frame", *(["--model", arguments.whisper] if arguments.whisper else ["--grpc-port", "0"])]
    server = Process("-m", "frame", "serve", *common, *flags, reads="stderr")
    http = server.find_address(READY)
    grpc = "" if arguments.whisper else server.find_address(GRPC)
    if not arguments.router:
        return [server], http, grpc
    router = Process("-m", "frame", "router", "--port", "0", "--replica", f"http://{http}", reads="stderr")
    return [server, router], router.find_address(READY), grpc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of a window")
    parser.add_argument("--minutes", type=float, default=0, help="repeat the attacks for so long; 0: once")
    parser.add_argument("--only", default="", help="names of attacks, with commas: " + ", ".join(ATTACKS))
    parser.add_argument("--router", action="store_true", help="address a frame router before the server")
    parser.add_argument("--fresh", action="store_true", help="start a server for each attack")
    parser.add_argument("--whisper", default="", help="serve this Whisper checkpoint, and send sounds")
    parser.add_argument("--flags", default="", help="further flags of frame serve")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--http", default="", help=argparse.SUPPRESS)
    parser.add_argument("--grpc", default="127.0.0.1:0", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "probe":
        probe_health(parse_address(arguments.http))
    elif arguments.role == "load":
        asyncio.run(load_ordinary(parse_address(arguments.http), bool(arguments.whisper)))
    elif arguments.role:
        asyncio.run(ATTACKS[arguments.role](Targets(arguments.http, arguments.grpc)))  # type: ignore[arg-type]
    else:
        run(arguments)


def choose_attacks(arguments: argparse.Namespace) -> list[str]:
    if arguments.only:
        return str(arguments.only).split(",")
    if arguments.whisper:
        return ["sounds"]
    return [name for name in ATTACKS if name != "sounds" and not (arguments.router and name.startswith("grpc"))]


def run(arguments: argparse.Namespace) -> None:
    names = choose_attacks(arguments)
    if arguments.fresh:
        reports = [measure(arguments, [name]) for name in names]
    else:
        reports = [measure(arguments, names)]
    report = {"cores": os.cpu_count(), "router": arguments.router, "fresh servers": arguments.fresh, "servers": reports}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(arguments: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """One server under these attacks, one after another."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        servers, http, grpc = start_server(arguments, folder)
        pids = [each.child.pid for each in servers]

        def start(role: str) -> Process:
            address = ["--http", http, "--grpc", grpc or "127.0.0.1:0"]
            return Process(__file__, "--role", role, *address, *(["--whisper", "yes"] if arguments.whisper else []))

        probe, load = start("probe"), start("load")
        try:
            time.sleep(5)
            began = time.time()
            ends = began + 60 * arguments.minutes
            quiet = [watch(probe, load, arguments.seconds)]
            first_memory, first_processes = measure_memory(pids), list_memory(pids)
            while not rows or time.time() < ends:
                for name in names:
                    attack = start(name)
                    row = {"attack": name, **watch(probe, load, arguments.seconds), "MiB during": measure_memory(pids)}
                    row["attack's CPU s"] = attack.stop()
                    time.sleep(5)
                    quiet.append(watch(probe, load, arguments.seconds / 2))
                    row["MiB after"] = measure_memory(pids)
                    row["share of quiet tokens/s"] = round(row["tokens/s"] / (quiet[0]["tokens/s"] or 1), 3)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
            last_processes = list_memory(pids)
        finally:
            for each in (probe, load, *reversed(servers)):
                each.stop()
    report = {
        "seconds": round(time.time() - began), "MiB first/last": [first_memory, rows[-1]["MiB after"]],
        "processes first/last": [first_processes, last_processes],
        "failed": sum(row["failed"] for row in rows + quiet), "requests": len(load.rows),
        "health ms p99 of all": round(1000 * pick([row[1] for row in probe.rows if row[0] >= began], 0.99), 1),
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    return report | {"windows": rows, "quiet": quiet}


def watch(probe: Process, load: Process, seconds: float) -> dict[str, Any]:
    start = time.time()
    time.sleep(seconds)
    return summarize(probe, load, start, time.time())


if __name__ == "__main__":
    main()
