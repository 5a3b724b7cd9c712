"""What grammars cost the engine's thread for one row and token: `python benchmarks/grammar_rows.py`
prints one JSON object.

Requests of the grammars of `structured_http.py` draw evenly among the allowed tokens of a made
vocabulary. Measured are accepting the tokens and filling the masks of a step (`GrammarCalls`), in
CPU microseconds of the engine's thread and of the process. Later rounds have new requests of the
same grammars; `distinct` has new grammars. With `--processes N`, which needs this folder in
PYTHONPATH, N processes call the grammars. `--profile` prints where the last round spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from made_tokenizer import MadeTokenizer
from structured_http import array_schema, numbered_schema
from structured_throughput import EBNF

from frame.core.interfaces.sampling import GrammarBackend, GrammarContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable
from frame.entrypoints.processes import grammar_process
from frame.entrypoints.processes.grammar_process import GrammarCallProcess, MaskMemory
from frame.plugins.grammar_backends import llguidance
from frame.structured_output import grammar_masks, grammar_threads
from frame.structured_output.call_processes import NUM_BUFFERS, ProcessPool
from frame.structured_output.grammar_calls import GrammarMeter, MeteredGrammar
from frame.structured_output.grammar_masks import GrammarCalls
from frame.structured_output.jump_forward import JumpForward
from frame.structured_output.remote_calls import RemoteCalls
from frame.structured_output.served_calls import JumpSettings

Source = tuple[str, str]  # kind and text of a grammar


def call_of_tool(number: int) -> Source:
    arguments = {"type": "object", "properties": {"rows": array_schema()}, "required": ["rows"], "additionalProperties": False}
    begin = f'<tool_call>\n{{"name": "store_{number}", "arguments": '
    tag = {"begin": begin, "content": {"type": "json_schema", "json_schema": arguments}, "end": "}\n</tool_call>"}
    form = {"type": "tags_with_separator", "tags": [tag], "separator": "\n", "at_least_one": True, "stop_after_first": True}
    return "structural_tag", json.dumps({"type": "structural_tag", "format": form})


def sources(kind: str, count: int, round_number: int) -> list[Source]:
    """The grammar of each request."""
    if kind == "schema":
        return [("json_schema", json.dumps(array_schema()))] * count
    if kind == "tools":
        return [call_of_tool(i % 4) for i in range(count)]
    if kind == "ebnf":
        return [("ebnf", EBNF)] * count
    first = 0 if kind == "schemas" else 1000 + 64 * round_number
    schemas = [("json_schema", json.dumps(numbered_schema(first + i))) for i in range(32 if kind == "schemas" else 64)]
    return [schemas[i % len(schemas)] for i in range(count)]


def draw(masks: np.ndarray, numbers: np.random.Generator) -> list[int]:
    """An allowed token of each row of masks, int32 [n, words]."""
    tokens = []
    for row in masks:
        words = np.flatnonzero(row)
        counts = np.cumsum(np.bitwise_count(row[words].view(np.uint32)))
        number = int(numbers.integers(counts[-1]))
        place = int(np.searchsorted(counts, number, side="right"))
        bits = [bit for bit in range(32) if int(row[words[place]]) >> bit & 1]
        tokens.append(32 * int(words[place]) + bits[number - int(counts[place] - len(bits))])
    return tokens


class Rounds:
    """Rounds of `count` requests over `steps` steps."""

    def __init__(self, backend: GrammarBackend, vocab_size: int, count: int, steps: int, pool: ProcessPool | None) -> None:
        self._pool = pool
        self._backend, self._vocab_size, self._count, self._steps = backend, vocab_size, count, steps
        self._numbers = np.random.default_rng(0)

    def run(self, asked: list[Source], grammars: dict[Source, Any], profile: cProfile.Profile | None) -> dict[str, float]:
        """grammars: those compiled so far."""
        for source in asked:
            if source not in grammars:
                grammars[source] = self._backend.compile(*source)
        table = RequestTable(self._count, 1)
        running = cast("Any", SimpleNamespace(table=table))
        calls: Any = GrammarCalls(self._vocab_size, jumps=JumpForward(running, 2, rows=4))
        if self._pool is not None:
            calls = RemoteCalls(self._pool, lambda request, run: None)
            calls.close = lambda: None  # later rounds use the processes
        requests = []
        for i, source in enumerate(asked):
            tokens = np.zeros(4, np.int32)
            request = Request(str(i), tokens, SamplingParams(), 0, i, 0.0, 1e9, 10_000, tokens=tokens)
            request.grammar = MeteredGrammar(grammars[source].start(), GrammarMeter(1000.0))
            assert calls.start_request(request) is None
            table.add_request(request)
            requests.append(request)
        slots = np.array([request.slot for request in requests])
        masks = calls.fill_masks(table, slots)
        thread = process = wall = 0.0
        for _ in range(self._steps):
            assert masks is not None and not calls.take_stopped(), "a mask was slow"
            drawn = [(request, [token]) for request, token in zip(requests, draw(masks, self._numbers), strict=True)]
            began, began_process, began_wall = time.thread_time(), time.process_time(), time.perf_counter()
            if profile is not None:
                profile.enable()
            ends = calls.accept_tokens(drawn, self._count)
            accepted = time.perf_counter()
            masks = calls.fill_masks(table, slots)
            if profile is not None:
                profile.disable()
            wall += accepted - began_wall
            thread, process = thread + time.thread_time() - began, process + time.process_time() - began_process
            assert not any(ends), ends
        calls.close()
        per_token = 1e6 / self._count / self._steps
        return {
            "thread_us": round(thread * per_token, 2),
            "process_us": round(process * per_token, 2),
            "accept_wall_us": round(wall * per_token, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sharing", type=int, default=8, help="requests of a grammar that share masks: half of a host's cores")
    parser.add_argument("--only", nargs="+", default=["schema", "distinct", "tools"], help="schema, schemas, distinct, tools, ebnf")
    parser.add_argument("--processes", type=int, default=0, help="that call the grammars; 0: this one")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    llguidance.SHARING_REQUESTS = options.sharing
    grammar_masks.CROWDED_SECONDS = grammar_masks.QUICK_SECONDS = grammar_threads.QUICK_SECONDS = 10.0  # few cores: no row leaves
    gc.disable()  # an engine collects where no request waits
    pool = start_pool(options.processes, options.rows, options.vocab) if options.processes else None
    backend = make_backend(options.vocab) if pool is None else pool.start_backend()
    rounds = Rounds(backend, options.vocab, options.rows, options.steps, pool)
    found: dict[str, list[dict[str, float]]] = {}
    for kind in options.only:
        grammars: dict[Source, Any] = {}
        for number in range(options.rounds):
            profile = cProfile.Profile() if options.profile and number == options.rounds - 1 else None
            found.setdefault(kind, []).append(rounds.run(sources(kind, options.rows, number), grammars, profile))
            print(kind, found[kind][-1], file=sys.stderr, flush=True)
            if profile is not None:
                pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(28)
    machine = {"cores": os.cpu_count(), "load_after": os.getloadavg()[0]}
    print(json.dumps({**{key: value for key, value in vars(options).items() if key != "profile"}, "machine": machine, "us": found}))


def make_backend(vocab_size: int, threads: int | None = None) -> GrammarBackend:
    return llguidance.LLGuidanceBackend(GrammarContext(MadeTokenizer(vocab_size), vocab_size, threads=threads))


def start_pool(count: int, rows: int, vocab_size: int) -> ProcessPool:
    memory = MaskMemory((NUM_BUFFERS, rows, -(-vocab_size // 32)))
    jumps, threads = JumpSettings(2, 4, 0, count), max(1, (os.cpu_count() or 1) // count)
    return ProcessPool(partial(GrammarCallProcess, "", vocab_size, memory, threads, jumps, [sys.executable, __file__]), count, memory.masks)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].isdigit():  # started by `start_pool`
        grammar_masks.CROWDED_SECONDS = grammar_masks.QUICK_SECONDS = grammar_threads.QUICK_SECONDS = 10.0
        grammar_process.serve_calls(lambda setup: make_backend(setup.vocab_size, setup.threads))
        os._exit(0)
    main()
