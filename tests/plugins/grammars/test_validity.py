"""Whatever the model draws at temperature 1, the answer is what the grammar asked for: random schemas and expressions, whole engine."""

from __future__ import annotations

import json
import re
from collections import Counter

import jsonschema
import pytest

from frame import Engine, SamplingParams
from frame.entrypoints.collector import Output
from tests.plugins.grammars import random_grammars

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


@pytest.mark.parametrize(("schemas", "expressions"), [FEW, ALL])
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_every_answer_is_valid(backend: str, schemas: int, expressions: int) -> None:
    pytest.importorskip(backend)
    sources = [*map(random_grammars.schema, range(schemas)), *map(random_grammars.regex, range(expressions))]
    asked = [
        SamplingParams(max_tokens=1500, seed=i, **({"regex": source} if isinstance(source, str) else {"json_schema": json.dumps(source)}))
        for i, source in enumerate(sources)
    ]
    options = {f"grammar/{backend}": {"max_whitespace": 2}}  # so that every answer ends
    with Engine(grammar_backend=backend, sampling_grammar_workers=0, plugins_options=options, max_running_requests=32) as engine:
        outputs = engine.generate([f"Number {i}: " for i in range(len(asked))], asked)
    found = Counter(verdict(output, source) for output, source in zip(outputs, sources, strict=True))
    print(f"{backend}: {dict(found)}, {sum(len(output.token_ids) for output in outputs)} tokens")
    assert set(found) == {"valid"}
