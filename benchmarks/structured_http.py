"""What structured output costs a server: `python benchmarks/structured_http.py --config FOLDER`
prints one JSON object.

A server with random weights and a made vocabulary gets N requests at once over HTTP, each of 64
prompt and 200 output tokens, temperature 1; no grammar lets an output end before. A round is a run
of each kind after a free one, and a loss is against that free run. The first round of a kind is the
first use of its grammars, compilation included. `distinct` are 64 schemas that no request has used
before, in each round.

One H200, Llama-3.1-8B, about 4 minutes:

    CONFIG=shared/model_configs/llama-3.1-8b
    python benchmarks/structured_http.py --config $CONFIG --json $OUT/structured_http.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from structured_throughput import COUNTED, EBNF, PROMPT, model_folder

PERSON: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "email": {"type": "string", "maxLength": 60},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    "active": {"type": "boolean"},
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if tools %}{% endif %}"  # tools add nothing
READY_SECONDS = 240.0


def array_schema(**more: Any) -> dict[str, Any]:
    """Persons with more properties, in an array that never ends."""
    names = {**PERSON, **more}
    item = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    return {"type": "array", "minItems": 1000, "items": item}


def numbered_schema(number: int) -> dict[str, Any]:
    return array_schema(name={"type": "string", "maxLength": 20 + number % 32}, **{f"f{number}": {"type": "integer"}})


def tool_call(number: int) -> dict[str, Any]:
    """A call of one of four tools is enforced; its argument never ends."""
    tools = [
        {"type": "function", "function": {"name": f"store_{i}", "parameters": {
            "type": "object", "properties": {"rows": array_schema()}, "required": ["rows"], "additionalProperties": False}}}
        for i in range(4)
    ]  # fmt: skip
    return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": f"store_{number % 4}"}}}


class Kinds:
    """What request i of a round asks for, by kind."""

    def __init__(self) -> None:
        self._num_distinct = 1000  # schemas so far
        self.by_name: dict[str, Callable[[int], dict[str, Any]]] = {
            "free": lambda _: {},
            "schema": lambda _: {"structured_outputs": {"json": array_schema()}},
            "schemas": lambda i: {"structured_outputs": {"json": numbered_schema(i % 32)}},
            "distinct": self._ask_distinct,
            "counted": lambda _: {"structured_outputs": {"regex": COUNTED}},
            "ebnf": lambda _: {"structured_outputs": {"grammar": EBNF}},
            "tools": tool_call,
        }

    def _ask_distinct(self, number: int) -> dict[str, Any]:
        if number % 64 == 0 and number < 64:
            self._num_distinct += 64
        return {"structured_outputs": {"json": numbered_schema(self._num_distinct + number % 64)}}


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


class Server:
    """`frame serve` in a process group of its own."""

    def __init__(self, folder: str, settings: list[str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [
            sys.executable, "-m", "frame", "serve", "--model", folder, "--served-model-name", "made", "--port", str(port),
            "--load-format", "dummy", "--tool-call-parser", "hermes", "--max-model-len", "1024", "--max-running-requests", "256",
            *(part for each in settings for part in ("--set", each)),
        ]  # fmt: skip
        self._log = log.open("w")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).read()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise RuntimeError(f"the server is not ready; see {self._log.name}")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=280) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error}: {error.read()[:500]!r}") from None

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()


def run(server: Server, pool: ThreadPoolExecutor, asked: list[dict[str, Any]], length: int, numbers: random.Random) -> float:
    """Output tokens a second of requests sent at once."""

    def send(entry: tuple[int, dict[str, Any]]) -> int:
        seed, more = entry
        common = {"model": "made", "max_tokens": length, "temperature": 1.0, "seed": seed, "ignore_eos": True, **more}
        if "tools" in more:
            text = "".join(chr(97 + (seed * 7 + j * 11) % 26) for j in range(PROMPT))
            done = server.post("/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]})
        else:
            prompt = [300 + (seed * 31 + j * 17) % 1700 for j in range(PROMPT)]
            done = server.post("/v1/completions", {**common, "prompt": prompt})
        return int(done["usage"]["completion_tokens"])

    entries = [(numbers.randint(0, 1 << 30), each) for each in asked]
    began = time.perf_counter()
    tokens = sum(pool.map(send, entries))
    seconds = time.perf_counter() - began
    if tokens != length * len(asked):
        raise RuntimeError(f"{tokens} tokens came of {length * len(asked)}")
    return tokens / seconds


def measure(server: Server, names: list[str], count: int, length: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of each run, and losses in percent."""
    kinds, numbers = Kinds(), random.Random(count)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with ThreadPoolExecutor(count) as pool:
        for _ in range(2):
            run(server, pool, [{}] * count, length, numbers)
        for _ in range(rounds):
            for name in names:
                free = run(server, pool, [{}] * count, length, numbers)
                found[name].append((run(server, pool, [kinds.by_name[name](i) for i in range(count)], length, numbers), free))
    rows = {}
    for name, runs in found.items():
        losses = [round(100 * (1 - mine / free), 1) for mine, free in runs]
        steady = losses if name == "distinct" else losses[1:]
        rows[name] = {
            "first_loss_percent": losses[0],
            "steady_loss_percent": round(statistics.median(steady), 1) if steady else None,
            "tokens_per_second": [round(mine) for mine, _ in runs],
            "free": [round(free) for _, free in runs],
        }
        print(count, name, rows[name], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="folder of a config.json; by default the sizes of frame-tiny")
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--only", nargs="+", default=["schema", "schemas", "distinct", "counted", "ebnf", "tools"])
    parser.add_argument("--length", type=int, default=200, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of the server")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--log", type=Path, default=Path("structured_http.log"), help="file for the server's output")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    with model_folder(options.config, None) as (folder, _):
        file = Path(folder, "tokenizer_config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
        server = Server(folder, options.set, options.log)
        try:
            server.wait_ready()
            for count in options.requests:
                rows[str(count)] = measure(server, options.only, count, options.length, options.rounds)
        finally:
            server.close()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_after": os.getloadavg()[0]}
    what = {"config": None if options.config is None else options.config.name, "length": options.length, "settings": options.set}
    text = json.dumps({**what, "machine": machine, "rows": rows}, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
