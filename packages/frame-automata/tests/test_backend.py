"""The backend `automata`: how it registers, which grammars become automata, and what becomes of the
others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.plugins.grammar_backends.llguidance import LLCompiled
from frame.plugins.loader import load_registry
from frame.text.tokenizer import Tokenizer
from frame_automata.automaton import AutomatonCompiled
from frame_automata.backend import AutomataBackend
from tests.plugins.grammar_backends import test_backends as contract
from tests.plugins.grammar_backends import test_whitespace as whitespace

TOKENIZER = Tokenizer.load(find_model(EMBEDDED))
REGISTRY = load_registry()


@pytest.fixture(scope="module")
def backend() -> Any:
    record = REGISTRY.get("grammar_backend", "automata")
    return REGISTRY.load(record)(GrammarContext(TOKENIZER, 2048), REGISTRY.options(record, {}))


def test_it_registers_by_its_entry_point(backend: Any) -> None:
    record = REGISTRY.get("grammar_backend", "automata")
    assert record.distribution == "frame-automata"
    assert type(backend) is AutomataBackend
    assert REGISTRY.records("grammar_backend")[0].name == "combined"  # so `auto` does not choose automata
    assert "automata" not in [found.name for found in load_registry(installed=False).records("grammar_backend")]


@pytest.mark.parametrize(
    ("kind", "source", "is_own"),
    [
        ("regex", "[a-z]{1,50}", True),
        ("regex", "(?i)x", False),
        ("choice", '["a", "é"]', True),
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}', True),
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "object"}}}', False),
        ("choice", json.dumps(["x" * 20_000]), False),
    ],
)
def test_regular_grammars_become_automata(backend: Any, kind: str, source: str, is_own: bool) -> None:
    assert isinstance(backend.compile(kind, source), AutomatonCompiled if is_own else LLCompiled)


@pytest.mark.parametrize("seed", range(6))
def test_json_schema_yields_what_the_schema_says(backend: Any, seed: int) -> None:
    contract.test_json_schema_yields_what_the_schema_says(backend, TOKENIZER, seed)


def test_kinds_and_requests(backend: Any) -> None:
    contract.test_regex_and_ebnf(backend, TOKENIZER)
    contract.test_a_choice_is_one_of_the_texts(backend, TOKENIZER)
    contract.test_a_structural_tag_constrains_what_follows_its_trigger(backend, TOKENIZER)
    contract.test_json_object_starts_with_a_brace(backend, TOKENIZER)
    contract.test_a_token_outside_is_refused_and_the_end_comes_last(backend, TOKENIZER)
    contract.test_requests_of_one_grammar_are_independent(backend, TOKENIZER)


@pytest.mark.parametrize(("kind", "source", "words"), contract.BAD)  # those of tags are xgrammar's
def test_a_bad_grammar_is_one_sentence(backend: Any, kind: str, source: str, words: str) -> None:
    contract.is_one_sentence(backend, kind, source, words)


@pytest.mark.parametrize("schema", [whitespace.SCHEMA, whitespace.HARD, whitespace.OPEN, None])
def test_json_is_compact(backend: Any, schema: dict[str, Any] | None) -> None:
    whitespace.test_json_is_compact((backend, REGISTRY.get("grammar_backend", "automata").capabilities.kinds), schema)


@pytest.mark.parametrize("schema", [whitespace.SCHEMA, whitespace.OPEN, None])
def test_a_request_may_have_whitespace(backend: Any, schema: dict[str, Any] | None) -> None:
    whitespace.test_a_request_may_have_whitespace((backend, REGISTRY.get("grammar_backend", "automata").capabilities.kinds), schema)


def test_compiled_grammars_cross_processes(backend: Any) -> None:
    for kind, source, is_own in (("regex", "[ab]{3}", True), ("json_object", "", False)):
        compiled = backend.compile(kind, source)
        loaded = backend.load(kind, source, backend.dump(compiled))
        assert isinstance(loaded, AutomatonCompiled) == is_own
        masks = np.zeros((2, 64), np.int32)
        assert compiled.start().fill_mask(masks[0]) and loaded.start().fill_mask(masks[1]) and (masks[0] == masks[1]).all()
