"""What a mask costs by the state of a grammar: `python benchmarks/grammar_states.py --ranks FILE`
prints one JSON object.

Random outputs of small grammars, each of which stays in one kind of state: inside of a free string,
near a `maxLength`, in numbers, enums, counts, between fields. Likely tokens of a model have small
ids, so small ids are drawn more often. Times are CPU microseconds of one thread. `llguidance
general` is the library with its own slices.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from llguidance import LLTokenizer
from made_tokenizer import MadeTokenizer, RankedTokenizer
from structured_output import PERSON
from structured_throughput import COUNTED, EBNF

from frame.core.interfaces.sampling import CompiledGrammar, GrammarBackend, GrammarContext
from frame.plugins.grammar_backends import llguidance
from frame.plugins.loader import load_registry


def endless(items: Any) -> tuple[str, str]:
    """A list of these items that never ends."""
    return "json_schema", json.dumps({"type": "array", "minItems": 1000, "items": items})


STATES: dict[str, tuple[str, str]] = {
    "free string": endless({"type": "string"}),
    "string, maxLength 20": endless({"type": "string", "maxLength": 20}),
    "string, maxLength 200": endless({"type": "string", "maxLength": 200}),
    "string, pattern [a-zA-Z0-9_-]{1,64}": endless({"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}),
    "string, format email": endless({"type": "string", "format": "email"}),
    "number": endless({"type": "number"}),
    "enum": endless({"enum": ["open", "closed", "pending", "in review"]}),
    "array, maxItems 30": endless({"type": "array", "items": {"type": "boolean"}, "maxItems": 30}),
    "optional fields": endless({"type": "object", "properties": {key: {"type": "boolean"} for key in ("id", "name", "total", "note")}}),
    "person": endless(PERSON),
    "any object": ("json_object", ""),
    "[a-z]{1,50}": ("regex", COUNTED),
    "recursive EBNF": ("ebnf", EBNF),
}  # fmt: skip


def walk(compiled: CompiledGrammar, size: int, outputs: int, length: int) -> dict[str, float]:
    """Masks and accepted tokens of some outputs, the first of which is thrown away."""
    numbers, mask = random.Random(0), np.zeros(-(-size // 32), np.int32)
    masks, accepts, widths = [], [], []
    for output in range(outputs + 1):
        grammar = compiled.start()
        for _ in range(length):
            began = time.thread_time()
            is_limited = grammar.fill_mask(mask)
            filled = time.thread_time()
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]) if is_limited else np.arange(size)
            token = int(allowed[int(len(allowed) * numbers.random() ** 3)])
            before = time.thread_time()
            if not grammar.accept_token(token) or grammar.is_finished():
                break
            if output:
                accepts.append(time.thread_time() - before)
                masks.append(filled - began)
                widths.append(len(allowed))
    taken = np.array(masks) * 1e6
    return {
        "mean_us": round(float(taken.mean()), 1),
        "median_us": round(float(np.median(taken)), 1),
        "p90_us": round(float(np.percentile(taken, 90)), 1),
        "p99_us": round(float(np.percentile(taken, 99)), 1),
        "accept_us": round(float(np.mean(accepts)) * 1e6, 1),
        "allowed": round(float(np.mean(widths))),
    }


def make_backends(context: GrammarContext, wanted: list[str]) -> dict[str, GrammarBackend]:
    registry = load_registry()
    found: dict[str, GrammarBackend] = {}
    for name in wanted:
        record = registry.get("grammar_backend", name)
        found[name] = registry.load(record)(context, registry.options(record, {}))
        if name == "llguidance":
            with patch.object(llguidance, "SLICES", LLTokenizer.general_slices()):
                found["llguidance general"] = registry.load(record)(context, registry.options(record, {}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["llguidance", "xgrammar"])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--ranks", type=Path, help="a file of tokens in tiktoken's format instead of a made vocabulary")
    parser.add_argument("--outputs", type=int, default=3)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    tokenizer = MadeTokenizer(options.vocab) if options.ranks is None else RankedTokenizer(options.ranks, options.vocab)
    rows: dict[str, dict[str, Any]] = {}
    backends = make_backends(GrammarContext(tokenizer, options.vocab), options.backends)
    for state, source in STATES.items():
        rows[state] = {}
        for name, backend in backends.items():
            began = time.process_time()
            compiled = backend.compile(*source)
            compile_ms = round((time.process_time() - began) * 1e3, 1)
            rows[state][name] = {"compile_ms": compile_ms, **walk(compiled, options.vocab, options.outputs, options.length)}
    machine = {"cores": os.cpu_count(), "load_after": os.getloadavg()[0]}
    print(json.dumps({**vars(options), "ranks": options.ranks and options.ranks.name, "machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
