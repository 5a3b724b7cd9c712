"""KV cache tiers: time to the first token of a prompt from the device, from each tier and computed,
and the throughput of conversations beyond the device's pool; prints one JSON object.

    python benchmarks/kv_tiers.py --model .gpu/models/llama-3.1-8b --tiers host
    python benchmarks/kv_tiers.py --tiers host disk --prompt-tokens 1024     # frame-tiny on a CPU

The prompts have random tokens; other prompts evict one from the pool before it is sent again.
`limit` is what copying the bytes from page-locked memory in one piece takes. Conversations: of
`--turns` turns each, in turn, with and without tiers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from typing import Any

from gpu_clock import time_copy

from frame import Engine, SamplingParams

FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def time_first(engine: Engine, prompt: list[int]) -> float:
    """Seconds to the first token."""
    start = time.perf_counter()
    engine.generate([prompt], FIRST)
    return time.perf_counter() - start


def open_engine(arguments: argparse.Namespace, tiers: list[str], pool_tokens: int) -> Engine:
    options: dict[str, Any] = {"model": "frame-tiny", "max_total_tokens": pool_tokens, "skip_tokenizer_init": True}
    if arguments.model:
        options |= {"model": arguments.model, "load_format": "dummy", "max_model_len": 2 * arguments.prompt_tokens}
    if tiers:
        known = {"kv_tier/host": {"size_gib": arguments.host_gib}, "kv_tier/disk": {"folder": tempfile.mkdtemp()}}
        chosen = {name: values for name, values in known.items() if name.removeprefix("kv_tier/") in tiers}
        options |= {"cache_tiers": tiers, "plugins_options": chosen}
    return Engine(**options)


def time_prompts(arguments: argparse.Namespace, numbers: random.Random) -> dict[str, Any]:
    def draw(count: int) -> list[int]:
        return [numbers.randrange(10, 2000) for _ in range(count)]

    size, times = arguments.prompt_tokens, dict[str, list[float]](computed=[], device=[], tier=[])
    with open_engine(arguments, arguments.tiers, 3 * size) as engine:
        engine.generate([draw(size)], FIRST)
        time.sleep(arguments.start_pause)
        for _ in range(arguments.rounds):
            prompt = draw(size)
            times["computed"].append(time_first(engine, prompt))
            times["device"].append(time_first(engine, prompt))
            time.sleep(arguments.pause)  # the stores end
            for _ in range(3):
                engine.generate([draw(size)], FIRST)
            times["tier"].append(time_first(engine, prompt))
    return {name: {"median": statistics.median(values), "all": values} for name, values in times.items()}


def time_conversations(arguments: argparse.Namespace, tiers: list[str], numbers: random.Random) -> dict[str, Any]:
    """Output tokens a second of all conversations, whose prefixes fill four times the pool."""
    size = arguments.prompt_tokens // arguments.turns
    texts: list[list[int]] = [[] for _ in range(arguments.conversations)]
    pool = arguments.conversations * arguments.prompt_tokens // 4
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with open_engine(arguments, tiers, pool) as engine:
        engine.generate([[5] * 64], params)
        time.sleep(arguments.start_pause if tiers else 0.0)
        start = time.perf_counter()
        for _ in range(arguments.turns):
            for text in texts:
                text += [numbers.randrange(10, 2000) for _ in range(size - 64)]
            for text, output in zip(texts, engine.generate(texts, params), strict=True):
                text += output.token_ids
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "output_tokens_per_second": arguments.turns * len(texts) * 64 / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--tiers", nargs="+", default=["host"])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--token-bytes", type=int, default=131_072, help="of the KV cache, for `limit`")
    parser.add_argument("--host-gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds")
    parser.add_argument("--start-pause", type=float, default=0.0, help="seconds, in which memory is page-locked")
    parser.add_argument("--conversations", type=int, default=16, help="0: leave them out")
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"arguments": vars(arguments), "first_token": time_prompts(arguments, random.Random(0))}
    report["limit"] = time_copy(arguments.prompt_tokens * arguments.token_bytes)
    if arguments.conversations:
        report["conversations"] = {
            name: time_conversations(arguments, tiers, random.Random(1)) for name, tiers in (("on", arguments.tiers), ("off", []))
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
