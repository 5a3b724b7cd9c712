"""What constrained output costs: `python benchmarks/structured_output.py masks|throughput|jump` prints one JSON object.

masks: microseconds of CPU for one token of one of 32 requests: its mask (`MaskFiller`) and the sampled token (`advance`), on a random walk
through each grammar, for frame-tiny's vocabulary and for a made one of 128,000 tokens. Masks are timed by the clock too:
every other step's with several threads, `--threads`, which is what they are for. The larger vocabulary alone with `--large`.
throughput: output tokens a second of the offline engine, 32 requests, free and constrained in turn, greedy, of equal length;
also by the process's CPU seconds, which hold where others use the machine.
jump: CPU microseconds an output token with and without jump-forward, JSON of a schema without whitespace at temperature 1; by requests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from frame import Engine, SamplingParams
from frame.core.grammar_masks import MaskFiller, advance
from frame.core.interfaces.sampling import GrammarBackend
from frame.core.model_facts import EMBEDDED, find_model
from frame.core.request import Request
from frame.core.request_table import RequestTable
from frame.core.tokenizer import Tokenizer
from frame.plugins.loader import load_registry

BATCH = 32
LARGE = 128_000
BACKENDS = ("xgrammar", "llguidance", "combined")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "age", "tags", "address"],
}
GRAMMARS = {
    "schema": ("json_schema", json.dumps(PERSON)),
    "json": ("json_object", ""),
    "regex": ("regex", r"([a-z]+ ){20,40}[A-Z0-9._%+-]+@[a-z]+\.(com|org|net)"),
    "counted": ("regex", "[a-z]{1,50}"),
    "ebnf": ("ebnf", 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")" | [a-z]+'),
}


class MadeTokenizer:
    """Byte-level, with the commonest pieces of the standard library's text as its tokens."""

    def __init__(self, size: int) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces: Counter[str] = Counter()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*/*.py"))[:600]:
            pieces.update(re.findall(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\s\w]+|\s+|_+", path.read_text(errors="ignore")))
        words = [piece for piece, _ in pieces.most_common() if 1 < len(piece) <= 24 and piece.isascii()]
        spelt = [word.replace(" ", "Ġ").replace("\n", "Ċ").replace("\t", "ĉ") for word in words]
        stems = [word for word in spelt if word.strip("Ġ").isalpha() and len(word) <= 8]
        numbers = random.Random(0)
        made = (numbers.choice(stems) + numbers.choice(stems).strip("Ġ")[:5].lower() for _ in iter(int, 1))  # iter(int, 1) never ends
        vocabulary = dict.fromkeys(["<eos>", *letters, *spelt])
        while len(vocabulary) < size:
            vocabulary[next(made)] = None
        self.backend = Backend(models.BPE({token: i for i, token in enumerate(list(vocabulary)[:size])}, []))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens(["<eos>"])
        self.eos_token_ids = (0,)


def backend_of(name: str, tokenizer: Any, vocab_size: int) -> GrammarBackend:
    registry = load_registry(installed=False)
    record = registry.get("grammar", name)
    made: GrammarBackend = registry.load(record)(tokenizer, vocab_size, registry.options(record, {}))
    return made


def request_of(index: int, compiled: Any) -> Request:
    params = SamplingParams(regex="x")
    tokens = np.zeros(4, np.int32)
    return Request(
        rid=str(index), prompt=tokens, params=params, seed=0, index=index, arrival=0.0, deadline=1e9, max_total=10_000,
        grammar=compiled.start(), tokens=tokens,
    )  # fmt: skip


def masks(steps: int, threads: int, tokenizers: dict[str, tuple[Any, int]], backends: Sequence[str]) -> dict[str, Any]:
    """Microseconds a token, by vocabulary, backend and grammar."""
    found: dict[str, Any] = {}
    for vocabulary, (tokenizer, size) in tokenizers.items():
        for name in backends:
            backend = backend_of(name, tokenizer, size)
            for label, (kind, source) in GRAMMARS.items():
                began = time.perf_counter()
                compiled = backend.compile(kind, source)
                compile_seconds = time.perf_counter() - began
                began = time.perf_counter()
                compiled = backend.load(kind, source, backend.dump(compiled))
                moved = time.perf_counter() - began
                figures = walk(compiled, size, steps, threads)
                found[f"{vocabulary} {size}, {name}, {label}"] = {
                    "compile_ms": round(compile_seconds * 1e3, 2), "dump_and_load_ms": round(moved * 1e3, 2), **figures
                }  # fmt: skip
    return found


def walk(compiled: Any, vocab_size: int, steps: int, threads: int) -> dict[str, Any]:
    """`steps` batches; every request goes on with a random token of its mask, and starts anew when only the end is left."""
    table = RequestTable(BATCH, 1)
    requests = [request_of(i, compiled) for i in range(BATCH)]
    for request in requests:
        table.enter(request)
    slots = np.array([request.slot for request in requests])
    numbers = np.random.default_rng(0)
    filling, taking = [], []
    fillers = {count: MaskFiller(count) for count in sorted({1, threads})}
    waiting: dict[int, list[float]] = {count: [] for count in fillers}
    for step in range(steps):
        count = list(fillers)[step % len(fillers)]
        began, busy = time.perf_counter(), time.process_time()
        mask = fillers[count].fill(table, slots, vocab_size)
        waiting[count].append(time.perf_counter() - began)
        filling.append(time.process_time() - busy)
        assert mask is not None
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
        drawn = [int(numbers.choice(np.flatnonzero(row))) for row in bits]
        grammars = [request.grammar for request in requests]
        began = time.thread_time()
        outcomes = [advance(grammar, token) for grammar, token in zip(grammars, drawn, strict=True) if grammar is not None]
        taking.append(time.thread_time() - began)
        for request, (is_finished, error) in zip(requests, outcomes, strict=True):
            assert not error, error
            if is_finished or request.grammar is None:
                request.grammar = compiled.start()
    for filler in fillers.values():
        filler.close()
    both = [(one + two) / BATCH * 1e6 for one, two in zip(filling, taking, strict=True)]
    clock = {f"fill_clock_us_threads_{count}": [one / BATCH * 1e6 for one in times] for count, times in waiting.items()}
    return {
        "mean_us": round(statistics.fmean(both), 2),
        "p99_us": round(sorted(both)[int(0.99 * len(both))], 2),
        "fill_us": round(statistics.fmean(filling) / BATCH * 1e6, 2),
        **{label: {"mean": round(statistics.fmean(one), 2), "median": round(statistics.median(one), 2)} for label, one in clock.items()},
        "advance_us": round(statistics.fmean(taking) / BATCH * 1e6, 2),
    }


def throughput(rounds: int, length: int, backends: Sequence[str]) -> dict[str, Any]:
    """Tokens a second, free and constrained; medians of `rounds` after one that is thrown away."""
    long = {"type": "array", "minItems": 1000, "items": PERSON}
    grammars: dict[str, dict[str, Any]] = {
        "free": {},
        "schema": {"json_schema": json.dumps(long)},
        "regex": {"regex": r"[a-z]+([ ,.][a-z]+)*!"},
        "counted": {"regex": r"([a-z]+ ){4000}"},  # xgrammar counts at run time
    }
    found: dict[str, Any] = {}
    for name in backends:
        with Engine(grammar_backend=name, sampling_grammar_workers=0, max_running_requests=BATCH, dtype="bfloat16", threads=1) as engine:
            figures: dict[str, list[tuple[float, float]]] = {label: [] for label in grammars}
            for number in range(rounds + 1):
                for turn, (label, grammar) in enumerate(grammars.items()):
                    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, **grammar)
                    prompts = [[5 + (number * 997 + turn * 131 + i * 7 + j * (turn + 3)) % 1900 for j in range(64)] for i in range(BATCH)]
                    if not number:
                        engine.generate(prompts[:1], SamplingParams(max_tokens=2, **grammar))  # compiled, and kept
                    began, busy = time.perf_counter(), time.process_time()
                    outputs = engine.generate(prompts, params)
                    seconds, busy = time.perf_counter() - began, time.process_time() - busy
                    tokens = sum(len(output.token_ids) for output in outputs)
                    assert tokens == BATCH * length, (label, tokens, outputs[0].error)
                    if number:
                        figures[label].append((tokens / seconds, tokens / busy))
        wall = {label: statistics.median(value for value, _ in values) for label, values in figures.items()}
        cpu = {label: statistics.median(value for _, value in values) for label, values in figures.items()}
        found[name] = {
            label: {
                "tokens_per_second": round(wall[label], 1),
                "loss_percent": round(100 * (1 - wall[label] / wall["free"]), 1),
                "tokens_per_cpu_second": round(cpu[label], 1),
                "cpu_loss_percent": round(100 * (1 - cpu[label] / cpu["free"]), 1),
                "all": [(round(one, 1), round(two, 1)) for one, two in figures[label]],
            }
            for label in grammars
        }
    return found


def jump(rounds: int, length: int, backends: Sequence[str]) -> dict[str, Any]:
    """Microseconds a token, steps and tokens jumped over; medians of `rounds` after one that is thrown away."""
    schema = json.dumps({"type": "array", "minItems": 1000, "items": PERSON})
    found: dict[str, Any] = {}
    for name, fewest in ((name, fewest) for name in backends for fewest in (0, 2)):
        settings: dict[str, Any] = {"grammar_backend": name, "grammar_jump_forward": fewest, "sampling_grammar_workers": 0}
        options = {f"grammar/{name}": {"any_whitespace": False}}
        with Engine(max_running_requests=BATCH, dtype="bfloat16", threads=1, plugins_options=options, **settings) as engine:
            for count in (1, 8, BATCH):
                figures = []
                for number in range(rounds + 1):
                    prompts = [[5 + (number * 997 + i * 7 + j * 3) % 1900 for j in range(64)] for i in range(count)]
                    asked = [SamplingParams(max_tokens=length, seed=100 * number + i, json_schema=schema) for i in range(count)]
                    before, busy = engine.control("server_info"), time.process_time()
                    outputs = engine.generate(prompts, asked)
                    busy, after = time.process_time() - busy, engine.control("server_info")
                    tokens = sum(len(output.token_ids) for output in outputs)
                    differences = [after[key] - before[key] for key in ("step", "jumped_tokens")]
                    figures.append((busy / tokens * 1e6, *differences))
                medians = [round(statistics.median(column), 1) for column in zip(*figures[1:], strict=True)]
                names = ("us_per_token", "steps", "jumped_tokens")
                found[f"{name}, jump_forward {fewest}, {count} requests"] = dict(zip(names, medians, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("masks", "throughput", "jump"))
    parser.add_argument("--steps", type=int, default=200, help="batches of each walk")
    parser.add_argument("--threads", type=int, default=2, help="that make every other step's masks")
    parser.add_argument("--large", action="store_true", help="masks of the larger vocabulary alone")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=64, help="output tokens of each request")
    options = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    if options.what == "masks":
        machine["threads"] = options.threads
        tiny = {} if options.large else {"frame-tiny": (Tokenizer.load(find_model(EMBEDDED)), 2048)}
        found = masks(options.steps, options.threads, {**tiny, "made": (MadeTokenizer(LARGE), LARGE)}, options.backends)
    elif options.what == "jump":
        found = jump(options.rounds, options.length, options.backends)
    else:
        found = throughput(options.rounds, options.length, options.backends)
    print(json.dumps({"what": options.what, "batch": BATCH, "machine": machine, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
