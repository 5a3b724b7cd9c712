"""Time and CPU seconds of a start on a CPU until the first token, for checkouts in turn.

    python benchmarks/start_cpu.py --tree OLD --tree . --rounds 5 --json RESULT.json [-- --model W]

Each tree has its own `.venv`. `frame serve` runs with the flags after `--`; the first request is
sent when it reports ready. `imports`: CPU seconds of one process that imports what is named.
PYTHONDONTWRITEBYTECODE, with which each process compiles the Python files again, is removed from
the environment. `--realtime` runs each start with `chrt -f 1`, so that other work of the machine
does not hold it up; but its processes do not preempt each other either, so starts whose processes
work at the same time take longer than without it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

READY = re.compile(r"ready on http://([\d.]+):(\d+)")
PAUSED = "import gc; gc.disable(); "
IMPORTS = {
    "nothing": "pass",
    "numpy": "import numpy",
    "torch": "import torch",
    "torch, without collection": PAUSED + "import torch",
    "worker": PAUSED + "import frame.entrypoints.processes.worker",
    "worker and engine": PAUSED + "import frame.entrypoints.processes.worker, frame.entrypoints.processes.build_engine",
    "HTTP server": PAUSED + "import frame.entrypoints.http.server",
}
REPORT = """
import os, resource
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, flush=True)
os._exit(0)
"""


def count_imports(tree: Path, prefix: list[str], code: str) -> float:
    done = subprocess.run([*prefix, ".venv/bin/python", "-c", code + REPORT], cwd=tree, capture_output=True, text=True, check=True)
    return round(float(done.stdout), 3)


def time_start(tree: Path, prefix: list[str], flags: list[str]) -> dict[str, Any]:
    """One start: seconds to the ready line and to the first token, CPU seconds by process."""
    began = time.perf_counter()
    command = [*prefix, ".venv/bin/python", "-m", "frame", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, cwd=tree, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        log: list[str] = []
        address = None
        for line in server.stderr:
            log.append(line.rstrip())
            if address := READY.search(line):
                break
        if address is None:
            raise SystemExit("\n".join(log))
        ready = time.perf_counter() - began
        connection = http.client.HTTPConnection(address[1], int(address[2]))
        body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        first = time.perf_counter() - began
        assert response.status == 200, response.status
        used = {}
        parent = psutil.Process(server.pid)
        for process in (parent, *parent.children(recursive=True)):
            words, times = process.cmdline(), process.cpu_times()
            used["main" if process.pid == parent.pid else words[words.index("-m") + 2]] = round(times.user + times.system, 2)
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    phases = next((line for line in log if "engine ready after" in line), "")
    return {"ready_s": round(ready, 3), "first_token_s": round(first, 3), "cpu_s": used, "phases": phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    prefix = ["chrt", "-f", "1"] if options.realtime else []
    trees = dict(enumerate(options.tree))
    starts: dict[int, list[dict[str, Any]]] = {number: [] for number in trees}
    for tree in options.tree:
        time_start(tree, prefix, options.flags)  # compiles the Python files and fills the file cache
    for turn in range(options.rounds):
        for number in sorted(trees, reverse=bool(turn % 2)):
            starts[number].append(time_start(trees[number], prefix, options.flags))
            print(number, json.dumps(starts[number][-1]), flush=True)
    last = options.tree[-1]
    imports = {name: [count_imports(last, prefix, code) for _ in range(options.rounds)] for name, code in IMPORTS.items()}
    for number in trees:
        print(number, {key: statistics.median(start[key] for start in starts[number]) for key in ("ready_s", "first_token_s")})
    print({name: statistics.median(values) for name, values in imports.items()})
    if options.json:
        found = {"flags": options.flags, "starts": list(starts.values()), "imports_cpu_s": imports}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
