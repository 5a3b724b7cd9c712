"""Weights that change while serving, on a GPU: seconds and memory of updates by tensors of another
process, and of sleep and wake; prints one JSON object.

    python benchmarks/weight_updates.py --model .gpu/models/llama-3.1-8b --updates 4
    python benchmarks/weight_updates.py --model … --server-card 0 --ways group-cuda

The server has random weights of the shape of `--model`, and the trainer, this process, a copy of
that shape on the same card. `update`: each way of `--ways`; `engine_bytes`: how much more of the
card the engine holds at most during an update, sampled every 5 ms, less the trainer's bucket.
`sleep`: seconds to release and to map again, what was freed of the engine's memory, and the limit:
the bytes of the weights at the rate of a copy from page-locked memory. `same_tokens`: greedy tokens
after an update with other weights and back, and after the wake, equal those before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from gpu_clock import time_copy
from transformers import AutoConfig, AutoModelForCausalLM

from frame.rl import WeightClient
from frame.rl.weight_client import BUCKET_BYTES

PROMPT = list(range(100, 164))


class Server:
    """`frame serve` with random weights, in a process of its own."""

    def __init__(self, model: Path, flags: list[str], card: int | None = None) -> None:
        start = time.perf_counter()
        chosen = {} if card is None or not torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": str(card)}
        command = [sys.executable, "-m", "frame", "serve", "--model", str(model), "--load-format", "dummy", "--port", "30555", *flags]
        self.process = subprocess.Popen([*command, "--skip-tokenizer-init"], env={**os.environ, **chosen})
        self.http = httpx.Client(base_url="http://127.0.0.1:30555", timeout=300)
        while True:
            if self.process.poll() is not None:
                raise SystemExit("the server did not start")
            try:
                if self.http.get("/health/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        self.start_seconds = time.perf_counter() - start

    def post(self, path: str, body: Any = None) -> float:
        """Seconds of a request that has to succeed."""
        start = time.perf_counter()
        reply = self.http.post(path, json=body)
        if reply.status_code != 200:
            raise SystemExit(f"{path}: {reply.status_code} {reply.text}")
        self.reply = reply.json() if reply.content else None
        return time.perf_counter() - start

    def generate(self) -> list[int]:
        params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        self.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
        tokens: list[int] = self.reply["output_ids"]
        return tokens


def used_bytes() -> int:
    """Of the server's card, the first one; 0 without a card."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free


@contextmanager
def watch_memory() -> Iterator[dict[str, int]]:
    """The most memory that is used on the card meanwhile, above that at the beginning."""
    before, done, most = used_bytes(), threading.Event(), {"bytes": 0}

    def sample() -> None:
        while not done.wait(0.005):
            most["bytes"] = max(most["bytes"], used_bytes() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def make_weights(model: Path, seed: int, device: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).state_dict()
    torch.manual_seed(seed)
    drawn = "cuda" if torch.cuda.is_available() else device  # one core takes minutes to draw 8 billion numbers
    return {
        name: torch.ones(each.shape, dtype=torch.bfloat16, device=device)
        if name.endswith("norm.weight")
        else torch.empty(each.shape, dtype=torch.bfloat16, device=drawn).normal_(std=0.02).to(device)
        for name, each in shapes.items()
    }


def copy_rate() -> float:
    """Bytes a second of a copy from page-locked memory to the card."""
    size = 2 << 30
    return size / time_copy(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--ways", nargs="+", default=["ipc-cuda", "ipc-cpu"], help="ipc-cuda, ipc-cpu, group-cuda, group-cpu")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--sleep", action="store_true", help="measure sleep too, which needs torch-memory-saver")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds before the first sleep")
    parser.add_argument("--max-total-tokens", default="32768")
    parser.add_argument(
        "--server-card", type=int, choices=(0,), help="the server has card 0, the trainer card 1; default: both have card 0"
    )
    parser.add_argument("--tp", default="1", help="ranks of the server")
    parser.add_argument("--device", default="cuda", help="of the server")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if on_gpu and arguments.server_card is not None:
        torch.cuda.set_device(1)
    before = used_bytes()
    flags = ["--weight-transfer", "ipc", "--weight-transfer", "group", "--max-total-tokens", arguments.max_total_tokens]
    flags += [
        "--tp",
        arguments.tp,
        "--device",
        arguments.device,
        "--max-model-len",
        "4096",
        *(("--sleep-mode", "wait") if arguments.sleep else ()),
    ]
    server = Server(arguments.model, flags, arguments.server_card)
    card = torch.cuda.get_device_name() if on_gpu else "cpu"
    report: dict[str, Any] = {"arguments": {**vars(arguments), "model": arguments.model.name}, "card": card}
    report |= {"start_seconds": server.start_seconds, "engine_bytes": used_bytes() - before, "update": {}}
    try:
        client = WeightClient("http://127.0.0.1:30555")
        for way in arguments.ways:
            kind, device = way.split("-")
            if kind == "group":
                client.join_group(device=device)
            else:
                client.leave_group()
            tokens: dict[int, list[int]] = {}
            row: dict[str, Any] = {"seconds": [], "engine_bytes": [], "same_tokens": True}
            for number in range(arguments.updates):
                weights = make_weights(arguments.model, number % 2, device)
                if on_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                with watch_memory() as most:
                    start = time.perf_counter()
                    client.update(weights, f"{way}-{number}")
                    row["seconds"].append(time.perf_counter() - start)
                row["engine_bytes"].append(most["bytes"] - (BUCKET_BYTES if device == "cuda" else 0))
                row["same_tokens"] &= tokens.setdefault(number % 2, server.generate()) == server.generate()
            if arguments.updates:
                row["weights_bytes"] = sum(each.nbytes for each in weights.values())
                row["differ"] = tokens[0] != tokens.get(1)
                del weights
            report["update"][way] = row
        if on_gpu:
            torch.cuda.empty_cache()
        if arguments.sleep:
            rows = []
            time.sleep(arguments.idle)
            for _ in range(3):
                tokens_before, held = server.generate(), used_bytes() - before
                released = server.post("/sleep?level=1&mode=abort")
                asleep = used_bytes() - before
                woken = server.post("/wake_up")
                first = time.perf_counter()
                same = server.generate() == tokens_before
                seconds = {"sleep_seconds": released, "wake_seconds": woken, "first_request_seconds": time.perf_counter() - first}
                rows.append({**seconds, "held_bytes": held, "left_bytes": asleep, "same_tokens": same})
            report["sleep"] = {"rows": rows, "copy_bytes_per_second": copy_rate() if on_gpu else None}
    finally:
        server.process.terminate()
        server.process.wait()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
