"""Throughput on the CPU, bf16, 64 tokens in and 64 out, 32 requests: `frame` beside transformers,
in one run on the same cores.

Prints one JSON object with tokens/s and ratios: the embedded model offline against `generate` on
one static batch, through the HTTP server with 32 streaming clients, a Qwen3 of the same size
against transformers' continuous batching (`generate_batch`), and the processor time of everything
but the model. Every part runs in a fresh process, one after the other, repeated in both orders; the
median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REQUESTS, INPUT, OUTPUT = 32, 64, 64


def prompts(vocab: int, count: int = REQUESTS, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(16, vocab) for _ in range(INPUT)] for _ in range(count)]


def vocab_size(model: str) -> int:
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


def timed(run: Any, repeats: int) -> list[float]:
    """Tokens/s of each repeat after one warm-up; `run(seed)` returns the number of tokens."""
    run(999)
    rates = []
    for seed in range(repeats):
        begin = time.perf_counter()
        tokens = run(seed)
        rates.append(tokens / (time.perf_counter() - begin))
    return rates


def frame_offline(model: str, repeats: int, threads: int) -> list[float]:
    from frame import Engine, SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUT)
    with Engine(model=model, dtype="bfloat16", skip_tokenizer_init=True, threads=threads) as engine:

        def run(seed: int) -> int:
            return sum(len(result.token_ids) for result in engine.generate(prompts(vocab_size(model), seed=seed), params))

        return timed(run, repeats)


def transformers_static(model: str, repeats: int, threads: int) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(seed: int) -> int:
        ids = torch.tensor(prompts(vocab_size(model), seed=seed))
        with torch.inference_mode():
            out = network.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, pad_token_id=0
            )
        return int(out.shape[0] * (out.shape[1] - INPUT))

    return timed(run, repeats)


def continuous(model: str, repeats: int, threads: int, keeps_manager: bool) -> list[float]:
    """`generate_batch`: a plain call builds its cache and warms up each time; with a kept manager
    only the first call does."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    settings = GenerationConfig(do_sample=False, max_new_tokens=OUTPUT, eos_token_id=-1, pad_token_id=0)

    def run(seed: int) -> int:
        out = network.generate_batch(
            inputs=prompts(vocab_size(model), seed=seed), generation_config=settings, progress_bar=False, persistent_manager=keeps_manager
        )
        return sum(len(result.generated_tokens) for result in out.values())

    return timed(run, repeats)


def transformers_continuous(model: str, repeats: int, threads: int) -> list[float]:
    return continuous(model, repeats, threads, keeps_manager=False)


def transformers_continuous_warm(model: str, repeats: int, threads: int) -> list[float]:
    return continuous(model, repeats, threads, keeps_manager=True)


