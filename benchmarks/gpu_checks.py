"""What a served GPU model has to keep, on random weights: `python benchmarks/gpu_checks.py MODEL
CHECK … [--json FILE]`.

prefix: seconds to the first token of a 4,096-token prompt, when it is new and when it comes again,
and of how many prompts it is the same. prompts: seconds to the first token of short prompts, alone
and after 4,096 cached tokens. narrow: prompt tokens a second with the last layer's feed-forward
part for selected tokens only, and for all, in turn. gated: the same with gate and up of many rows
by the kernel with a fetching warp, and by the one before it. leak: memory of device and host, pages
and collections after the first requests and after --requests of them. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from frame import Engine, SamplingParams
from frame.core.execution.model_runner import TorchModelRunner
from frame.models.layers.plain_matmul import PlainMatmul

PROMPT = 4096
SHORT = (16, 64, 256, 1024)
ROUND = 500


def prefix(engine: Engine, vocabulary: int, arguments: argparse.Namespace) -> dict[str, Any]:
    numbers = random.Random(7)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    first, again, same = [], [], []
    for _ in range(6):
        prompt = [numbers.randrange(10, vocabulary) for _ in range(PROMPT)]
        tokens = []
        for times in (first, again):
            began = time.perf_counter()
            (output,) = engine.generate([prompt], one)
            times.append(time.perf_counter() - began)
            tokens.append(output.token_ids)
        same.append(tokens[0] == tokens[1])
    first, again = first[1:], again[1:]  # the first prompt compiles
    return {
        "first_s": statistics.median(first),
        "again_s": statistics.median(again),
        "share": statistics.median(again) / statistics.median(first),
        "same_tokens": statistics.mean(same),
    }


def prompts(engine: Engine, vocabulary: int, arguments: argparse.Namespace) -> dict[str, Any]:
    numbers = random.Random(9)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    launch_dependents = [numbers.randrange(10, vocabulary) for _ in range(PROMPT)]
    engine.generate([launch_dependents], one)
    found = {}
    for name, cached in (("alone", []), ("cached", launch_dependents)):
        for length in SHORT:
            times = []
            for _ in range(7):
                prompt = cached + [numbers.randrange(10, vocabulary) for _ in range(length)]
                began = time.perf_counter()
                engine.generate([prompt], one)
                times.append(time.perf_counter() - began)
            found[f"{name}_{length}_s"] = statistics.median(times[2:])
    return found


def narrow(engine: Engine, vocabulary: int, arguments: argparse.Namespace) -> dict[str, Any]:
    model = next(thing.model for thing in gc.get_objects() if isinstance(thing, TorchModelRunner))
    without, with_it = in_turn(engine, vocabulary, 1, lambda on: setattr(model, "supports_token_selection", on))
    return {"selected_tokens_per_s": with_it, "all_tokens_per_s": without}


def gated(engine: Engine, vocabulary: int, arguments: argparse.Namespace) -> dict[str, Any]:
    from frame.kernels.linear.gated_linear import gated_linear
    from frame.kernels.linear.gated_prefill import gated_prefill

    found = [thing for thing in gc.get_objects() if isinstance(thing, PlainMatmul)]
    products = [product for product in found if getattr(product, "multiply_many", None) is gated_prefill]

    def switch(on: bool) -> None:
        for product in products:
            product.multiply_many = gated_prefill if on else gated_linear

    without, with_it = in_turn(engine, vocabulary, 2, switch)
    return {"products": len(products), "fetching_warp_tokens_per_s": with_it, "before_tokens_per_s": without}


def in_turn(engine: Engine, vocabulary: int, seed: int, switch: Callable[[bool], None]) -> tuple[list[float], list[float]]:
    """Prompt tokens a second of 16 long prompts, without and with what `switch` switches; it stays
    on. `seed`: prompts of its own."""
    numbers = random.Random(seed)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(5):
        for on in numbers.sample((False, True), 2):
            switch(on)
            prompts = [[numbers.randrange(10, vocabulary) for _ in range(PROMPT)] for _ in range(16)]
            began = time.perf_counter()
            engine.generate(prompts, one)
            if turn:  # the first prompts compile
                rates[on].append(16 * PROMPT / (time.perf_counter() - began))
    switch(True)
    return rates


def leak(engine: Engine, vocabulary: int, arguments: argparse.Namespace) -> dict[str, Any]:
    numbers = random.Random(8)
    readings = []
    done = 0
    while done < arguments.requests:
        prompts = [[numbers.randrange(10, vocabulary) for _ in range(numbers.randrange(1, 200))] for _ in range(ROUND)]
        params = [
            SamplingParams(
                temperature=numbers.choice([0.0, 0.8]),
                top_p=numbers.choice([1.0, 0.9]),
                max_tokens=numbers.randrange(1, 33),
                ignore_eos=True,
            )
            for _ in prompts
        ]
        engine.generate(prompts, params)
        done += ROUND
        if done in (2 * ROUND, arguments.requests):
            engine.flush_cache()
            engine.control("check_integrity")
            readings.append({"requests": done, **memory(), "used_pages": engine.control("server_info")["used_pages"]})
    return {"readings": readings}


def memory() -> dict[str, int]:
    gc.collect()
    cuda = torch.cuda.is_available()
    return {
        "device_allocated": torch.cuda.memory_allocated() if cuda else 0,
        "device_reserved": torch.cuda.memory_reserved() if cuda else 0,
        "host_rss": psutil.Process().memory_info().rss,
        "objects": len(gc.get_objects()),
    }


CHECKS = {"prefix": prefix, "prompts": prompts, "narrow": narrow, "gated": gated, "leak": leak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("check", choices=tuple(CHECKS), nargs="+")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a keyword of frame.Engine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keys = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in arguments.set)}
    with Engine(model=arguments.model, load_format="dummy", skip_tokenizer_init=True, **keys) as engine:
        report: dict[str, Any] = {"model": arguments.model, "keys": keys}
        for check in arguments.check:
            report[check] = CHECKS[check](engine, min(10_000, engine.info["vocab_size"]), arguments)
    text = json.dumps(report)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
