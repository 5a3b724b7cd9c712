"""Compares grammar backends: `python benchmarks/grammar_backends.py cost|conformance` prints one
JSON object.

cost: for each grammar and number of rows, CPU milliseconds to compile, and microseconds for one row
and token on random walks: `fill` (CPU, one call of `fill_mask` a row, as the engine makes them),
`accept` (CPU, `accept_token` with `is_finished`), and `batch` (CPU of all threads, the library's
own batch call with `--threads` threads, every other step). A made vocabulary of 128,000 tokens.
conformance: random walks with frame-tiny's vocabulary, their texts checked by jsonschema and re:
random schemas and expressions, and one schema for each keyword of JSON Schema.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jsonschema
import numpy as np
import xgrammar
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from made_tokenizer import MadeTokenizer
from structured_output import PERSON

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarBackend, GrammarContext
from frame.plugins.loader import load_registry
from frame.text.tokenizer import Tokenizer
from tests.plugins.grammar_backends import random_grammars

LARGE = 128_000
ROWS = (1, 16, 64)
MAX_CPU = 3.0  # seconds of masks for one figure
TICKET = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "priority": {"enum": ["low", "medium", "high"]},
        "assignee": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "labels": {"type": "array", "items": {"type": "string"}},
        "estimate": {"type": "number"},
    },
    "required": ["title", "priority", "assignee", "labels", "estimate"],
}
CHILDREN = {"type": "array", "items": {"$ref": "#/$defs/node"}}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"value": {"type": "integer"}, "children": CHILDREN}}},
    "$ref": "#/$defs/node",
}
GRAMMARS: dict[str, list[tuple[str, str]]] = {
    "schema, plain": [("json_schema", json.dumps(TICKET))],
    "schema with maxLength, maxItems, pattern": [("json_schema", json.dumps(PERSON))],
    "recursive schema": [("json_schema", json.dumps(TREE))],
    "16 random schemas": [("json_schema", json.dumps(random_grammars.schema(seed))) for seed in range(16)],
    "any JSON object": [("json_object", "")],
    "choice of 3": [("choice", '["positive", "negative", "neutral"]')],
    "regex of a date": [("regex", r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d")],
    "regex [a-z]{1,50}": [("regex", "[a-z]{1,50}")],
    "regex ([a-z]+ ){20,40}...": [("regex", r"([a-z]+ ){20,40}[A-Z0-9._%+-]+@[a-z]+\.(com|org|net)")],
    "recursive EBNF": [("ebnf", 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")" | [a-z]+')],
}
TEXT, WHOLE = {"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 0, "maximum": 99}
NESTED = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}]}
PAIR = {"type": "object", "properties": {"a": WHOLE, "b": WHOLE}, "additionalProperties": False}
KEYWORDS: dict[str, dict[str, Any]] = {
    "minLength, maxLength": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}$"},
    "pattern with maxLength": {"type": "string", "pattern": "^a", "maxLength": 4},
    "format": {"type": "string", "format": "date"},
    "minimum, maximum of a number": {"type": "number", "minimum": 1.5, "maximum": 2.5},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 5, "maximum": 9},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
    "contains": {"type": "array", "items": {"enum": [1, 2, 3]}, "contains": {"const": 3}, "minItems": 1, "maxItems": 2},
    "prefixItems": {"type": "array", "prefixItems": [WHOLE, TEXT], "items": False, "minItems": 2},
    "minProperties": {**PAIR, "minProperties": 1},
    "maxProperties": {**PAIR, "maxProperties": 1},
    "patternProperties": {"type": "object", "patternProperties": {"^x$": WHOLE}, "additionalProperties": False},
    "propertyNames": {"type": "object", "propertyNames": {"enum": ["x"]}, "additionalProperties": WHOLE, "maxProperties": 1},
    "additionalProperties": {"type": "object", "properties": {"a": WHOLE}, "required": ["a"], "additionalProperties": False},
    "dependentRequired": {**PAIR, "dependentRequired": {"a": ["b"]}},
    "if, then": {**PAIR, "required": ["a"], "if": {"properties": {"a": {"maximum": 50}}}, "then": {"required": ["b"]}},
    "not": {"type": "integer", "minimum": 0, "maximum": 9, "not": {"const": 5}},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 6}, {"type": "integer", "minimum": 4, "maximum": 9}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
    "anyOf": {"anyOf": [WHOLE, TEXT]},
    "enum of objects": {"enum": [{"a": 1}, [2]]},
    "$ref, recursive": {"$defs": {"n": NESTED}, "$ref": "#/$defs/n"},
    "$anchor": {"type": "array", "items": {"$ref": "#d"}, "minItems": 1, "maxItems": 1, "$defs": {"d": {"$anchor": "d", "const": 7}}},
}  # fmt: skip


def backend_of(name: str, tokenizer: Any, vocab_size: int) -> GrammarBackend:
    registry = load_registry()
    record = registry.get("grammar_backend", name)
    made: GrammarBackend = registry.load(record)(GrammarContext(tokenizer, vocab_size), registry.options(record, {}))
    return made


def allowed(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


class Batch:
    """The libraries' own calls for the masks of many requests."""

    def __init__(self, threads: int) -> None:
        self._xgrammar = xgrammar.BatchGrammarMatcher(max_threads=threads)
        self._llguidance = LLExecutor(threads)

    def fill_mask(self, grammars: list[Any], masks: np.ndarray) -> bool:
        """False where the backend has no such call."""
        matchers = [getattr(grammar, "_matcher", None) for grammar in grammars]
        if all(isinstance(each, xgrammar.GrammarMatcher) for each in matchers):
            self._xgrammar.batch_fill_next_token_bitmask(matchers, masks)
        elif all(isinstance(each, LLMatcher) for each in matchers):
            fill_next_token_bitmask_par(self._llguidance, [(matcher, i) for i, matcher in enumerate(matchers)], masks)
        else:
            return False
        return True


