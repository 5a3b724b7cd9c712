"""Time to the first token of cold prompts with the prefix cache on, beside off; prints one JSON
object.

    python benchmarks/cold_prompts.py
    python benchmarks/cold_prompts.py --models .gpu/models/qwen3.6-35b-a3b --prompt-tokens 2048

Two schedulers, with the cache and without, share one runner. They take the same prompts of random
tokens in turn, in an order that changes between rounds. The cache holds a few rounds of prompts, so
that it evicts. On a CPU the figures are CPU time in one thread, on a GPU wall time. `ratio` is the
ratio of the sums over all rounds, `interval` the range of 95 % of the ratios of resampled rounds.
Without --models: two small models with random weights, one hybrid and one with full attention.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.checkpoints import make_checkpoint
from frame.testing.local_loop import LocalLoop

SIZES: dict[str, Any] = {  # about those of frame-tiny
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 2048, "head_dim": 32
}  # fmt: skip
HYBRID: dict[str, Any] = SIZES | {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def build(folder: str, arguments: argparse.Namespace) -> list[LocalLoop]:
    """With the cache, and without; both schedulers take turns with one runner."""
    on_gpu = torch.cuda.is_available()
    held = arguments.prompt_tokens * arguments.requests * arguments.held_rounds
    found = []
    for cache in (None, "none"):
        config: dict[str, Any] = {
            "model": {"path": folder, "load_format": "dummy", "skip_tokenizer_init": True, "max_context": 2 * arguments.prompt_tokens},
            "cache": {"prefix": cache, "page_size": arguments.page_size, "max_total_tokens": held},
            "scheduler": {"max_running_requests": arguments.requests, "chunked_prefill_size": arguments.chunk},
            "execution": {"device": "cuda"} if on_gpu else {"device": "cpu", "threads": 1},
        }
        found.append(prepare(FrameConfig.model_validate(config)))
    runner = build_rank(found[0].resolved, found[0].registry)
    return [LocalLoop(build_scheduler(each.resolved, each.registry, runner.capacity.pools), runner) for each in found]


def time_round(loop: LocalLoop, prompts: list[list[int]]) -> float:
    """Seconds until the last of the prompts has its first token."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start = clock()
    loop.generate(prompts, FIRST)
    return clock() - start


def find_interval(rounds: list[tuple[float, float]], numbers: random.Random) -> list[float]:
    drawn = []
    for _ in range(1000):
        picked = numbers.choices(rounds, k=len(rounds))
        drawn.append(sum(on for on, _ in picked) / sum(off for _, off in picked))
    drawn.sort()
    return [round(drawn[25], 4), round(drawn[-26], 4)]


def measure(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    loops = build(folder, arguments)
    numbers, vocabulary = random.Random(0), loops[0].runner.vocab_size
    rounds: list[tuple[float, float]] = []
    for number in range(arguments.warm + arguments.rounds):
        lengths = [arguments.prompt_tokens - (row * 7 if arguments.ragged else 0) for row in range(arguments.requests)]
        prompts = [[numbers.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
        gc.collect()
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {index: time_round(loops[index], prompts) for index in order}
        if number >= arguments.warm:
            rounds.append((seconds[0], seconds[1]))
    on, off = (sum(each) for each in zip(*rounds, strict=True))
    return {
        "model": Path(folder).name,
        "on_ms": round(1e3 * statistics.median(each for each, _ in rounds), 3),
        "off_ms": round(1e3 * statistics.median(each for _, each in rounds), 3),
        "ratio": round(on / off, 4),
        "interval": find_interval(rounds, numbers),
        "cached_tokens": loops[0].stats["cached"],
        "steps": [loop.stats["steps"] for loop in loops],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], help="folders; weights are random")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4, help="prompts of a round, which arrive together")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm", type=int, default=8, help="rounds before those that count, which also fill the cache")
    parser.add_argument("--held-rounds", type=int, default=4, help="rounds of prompts that the cache holds")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=2048, help="chunked_prefill_size")
    parser.add_argument("--ragged", action="store_true", help="prompts of different lengths, most of them no multiple of a page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        models = arguments.models
        if not models:
            hybrid = make_checkpoint("Qwen3_5ForCausalLM", f"{folder}/hybrid", **HYBRID)
            full = make_checkpoint("Qwen3ForCausalLM", f"{folder}/full", **SIZES)
            models = [str(hybrid), str(full)]
        results = [measure(model, arguments) for model in models]
    print(json.dumps({"arguments": vars(arguments), "results": results}, indent=1))


if __name__ == "__main__":
    main()
