"""What is particular to this backend: its matchers in turn, and which of its grammars are automata."""

from __future__ import annotations

import json

import numpy as np
import pytest

from frame.core.loading.model_config import EMBEDDED, find_model
from frame.core.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

from frame.plugins.grammars import llguidance
from frame.plugins.grammars.automaton import AutomatonCompiled
from frame.plugins.grammars.llguidance import LLCompiled, LLGuidanceBackend


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(Tokenizer.load(find_model(EMBEDDED)), 2048)


def test_requests_get_copies_of_several_matchers(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "MOST_THREADS", 3)
    monkeypatch.setattr(llguidance, "QUICK", 10.0)
    compiled = backend.compile("ebnf", 'root ::= "a" root | "b"')
    assert isinstance(compiled, LLCompiled) and len(compiled._matchers) == 1
    masks = np.zeros((7, 64), np.int32)
    assert all(compiled.start().fill(mask) for mask in masks)
    assert (masks == masks[0]).all() and masks[0].any() and len(compiled._matchers) == 3
    monkeypatch.setattr(llguidance, "QUICK", 0.0)
    slow = backend.compile("ebnf", 'root ::= "a" root | "b"')
    assert isinstance(slow, LLCompiled) and slow.start() is not slow.start() and len(slow._matchers) == 1


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
def test_what_is_plainly_regular_is_an_automaton(backend: LLGuidanceBackend, kind: str, source: str, is_own: bool) -> None:
    assert isinstance(backend.compile(kind, source), AutomatonCompiled if is_own else LLCompiled)
