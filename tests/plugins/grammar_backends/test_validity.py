"""Sampled output at temperature 1 satisfies random schemas and expressions, with the whole
engine."""

from __future__ import annotations

import json
import re
from collections import Counter

import jsonschema
import pytest

from frame import Engine, SamplingParams
from frame.entrypoints.offline.collector import Output
from tests.plugins.grammar_backends import random_grammars

FEW = pytest.param(12, 12, id="few")
ALL = pytest.param(500, 200, id="all", marks=pytest.mark.soak)


def verdict(output: Output, source: dict[str, object] | str) -> str:
    if output.finish_reason != "stop":
        return output.error or output.finish_reason or "?"
    if isinstance(source, str):
        return "valid" if re.fullmatch(source, output.text) else f"{source} does not match {output.text!r}"
    try:
        jsonschema.Draft202012Validator(source).validate(json.loads(output.text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{output.text!r} is not valid: {error}"
    return "valid"


@pytest.mark.slow
@pytest.mark.parametrize(("schemas", "expressions"), [FEW, ALL])
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "combined"])
def test_every_output_is_valid(backend: str, schemas: int, expressions: int) -> None:
    for library in ("xgrammar", "llguidance") if backend == "combined" else (backend,):
        pytest.importorskip(library)
    sources = [*map(random_grammars.schema, range(schemas)), *map(random_grammars.regex, range(expressions))]
    asked = [
        SamplingParams(max_tokens=1500, seed=i, **({"regex": source} if isinstance(source, str) else {"json_schema": json.dumps(source)}))
        for i, source in enumerate(sources)
    ]
    options = {f"grammar_backend/{backend}": {"max_whitespace": 2}}  # so that every answer ends
    with Engine(grammar_backend=backend, sampling_grammar_workers=0, plugins_options=options, max_running_requests=32) as engine:
        outputs = engine.generate([f"Number {i}: " for i in range(len(asked))], asked)
        jumped = engine.control("server_info")["jumped_tokens"]
    found = Counter(verdict(output, source) for output, source in zip(outputs, sources, strict=True))
    print(f"{backend}: {dict(found)}, {sum(len(output.token_ids) for output in outputs)} tokens, {jumped} of them jumped over")
    assert set(found) == {"valid"}


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_overlap_preemption_and_batching_change_no_constrained_output() -> None:
    pytest.importorskip("llguidance")
    constrained = [SamplingParams(max_tokens=100, seed=i, json_schema=json.dumps(PERSON)) for i in range(6)]
    free = [SamplingParams(max_tokens=100, seed=i, ignore_eos=True) for i in range(3)]
    prompts = [f"Somebody, number {i}: " for i in range(9)]
    found = []
    for overlap, tokens in ((False, 4096), (True, 256)):
        with Engine(
            grammar_backend="llguidance",
            sampling_grammar_workers=0,
            scheduler_overlap=overlap,
            max_total_tokens=tokens,
            max_running_requests=9,
            dtype="float32",
        ) as engine:
            found.append([output.token_ids for output in engine.generate(prompts, constrained + free)])
            preempted = engine.control("server_info")["preempted"]
        assert (preempted > 0) == (tokens < 4096)
    assert found[0] == found[1]


FORCED = [
    {"choice": json.dumps(["The quick brown fox jumps over the lazy dog.", "A slow red hen sleeps under the busy cat."])},
    {"regex": r"[a-z]{3} = (0x1F4A9_DEADBEEF|0b1011_0000_1111); [a-z]{2}"},
    {"ebnf": 'root ::= "<answer>" [0-9]+ "</answer_that_is_over>" [a-z]'},
    {"json_schema": json.dumps({"enum": ["incomprehensibilities", "uncharacteristically"]})},
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_jumps_change_no_token(backend: str) -> None:
    """Greedy and drawn, with penalties, biases and stop strings, alone on the device and
    preempted."""
    pytest.importorskip(backend)
    extras = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"stop": ["jum", "_DEAD"]},
    ]
    asked = [
        SamplingParams(**{"max_tokens": 70, "seed": i, "temperature": 0.0, **grammar, **extra})  # type: ignore[arg-type]
        for i, (grammar, extra) in enumerate((grammar, extra) for grammar in FORCED for extra in extras)
    ]
    prompts = [f"Somebody, number {i}: " for i in range(len(asked))]
    found = []
    for fewest, overlap, tokens in ((0, False, 4096), (2, False, 4096), (2, True, 4096), (2, True, 256)):
        with Engine(
            grammar_backend=backend,
            sampling_grammar_workers=0,
            grammar_jump_forward=fewest,
            scheduler_overlap=overlap,
            max_total_tokens=tokens,
            max_running_requests=8,
            dtype="float32",
        ) as engine:
            outputs = engine.generate(prompts, asked)
            found.append([(output.token_ids, output.text, output.finish_reason) for output in outputs])
            info = engine.control("server_info")
        assert tokens == 4096 or info["preempted"] > 0  # a slow grammar is preempted too, whatever the tokens
        assert (info["jumped_tokens"] > 60) == bool(fewest)
    assert found[1:] == found[:1] * 3