def walk(compiled: list[Any], rows: int, steps: int, threads: int) -> dict[str, float]:
    """`rows` requests draw random tokens; one starts anew when only the end is left."""
    numbers = np.random.default_rng(0)
    grammars = [compiled[i % len(compiled)].start() for i in range(rows)]
    masks = np.zeros((rows, LARGE // 32), np.int32)
    fill: list[float] = []
    accept: list[float] = []
    batch: list[float] = []
    filler = Batch(threads)
    began = time.process_time()
    for step in range(steps):
        since = time.process_time()
        if step % 2 and filler.fill_mask(grammars, masks):
            batch.append((time.process_time() - since) / rows)
        else:
            for grammar, mask in zip(grammars, masks, strict=True):
                since = time.thread_time()
                grammar.fill_mask(mask)
                fill.append(time.thread_time() - since)
        for i, mask in enumerate(masks):
            token = int(numbers.choice(allowed(mask)))
            since = time.thread_time()
            is_taken = grammars[i].accept_token(token)
            is_finished = grammars[i].is_finished()
            accept.append(time.thread_time() - since)
            assert is_taken
            if is_finished:
                grammars[i] = compiled[i % len(compiled)].start()
        if time.process_time() - began > MAX_CPU and len(fill) >= rows:
            break
    fill.sort()
    found = {"fill": statistics.fmean(fill), "fill_p99": fill[int(0.99 * len(fill))], "accept": statistics.fmean(accept)}
    if batch:
        found["batch"] = statistics.fmean(batch)
    return {name: round(value * 1e6, 1) for name, value in found.items()}


def cost(backends: list[str], steps: int, threads: int) -> dict[str, Any]:
    tokenizer = MadeTokenizer(LARGE)
    found: dict[str, Any] = {}
    for name in backends:
        backend = backend_of(name, tokenizer, LARGE)
        backend.compile("choice", '["a"]')  # loads what is loaded once
        for label, sources in GRAMMARS.items():
            if any(kind not in load_registry().get("grammar_backend", name).capabilities.kinds for kind, _ in sources):
                continue
            times = []
            for _ in range(3):
                began = time.thread_time()
                compiled = [backend.compile(*source) for source in sources]
                times.append((time.thread_time() - began) / len(sources) * 1e3)
            rows = {str(count): walk(compiled, count, max(40, steps // count), threads) for count in ROWS}
            found[f"{name}, {label}"] = {"compile_ms": round(statistics.median(times), 2), "us": rows}
            print(name, label, found[f"{name}, {label}"], file=sys.stderr, flush=True)
    return found


def texts(backend: GrammarBackend, tokenizer: Any, kind: str, source: str, seeds: int) -> Iterator[str | None]:
    """Texts of random walks that end as soon as they may after 40 tokens; None: not after 300."""
    compiled = backend.compile(kind, source)
    for seed in range(seeds):
        numbers, grammar, ids, mask = random.Random(seed), compiled.start(), [], np.zeros(64, np.int32)
        for _ in range(300):
            grammar.fill_mask(mask)
            choices = allowed(mask).tolist()
            ends = [token for token in choices if token in tokenizer.eos_token_ids]
            if ends and (len(ends) == len(choices) or len(ids) > 40 or numbers.random() < 0.2):
                yield tokenizer.decode(ids)
                break
            ids.append(numbers.choice([token for token in choices if token not in ends]))
            assert grammar.accept_token(ids[-1])
        else:
            yield None


def verdict(schema: Any, text: str | None) -> str:
    if text is None:
        return "unfinished"
    try:
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    return "valid"


def conformance(backends: list[str], count: int) -> dict[str, Any]:
    tokenizer = Tokenizer.load(find_model(EMBEDDED))
    found: dict[str, Any] = {}
    for name in backends:
        backend = backend_of(name, tokenizer, 2048)
        schemas: Counter[str] = Counter()
        expressions: Counter[str] = Counter()
        for seed in range(count):
            schema, pattern = random_grammars.schema(seed), random_grammars.regex(seed)
            try:
                schemas.update(verdict(schema, text) for text in texts(backend, tokenizer, "json_schema", json.dumps(schema), 2))
            except ValueError:
                schemas["refused"] += 1
            try:
                for text in texts(backend, tokenizer, "regex", pattern, 2):
                    expressions["unfinished" if text is None else "valid" if re.fullmatch(pattern, text, re.ASCII) else "invalid"] += 1
            except ValueError:
                expressions["refused"] += 1
        keywords = {}
        for label, schema in KEYWORDS.items():
            try:
                made = texts(backend, tokenizer, "json_schema", json.dumps(schema), 30)
                keywords[label] = dict(Counter(verdict(schema, text) for text in made))
            except ValueError as error:
                keywords[label] = f"refused: {error}"[:120]
        found[name] = {"random schemas": dict(schemas), "random expressions": dict(expressions), "keywords": keywords}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "conformance"))
    parser.add_argument("--backends", nargs="+", default=["xgrammar", "llguidance", "combined", "automata"])
    parser.add_argument("--steps", type=int, default=400, help="row-steps of each walk")
    parser.add_argument("--threads", type=int, default=2, help="of the libraries' batch calls")
    parser.add_argument("--count", type=int, default=300, help="random schemas and expressions")
    options = parser.parse_args()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    libraries = {name: version(name) for name in ("xgrammar", "llguidance")}
    is_cost = options.what == "cost"
    rows = cost(options.backends, options.steps, options.threads) if is_cost else conformance(options.backends, options.count)
    print(json.dumps({"what": options.what, "machine": machine, "libraries": libraries, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
