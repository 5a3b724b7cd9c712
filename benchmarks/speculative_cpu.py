"""Throughput of frame-tiny on the CPU with and without drafters, by task and number of streams,
with an acceptance table; writes JSON.

The tasks are those of `frame eval`: copy and recall are chats, python is a continuation of code.
As many requests as streams run at once; the next one starts when one has ended. Prompts are
computed before (the prefix cache has them), so that the rate is that of decodes. The settings run
in turn, and the median of the repetitions counts; seconds are those of the processor, which other
processes disturb less. Scheduler and runner share one thread, without text and transport.

    python benchmarks/speculative_cpu.py --out benchmarks/results/speculative-cpu.json
    python benchmarks/speculative_cpu.py --drafters ngram --tasks copy --streams 1 --repeats 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.tools.eval.tasks import make_examples
from frame.testing.local_loop import LocalLoop
from frame.text.tokenizer import Tokenizer

TASKS = ("copy", "recall", "python")
OUTPUT = {"copy": 160, "recall": 32, "python": 96}  # most tokens of an answer


def make_loop(algorithm: str | None, args: argparse.Namespace, streams: int) -> LocalLoop:
    config = {
        "model": {"path": str(find_model(EMBEDDED)), "dtype": "float32"},
        "cache": {"max_total_tokens": 96 * 1024},
        "scheduler": {"max_running_requests": streams},
        "execution": {"device": "cpu", "threads": args.threads},
        "speculative": {"algorithm": algorithm, "num_steps": args.num_steps} if algorithm else {},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.num_pages), runner)


def make_prompts(task: str, count: int, seed: int) -> list[list[int]]:
    tokenizer = Tokenizer.load(find_model(EMBEDDED))
    prompts = []
    for example in make_examples(task, count, seed):
        text = example.prompt
        if example.messages:
            text = "".join(f"<|{message['role']}|>{message['content']}" for message in example.messages) + "<|assistant|>"
        prompts.append(tokenizer.encode(f"<|bos|>{text}", add_special_tokens=False))
    return prompts


def run(loop: LocalLoop, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """Tokens per second, and the counters of drafts."""
    loop.generate(prompts, SamplingParams(max_tokens=1))
    before, steps, began = loop.scheduler.get_load(), loop.stats["steps"], time.process_time()
    tokens = sum(map(len, loop.generate(prompts, params)))
    seconds, after = time.process_time() - began, loop.scheduler.get_load()
    drafted, accepted = (after.get(name, 0) - before.get(name, 0) for name in ("drafted_tokens", "accepted_tokens"))
    return {
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "steps": loop.stats["steps"] - steps,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    drafters: list[str | None] = [None, *args.drafters]
    loops = {(drafter, streams): make_loop(drafter, args, streams) for drafter in drafters for streams in args.streams}
    for loop in loops.values():
        run(loop, make_prompts("copy", 2, seed=9), SamplingParams(temperature=args.temperature, seed=1, max_tokens=8))  # warm-up
    found: list[dict[str, Any]] = []
    for task in args.tasks:
        params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=OUTPUT[task])
        for streams in args.streams:
            runs: dict[str | None, list[dict[str, float]]] = {drafter: [] for drafter in drafters}
            for repeat in range(args.repeats):
                prompts = make_prompts(task, args.samples * (1 if streams == 1 else 3), seed=100 * streams + repeat)
                for drafter in drafters:
                    runs[drafter].append(run(loops[drafter, streams], prompts, params))
            for drafter, each in runs.items():
                rate = statistics.median(one["tokens_per_second"] for one in each)
                drafted, accepted = (sum(one[name] for one in each) for name in ("drafted", "accepted"))
                pairs = zip(each, runs[None], strict=True)
                tokens, steps = (sum(one[name] for one in each) for name in ("tokens", "steps"))
                row = {
                    "task": task,
                    "streams": streams,
                    "drafter": drafter or "off",
                    "tokens_per_second": rate,
                    "ratio": (ratio := statistics.median(one["tokens_per_second"] / base["tokens_per_second"] for one, base in pairs)),
                    "acceptance": accepted / drafted if drafted else None,
                    "tokens_per_step": tokens / steps,
                    "runs": each,
                }
                found.append(row)
                shown = "      -" if row["acceptance"] is None else f"{100 * row['acceptance']:6.1f}%"
                print(f"{task:7} {streams} streams {row['drafter']:7} {rate:8.0f} tokens/s {ratio:5.2f} x off {shown} accepted", flush=True)
    if args.out:
        settings = {"num_steps": args.num_steps, "temperature": args.temperature, "samples": args.samples, "threads": args.threads}
        args.out.write_text(json.dumps({"settings": settings, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