async def one_stream(port: int, model: str, ids: list[int]) -> int:
    """A plain HTTP/1.1 client: sends one streaming completion, counts the tokens that `usage`
    reports at its end."""
    body = json.dumps(
        {
            "model": model,
            "prompt": ids,
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    received = await reader.read()
    writer.close()
    events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
    if len(events) < 2:
        raise RuntimeError(f"the server answered {received[:400]!r}")
    return int(json.loads(events[-1].rstrip(b"\r"))["usage"]["completion_tokens"])


def frame_http(model: str, repeats: int, threads: int) -> list[float]:
    """The server as a user starts it: it shares the cores (`threads` in all) with this client and
    chooses its own threads."""
    command = [sys.executable, "-m", "frame", "serve", "--model", model, "--dtype", "bfloat16", "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            port, name = wait_ready(server, log, model)

            async def all_streams(seed: int) -> int:
                return sum(await asyncio.gather(*(one_stream(port, name, ids) for ids in prompts(vocab_size(model), seed=seed))))

            return timed(lambda seed: asyncio.run(all_streams(seed)), repeats)
        finally:
            server.terminate()
            server.wait(60)


def wait_ready(server: subprocess.Popen[bytes], log: Any, model: str) -> tuple[int, str]:
    import re
    import urllib.request

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        log.seek(0)
        text = log.read()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", text)
        if found:
            port = int(found.group(1))
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                    return port, json.load(answer)["data"][0]["id"]
            except OSError:
                pass
        if server.poll() is not None:
            raise RuntimeError(f"the server ended: {text[-2000:]}")
        time.sleep(0.1)
    raise RuntimeError("the server was not ready in 120 s")


def qwen3_of_same_size(folder: Path) -> None:
    """A random Qwen3 with about the embedded model's number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


PARTS = {f.__name__: f for f in (frame_offline, frame_http, transformers_static, transformers_continuous, transformers_continuous_warm)}


def measure(part: str, model: str, repeats: int, threads: int) -> list[float]:
    """One part in a fresh process; tokens/s of each repeat."""
    command = [sys.executable, __file__, "--part", part, "--model", model, "--repeats", str(repeats), "--threads", str(threads)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=environment)
    if done.returncode:
        raise RuntimeError(f"{part} failed:\n{done.stderr[-3000:]}")
    rates: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return rates


def front_end(step: float) -> float:
    """Milliseconds of CPU a step of scheduler, text and HTTP at 64 streams over a fake model that
    takes `step` seconds a step."""
    script = Path(__file__).with_name("frontend.py")
    command = [sys.executable, str(script), "--requests", "64", "--step", str(step)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return float(json.loads(done.stdout[done.stdout.index("{") :])["cpu_ms_per_step"])


def machine() -> dict[str, Any]:
    """Where and with what the figures were taken."""
    from importlib.metadata import version

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "cpu": fields.get("model name", platform.processor()),
        "features": [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in fields.get("flags", "")],
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")} | {"python": platform.python_version()},
        "commit": commit.stdout.strip(),
    }


def summary(rates: list[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(rates), 1), "all": [round(rate, 1) for rate in rates]}


def compare(embedded: str, repeats: int, rounds: int, threads: int) -> dict[str, Any]:
    """All parts, one after the other, `rounds` times, every other round backwards."""
    with tempfile.TemporaryDirectory() as scratch:
        qwen3_of_same_size(Path(scratch))
        parts = [
            ("frame-tiny, transformers generate, static batch", "transformers_static", embedded),
            ("frame-tiny, frame offline", "frame_offline", embedded),
            ("frame-tiny, frame HTTP, 32 streams", "frame_http", embedded),
            ("Qwen3, transformers generate_batch", "transformers_continuous", scratch),
            ("Qwen3, transformers generate_batch, warm manager", "transformers_continuous_warm", scratch),
            ("Qwen3, frame offline", "frame_offline", scratch),
        ]
        rates: dict[str, list[float]] = {name: [] for name, _, _ in parts}
        for number in range(rounds):
            for name, part, model in parts[:: -1 if number % 2 else 1]:
                rates[name] += measure(part, model, repeats, threads)
    median = [statistics.median(values) for values in rates.values()]
    return {
        "rows": {name: summary(values) for name, values in rates.items()},
        "ratios": {
            "offline / generate (>= 2.5)": round(median[1] / median[0], 2),
            "HTTP / generate (>= 1.5)": round(median[2] / median[0], 2),
            "Qwen3 offline / generate_batch (>= 30)": round(median[5] / median[3], 2),
            "Qwen3 offline / generate_batch with a warm manager": round(median[5] / median[4], 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=sorted(PARTS), help="run one part and print its rates (used by the whole)")
    parser.add_argument("--model", default=None, help="checkpoint folder; the embedded model when not given")
    parser.add_argument("--repeats", type=int, default=4, help="counted repeats of a part in one process, after a warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="how often all parts are run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    embedded = options.model or str(Path(__file__).parents[1] / "frame" / "models" / "frame_tiny")
    if options.part:
        print(json.dumps(PARTS[options.part](embedded, options.repeats, options.threads)))
        return
    report = {
        "what": f"{REQUESTS} requests, {INPUT} in, {OUTPUT} out, bf16, {options.threads} threads, output tokens/s",
        "machine": machine(),
        **compare(embedded, options.repeats, options.rounds, options.threads),
        "front end at 64 streams, CPU ms a step (<= 1), by the model's ms a step": {
            f"{step * 1000:g}": round(front_end(step), 2) for step in (0.004, 0.008, 0.02)
        },
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
