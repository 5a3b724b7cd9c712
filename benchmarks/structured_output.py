"""What constrained output costs: `python benchmarks/structured_output.py masks|first|jump` prints
one JSON object.

`structured_throughput.py` tells what it costs an engine.

masks: microseconds of CPU for one token of one of 32 requests: its mask (`GrammarCalls`) and the
sampled token (`accept_token`), on a random walk through each grammar, for frame-tiny's vocabulary
and for a made one of 128,000 tokens. Masks are timed by the clock too:
every other step's with several threads, `--threads`, which is what they are for. The larger
vocabulary alone with `--large`. first: milliseconds of CPU for the first mask of a state, backend
`automata` (package frame-automata), on a random walk of one request. jump: CPU microseconds an
output token with and without jump-forward, JSON of a schema without whitespace at temperature 1; by
requests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from made_tokenizer import MadeTokenizer

from frame import Engine, SamplingParams
from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarBackend, GrammarContext
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable
from frame.plugins.loader import load_registry
from frame.structured_output.grammar_calls import accept_token, get_grammar_state
from frame.structured_output.grammar_masks import GrammarCalls
from frame.text.tokenizer import Tokenizer

BATCH = 32
LARGE = 128_000
BACKENDS = ("xgrammar", "llguidance", "combined", "automata")
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


def backend_of(name: str, tokenizer: Any, vocab_size: int) -> GrammarBackend:
    registry = load_registry()
    record = registry.get("grammar_backend", name)
    made: GrammarBackend = registry.load(record)(GrammarContext(tokenizer, vocab_size), registry.options(record, {}))
    return made


def request_of(index: int, compiled: Any) -> Request:
    params = SamplingParams(regex="x")
    tokens = np.zeros(4, np.int32)
    return Request(
        rid=str(index), prompt=tokens, params=params, seed=0, index=index, arrival=0.0, deadline=1e9, max_num_tokens=10_000,
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
    """`steps` batches; every request goes on with a random token of its mask, and starts anew when
    only the end is left."""
    table = RequestTable(BATCH, 1)
    requests = [request_of(i, compiled) for i in range(BATCH)]
    for request in requests:
        table.add_request(request)
    slots = np.array([request.slot for request in requests])
    numbers = np.random.default_rng(0)
    filling, taking = [], []
    fillers = {count: GrammarCalls(vocab_size, count) for count in sorted({1, threads})}
    waiting: dict[int, list[float]] = {count: [] for count in fillers}
    for step in range(steps):
        count = list(fillers)[step % len(fillers)]
        began, busy = time.perf_counter(), time.process_time()
        mask = fillers[count].fill_masks(table, slots)
        waiting[count].append(time.perf_counter() - began)
        filling.append(time.process_time() - busy)
        assert mask is not None
        for request in fillers[count].take_stopped():  # an engine would go on without it
            call = get_grammar_state(request).call
            while call is not None and not call.is_finished:
                time.sleep(0.001)
            assert call is not None
            mask[requests.index(request)] = call.mask
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
        drawn = [int(numbers.choice(np.flatnonzero(row))) for row in bits]
        began = time.thread_time()
        ends = [accept_token(each.grammar, token, each.params) for each, token in zip(requests, drawn, strict=True)]
        taking.append(time.thread_time() - began)
        for request, end in zip(requests, ends, strict=True):
            assert end is None or end.reason == "stop", end
            request.grammar_state = None  # what it keeps of the call just timed
            if end is not None:
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


def first(steps: int) -> dict[str, Any]:
    """For the larger vocabulary: how many masks the automata computed, and the time of one."""
    from frame_automata.automaton import Masks

    found: dict[str, Any] = {}
    backend = backend_of("automata", MadeTokenizer(LARGE), LARGE)
    numbers, mask = np.random.default_rng(0), np.zeros(-(-LARGE // 32), np.int32)
    plain = Masks._make
    for label in ("schema", "regex", "counted"):
        spent: list[float] = []

        def timed(*args: Any, spent: list[float] = spent) -> Any:
            began = time.thread_time()
            made = plain(*args)
            spent.append((time.thread_time() - began) * 1e3)
            return made

        compiled = backend.compile(*GRAMMARS[label])
        with patch.object(Masks, "_make", timed):
            grammar = compiled.start()
            for _ in range(steps):
                grammar.fill_mask(mask)
                drawn = numbers.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))
                assert grammar.accept_token(int(drawn))
                grammar = compiled.start() if grammar.is_finished() else grammar
        spent.sort()
        names = {
            "mean": statistics.fmean(spent),
            "median": statistics.median(spent),
            "p90": spent[int(0.9 * len(spent))],
            "most": spent[-1],
        }
        found[label] = {"masks": len(spent), **{name: round(value, 3) for name, value in names.items()}}
    return found


def jump(rounds: int, length: int, backends: Sequence[str]) -> dict[str, Any]:
    """Microseconds a token, steps and tokens jumped over; medians of `rounds` after one that is
    thrown away."""
    schema = json.dumps({"type": "array", "minItems": 1000, "items": PERSON})
    found: dict[str, Any] = {}
    for name, fewest in ((name, fewest) for name in backends for fewest in (0, 2)):
        settings: dict[str, Any] = {"grammar_backend": name, "grammar_jump_forward": fewest, "sampling_grammar_workers": 0}
        options = {f"grammar_backend/{name}": {"any_whitespace": False}}
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
    parser.add_argument("what", choices=("masks", "first", "jump"))
    parser.add_argument("--steps", type=int, default=200, help="batches of each walk")
    parser.add_argument("--threads", type=int, default=2, help="that make every other step's masks")
    parser.add_argument("--large", action="store_true", help="masks of the larger vocabulary alone")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS[:3]), choices=BACKENDS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=64, help="output tokens of each request")
    options = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    if options.what == "masks":
        machine["threads"] = options.threads
        tiny = {} if options.large else {"frame-tiny": (Tokenizer.load(find_model(EMBEDDED)), 2048)}
        found = masks(options.steps, options.threads, {**tiny, "made": (MadeTokenizer(LARGE), LARGE)}, options.backends)
    elif options.what == "first":
        found = first(2 * options.steps)
    else:
        found = jump(options.rounds, options.length, options.backends)
    print(json.dumps({"what": options.what, "batch": BATCH, "machine": machine, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
