"""Sources that take a library long are refused at once, by one sentence, and by no other library
after the first one."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.plugins.grammar_backends import llguidance
from frame.plugins.grammar_backends.combined import CombinedBackend
from frame.plugins.grammar_backends.llguidance import LLGuidanceBackend
from frame.plugins.grammar_backends.sources import check_source
from frame.text.tokenizer import Tokenizer

SECONDS = 2.0  # of a refusal; xgrammar would take more than 10
NESTED = "(?:a|" * 300 + "b)*" * 300
LONG = "(a|b)?" * 1500


@pytest.fixture(scope="module")
def context() -> GrammarContext:
    return GrammarContext(Tokenizer.load(find_model(EMBEDDED), trust_remote_code=False), 2048)


def in_schema(pattern: str) -> str:
    return json.dumps({"type": "string", "pattern": pattern})


def in_tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", NESTED),
        ("regex", "(" * 65 + "a" + ")" * 65),
        ("ebnf", "root ::= " + '("a" | ' * 100 + '"b")*' * 100),
        ("json_schema", in_schema(NESTED)),
        ("json_schema", json.dumps({"type": "object", "patternProperties": {NESTED: {"type": "null"}}})),
        ("structural_tag", in_tag({"type": "regex", "pattern": NESTED})),
        ("structural_tag", in_tag({"type": "grammar", "grammar": "root ::= " + '("a" | ' * 100 + '"b")*' * 100})),
    ],
)
def test_deep_groups_are_refused_at_once(context: GrammarContext, kind: str, source: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="groups nested deeper than 64 levels") as refusal:
        CombinedBackend(context).compile(kind, source)
    assert time.process_time() - began < SECONDS
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(" * 64 + "a" + ")" * 64),
        ("regex", r"\(" * 100 + "[((]" * 100 + "a" + "(b)" * 100),
        ("ebnf", 'root ::= "' + "(" * 100 + '" [((]\n# ' + "(" * 100 + '"\n'),
        ("json_schema", json.dumps({"enum": ["(" * 100]})),
    ],
)
def test_parentheses_that_are_no_groups_do_not_count(kind: str, source: str) -> None:
    check_source(kind, source, 1 << 16, 64)


@pytest.mark.parametrize(
    "pattern",
    [
        "(((a{1000}){1000}){1000}){1000}", "a{ 60000 }", "a{2}{3}{1000}{1000}", "(a{30}|b){30000,}", "(abc{30}){30000}?",
        "(?x)#[\na{60000}#]", "[]](a{300}){300}", "((a|b{1000}){100})+", "a{30000}" * 2, "(a{99}){9999999999999999999}",
    ],
)  # fmt: skip
def test_what_demands_a_long_text_is_refused_at_once(context: GrammarContext, pattern: str) -> None:
    backend = CombinedBackend(context)
    began = time.process_time()
    for kind, source in (("regex", pattern), ("json_schema", in_schema(pattern))):
        with pytest.raises(ValueError, match="demands more than 50000 characters; use smaller counts"):
            backend.compile(kind, source)
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    "pattern",
    [
        "a{40000}", "(a{0,9999}){0,9999}", "(a{9999})*", "(a{9999})?", r"(a{3}\{9999}){99}", "a" * 60_000, r"\x{99999}", r"[{99999}]",
        "(a{300}|b{200}){100}", "[a" * 20_000, "[[]" * 10_000, "((((((((a{1,}){1,}){1,}){1,}){1,}){1,}){1,}){1,})", r"(a{9}\)){999}",
    ],
)  # fmt: skip
def test_what_demands_little_is_not_refused(pattern: str) -> None:
    began = time.process_time()
    check_source("regex", pattern, 1 << 16, 64)
    assert time.process_time() - began < SECONDS


def test_work_limits_are_final(context: GrammarContext, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CombinedBackend(context)

    def refuse() -> None:
        raise AssertionError("xgrammar takes long for what exceeds the limits of llguidance")

    monkeypatch.setattr(backend, "_load_xgrammar", refuse)
    with pytest.raises(ValueError, match="more work than its backend allows; shorten it"):
        backend.compile("regex", LONG)


def test_a_limit_at_the_first_token_is_the_clients_error(context: GrammarContext) -> None:
    """The limit is reached where the matcher catches up with tokens of a known mask."""
    compiled = LLGuidanceBackend(context).compile("regex", "(a?){300}a{300}")
    compiled.start()
    grammar, mask = compiled.start(), np.zeros(64, np.int32)
    grammar.fill_mask(mask)
    (token,) = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    with pytest.raises(ValueError, match="simplify it"):
        for _ in range(4):
            grammar.accept_token(token)
            grammar.fill_mask(mask)


def test_the_mask_of_a_request_that_reaches_a_limit_is_not_shared(context: GrammarContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask would end the outputs of all requests in the same state."""
    monkeypatch.setattr(llguidance, "MAX_LEXER_STATES", 2000)
    vocabulary = Tokenizer.load(find_model(EMBEDDED), trust_remote_code=False).backend.get_vocab()
    compiled, masks = LLGuidanceBackend(context).compile("regex", "((a|b)*a(a|b){30}c){2}"), np.zeros((3, 64), np.int32)
    compiled.start()
    draw, num_refused = random.Random(2), 0
    for _ in range(100):
        grammars = [compiled.start() for _ in masks]
        for _ in range(40):
            rows = [i for i, grammar in enumerate(grammars) if grammar.start_mask(masks[i]) is not None]
            try:
                compiled.batch.fill_masks([grammars[i] for i in rows], rows, masks)
            except ValueError:  # for each alone then
                return
            for i in rows:
                try:
                    grammars[i].finish_mask(masks[i], 0.0)
                except ValueError:
                    num_refused += 1
                else:
                    allowed = np.unpackbits(masks[i].view(np.uint8), bitorder="little")
                    assert allowed[vocabulary["a"]] and allowed[vocabulary["b"]]
            if num_refused:
                return
            token = vocabulary[draw.choice("ab")]
            assert all(grammar.accept_token(token) for grammar in grammars)
    raise AssertionError("no request reaches the limit")
