"""Where a step's time goes on this CPU: prepared inputs, forward, sampler, commit. Prints one JSON
object.

    python benchmarks/runner_cpu.py [--model frame-tiny] [--rows 32 64] [--threads 2]
    python benchmarks/runner_cpu.py [--temperature 0] [--compile] [--profile]

Random prompts of 64 tokens, 64 tokens out; milliseconds are medians over the decode steps.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time
from collections import defaultdict

import torch

from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Generate
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler


class StartDetokenize:
    """Adds up the seconds of named calls, by wrapping methods."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def on(self, owner, name, label):
        call = getattr(owner, name)

        def timed(*arguments, **named):
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[label] += time.perf_counter() - start

        setattr(owner, name, timed)


def build(model, rows, threads, dtype, is_compiled=False):
    config = {
        "model": {"path": model, "dtype": dtype},
        "scheduler": {"max_running_requests": rows, "chunked_prefill_size": 8192},
        "execution": {"device": "cpu", "threads": threads, "torch_compile": is_compiled, "torch_compile_max_bs": rows},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return runner, build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools)


def measure(arguments, rows, params):
    runner, scheduler = build(arguments.model, rows, arguments.threads, arguments.dtype, arguments.compile)
    numbers = random.Random(0)
    vocab = runner.vocab_size

    def run(tag, watch=None):
        for row in range(rows):
            ids = [numbers.randrange(vocab) for _ in range(64)]
            assert scheduler.add_request(Generate(rid=f"{tag}{row}", token_ids=ids, params=params)) is None
        steps, start = [], time.perf_counter()
        while not scheduler.is_idle:
            if watch:
                watch.seconds.clear()
            begin = time.perf_counter()
            batch = scheduler.schedule_batch(begin)
            scheduled = time.perf_counter()
            if batch is None:
                continue
            result = runner.launch(batch).wait()
            ran = time.perf_counter()
            scheduler.commit(batch, result)
            end = time.perf_counter()
            if watch and batch.num_decodes == rows:
                own = {"schedule": scheduled - begin, "launch": ran - scheduled, "commit": end - ran, "step": end - begin}
                steps.append({**watch.seconds, **own})
        return steps, time.perf_counter() - start

    run("warm")
    watched = StartDetokenize()
    watched.on(runner.inputs, "prepare", "prepare")
    watched.on(runner.sampler, "sample", "sampler")
    watched.on(runner.model, "compute_logits", "head")
    watched.on(runner, "forward", "forward")
    steps, seconds = run("timed", watched)
    table = {name: round(1e3 * statistics.median(step.get(name, 0.0) for step in steps), 3) for name in steps[0]}
    return {"rows": rows, "tokens_per_second": round(rows * params.max_tokens / seconds), "milliseconds": table}, run


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="frame-tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--profile", action="store_true", help="also print where Python spends its time")
    arguments = parser.parse_args()
    params = SamplingParams(temperature=arguments.temperature, top_p=arguments.top_p, max_tokens=64, ignore_eos=True)
    results = []
    for rows in arguments.rows:
        result, run = measure(arguments, rows, params)
        results.append(result)
        if arguments.profile:
            with torch.inference_mode(), cProfile.Profile() as profile:
                run("profiled")
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    print(json.dumps({"model": arguments.model, "dtype": arguments.dtype, "threads": arguments.threads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
