"""What `frame.lang` gains: a fork against independent calls, and a batch of programs against plain
loops.

Prints one JSON object, medians of `--rounds`. Engine and server run on the CPU with the embedded
model. `fork`: four branches of a prefix of 1,000 tokens; the same prompts one after the other and
at once, on an engine without prefix cache. `batch`: 64 programs with a shared prefix over one
server: `run_batch`, a loop of `run`, and `asyncio.gather` over the openai client; the cache is
flushed before each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from frame import Client, Engine
from frame.lang import assistant, function, gen, system, user

KEYS: dict[str, Any] = {"model": "frame-tiny", "max_model_len": 2048, "max_total_tokens": 65536}
PREFIX = "".join(f"Rule {number}: be brief and be kind.\n" for number in range(100))
COUNT = 64


@function
def branches(s: Any, prefix: str) -> None:
    s += prefix
    for number, branch in enumerate(s.fork(4)):
        branch += f"Question {number}:"
        branch += gen("answer", max_tokens=8, ignore_eos=True, temperature=0.0)


@function
def label(s: Any, number: int) -> None:
    s += system(PREFIX[:2000])
    s += user(f"Item {number}?")
    s += assistant(gen("label", max_tokens=8, ignore_eos=True, temperature=0.0))


def measure_fork(rounds: int) -> dict[str, Any]:
    prompts = [f"{PREFIX}Question {number}:" for number in range(4)]
    params = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    with Engine(**KEYS) as engine, Engine(**KEYS, prefix_cache="none") as plain:
        usage = {}

        def fork() -> None:
            engine.flush_cache()
            usage.update(branches.run(prefix=PREFIX, backend=engine).usage)

        times = _rounds(
            rounds,
            fork=fork,
            independent_in_turn=lambda: [plain.generate(prompt, params) for prompt in prompts],
            independent_at_once=lambda: plain.generate(prompts, params),
        )
        return {"prefix_tokens": len(engine.tokenizer.encode(PREFIX)), "fork_usage": usage, "seconds": times}


def measure_batch(rounds: int) -> dict[str, Any]:
    cached: dict[str, float] = {}
    with _server() as url, Client(url) as client:

        def note(name: str, prompt: int, hits: int) -> None:
            cached[name] = round(hits / prompt, 3)

        def batch() -> None:
            client.flush_cache()
            states = label.run_batch([{"number": number} for number in range(COUNT)], backend=client)
            note("run_batch", *(sum(state.usage[key] for state in states) for key in ("prompt_tokens", "cached_tokens")))

        def loop() -> None:
            client.flush_cache()
            states = [label.run(number=number, backend=client) for number in range(COUNT)]
            note("loop", *(sum(state.usage[key] for state in states) for key in ("prompt_tokens", "cached_tokens")))

        def gather() -> None:
            client.flush_cache()
            usages = asyncio.run(_gather(url))
            note("gather", sum(each.prompt_tokens for each in usages), sum(each.prompt_tokens_details.cached_tokens for each in usages))

        return {"programs": COUNT, "seconds": _rounds(rounds, run_batch=batch, loop=loop, gather=gather), "cached_share": cached}


async def _gather(url: str) -> list[Any]:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        calls = [
            api.chat.completions.create(
                model="frame-tiny",
                messages=[{"role": "system", "content": PREFIX[:2000]}, {"role": "user", "content": f"Item {number}?"}],
                max_tokens=8,
                temperature=0.0,
                extra_body={"ignore_eos": True},
            )
            for number in range(COUNT)
        ]
        return [reply.usage for reply in await asyncio.gather(*calls)]


@contextlib.contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "frame", "serve", "--port", "0", "--max-model-len", "2048", "--max-total-tokens", "65536"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stderr is not None
    try:
        yield next(found.group(1) for line in process.stderr if (found := re.search(r"ready on (\S+)", line)))
    finally:
        process.terminate()
        process.wait(30)


def _rounds(rounds: int, **cases: Callable[[], Any]) -> dict[str, float]:
    """The median seconds of each case, run in turn after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: round(statistics.median(values), 4) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = {"fork": measure_fork(arguments.rounds), "batch": measure_batch(arguments.rounds), "load": os.getloadavg()[0]}
    text = json.dumps(report, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
