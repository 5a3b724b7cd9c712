"""The backend llguidance: several matchers of one grammar, and the ASCII meaning of shorthands."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

from frame.plugins.grammar_backends import llguidance
from frame.plugins.grammar_backends.llguidance import LLCompiled, LLGuidanceBackend
from tests.architecture.source import ROOT

TOKENIZER = Tokenizer.load(find_model(EMBEDDED))


LETTERS = TOKENIZER.encode("a", False) + TOKENIZER.encode("b", False)


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(GrammarContext(TOKENIZER, 2048))


def test_requests_get_copies_of_several_matchers(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "MAX_MATCHERS", 3)
    monkeypatch.setattr(llguidance, "QUICK", 10.0)
    monkeypatch.setattr(llguidance, "COPIES_PER_MATCHER", 1)
    compiled = backend.compile("ebnf", 'root ::= "a" root | "b"')
    assert isinstance(compiled, LLCompiled) and len(compiled._matchers) == 1
    masks = np.zeros((7, 64), np.int32)
    for mask in masks:  # one at a time
        assert compiled.start().fill_mask(mask)
    assert len(compiled._matchers) == 1
    grammars = [compiled.start() for _ in masks]
    assert all(grammar.fill_mask(mask) for grammar, mask in zip(grammars, masks, strict=True))
    assert (masks == masks[0]).all() and masks[0].any() and len(compiled._matchers) == 3
    assert [len([each for each in grammars if each.origin == id(matcher)]) for matcher in compiled._matchers] == [3, 2, 2]
    freed = grammars[1].origin
    grammars = [grammar for grammar in grammars if grammar.origin != freed]
    assert compiled.start().origin == freed
    monkeypatch.setattr(llguidance, "QUICK", 0.0)
    slow = backend.compile("ebnf", 'root ::= "a" root | "b"')
    assert isinstance(slow, LLCompiled) and slow.start() is not slow.start() and len(slow._matchers) == 1


def test_states_that_masks_create_count_and_are_bounded(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of this language leads to new states, which all requests of the grammar share."""
    monkeypatch.setattr(llguidance, "MAX_LEXER_STATES", 2000)
    monkeypatch.setattr(llguidance, "READ_SECONDS", 0.0)
    compiled = backend.compile("regex", "(a|b)*a(a|b){30}")
    before, mask, draw = compiled.num_bytes, np.zeros(64, np.int32), random.Random(1)
    grammar = compiled.start()
    for _ in range(100):
        assert grammar.fill_mask(mask) and grammar.accept_token(draw.choice(LETTERS))
    used = compiled.num_bytes
    assert used > before
    with pytest.raises(ValueError, match="more work"):
        for _ in range(10_000):
            grammar.fill_mask(mask)
            grammar.accept_token(draw.choice(LETTERS))
    assert compiled.num_bytes > used + 2000 * 2048  # the cache drops it


def test_states_of_short_requests_count_when_they_end(backend: LLGuidanceBackend) -> None:
    compiled, mask, draw = backend.compile("regex", "(a|b)*a(a|b){31}"), np.zeros(64, np.int32), random.Random(1)
    sizes = [compiled.num_bytes]
    for _ in range(3):
        grammar = compiled.start()
        for _ in range(20):
            assert grammar.fill_mask(mask) and grammar.accept_token(draw.choice(LETTERS))
        del grammar
        sizes.append(compiled.num_bytes)
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3]


def test_sizes_are_added_by_several_threads(backend: LLGuidanceBackend) -> None:
    compiled = backend.compile("regex", "a")
    assert isinstance(compiled, LLCompiled)
    before = compiled.num_bytes

    def add() -> None:
        for _ in range(20_000):
            compiled.add_bytes(1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled.num_bytes == before + 80_000


MEMORY = """
import random, sys
from pathlib import Path
import numpy as np
from frame.host.host_memory import return_freed_memory
from tests.plugins.grammar_backends.test_llguidance import GrammarContext, LLGuidanceBackend, TOKENIZER

def memory():
    return_freed_memory()
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

backend, mask, draw = LLGuidanceBackend(GrammarContext(TOKENIZER, 2048)), np.zeros(64, np.int32), random.Random(1)
backend.compile("regex", "a").start().fill_mask(mask)
before, held = memory(), []
for number in range(6):
    held.append(backend.compile("regex", sys.argv[1] % (200 + number)))
    for _ in range(2):
        grammar = held[-1].start()
        for _ in range(700):
            if not grammar.fill_mask(mask):
                break
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert grammar.accept_token(int(draw.choice(allowed)))
        del grammar
print(memory() - before, sum(each.num_bytes for each in held))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("pattern", ["([a-z ]|[0-9])*x([a-z0-9 ]){%d}", r"(\p{L}|\p{N}){1,%d}é+", "([a-z]{1,15} ){%d}"])
def test_sizes_follow_what_the_library_holds(pattern: str) -> None:
    """In a process of its own, whose memory is measured."""
    command = [sys.executable, "-c", MEMORY, pattern]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    held, estimate = map(int, found.stdout.split())
    assert held > 6_000_000  # much more than what else the process allocates
    assert 0.7 * held < estimate < 5 * held


SCHEMA = {
    "type": "array",
    "minItems": 9,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "code": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,15}$"},
            "n": {"type": "number"},
            "kind": {"enum": ["open", "closed"]},
            "note": {"type": "string"},
        },
        "required": ["name", "code", "n", "kind", "note"],
    },
}
GRAMMARS = [
    ("json_schema", json.dumps(SCHEMA)), ("json_object", ""), ("regex", "([a-z]{1,15} ){400}"), ("regex", r"(\\w+[.!?] )+#"),
    ("ebnf", 'root ::= "a" root "b" | [a-z ]{1,12} "-"'), ("choice", '["one", "two and three", "two and four"]'),
]  # fmt: skip


def test_slices_and_batches_do_not_change_masks(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each place of random texts a batch of grammars, of a backend with `SLICES`, and single
    calls of one without any fill the same masks."""
    monkeypatch.setattr(llguidance, "SLICES", [])
    plain = LLGuidanceBackend(GrammarContext(TOKENIZER, 2048))
    monkeypatch.setattr(llguidance, "MAX_MATCHERS", 3)
    sliced, unsliced = ([each.compile(*source) for source in GRAMMARS] for each in (backend, plain))
    batched = [compiled.start() for compiled in sliced for _ in range(4)]
    single = [compiled.start() for compiled in unsliced for _ in range(4)]
    masks, wanted, draw = np.zeros((len(batched) + 2, 64), np.int32), np.zeros(64, np.int32), random.Random(3)
    rows = draw.sample(range(len(masks)), len(batched))
    for _ in range(60):
        begun = [(grammar, row, handle) for grammar, row in zip(batched, rows, strict=True) if (handle := grammar.start_mask(masks[row]))]
        if begun:
            begun[0][0].batch.fill_masks([handle for _, _, handle in begun], [row for _, row, _ in begun], masks)
        for grammar, row, _ in begun:
            assert grammar.finish_mask(masks[row], 0.001)
        for i, (grammar, other, row) in enumerate(zip(batched, single, rows, strict=True)):
            other.fill_mask(wanted)
            assert (masks[row] == wanted).all(), GRAMMARS[i // 4]
            allowed = np.flatnonzero(np.unpackbits(wanted.view(np.uint8), bitorder="little")[:2048])
            if not grammar.is_finished():
                token = int(draw.choice(allowed))
                assert grammar.accept_token(token) and other.accept_token(token)
            assert grammar.is_finished() == other.is_finished()
    assert {grammar.is_finished() for grammar in batched} == {False, True}


def allows(backend: LLGuidanceBackend, pattern: str, text: str) -> bool:
    grammar = backend.compile("regex", pattern).start()
    return all(grammar.accept_token(token) for token in TOKENIZER.encode(text, False)) and grammar.accept_token(TOKENIZER.eos_token_ids[0])


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d+", ["12"], ["١٢", "a"]),
        (r"\w+", ["ab_1"], ["é", "-"]),
        (r"\s", [" ", "\t", "\n", "\v", "\f", "\r"], ["\u2003", "\x1c", "x"]),
        (r"\D\W\S", ["é-é", "a x"], ["1-é", "aax", "a- "]),
        (r"[\d.\-]+", ["1.-2"], ["١", "x"]),
        (r"[^\d\s]+", ["aé"], ["1", " ", "\v"]),
        (r"(?x) \s [\s]", ["  "], ["x"]),
        (r"\\d", [r"\d"], ["1", r"\1"]),
        (r"\<\%\>", ["<%>"], ["%"]),
    ],
)
def test_shorthands_are_ascii(backend: LLGuidanceBackend, pattern: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not allows(backend, pattern, text)] == []
    assert [text for text in bad if allows(backend, pattern, text)] == []


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (
            {"type": "array", "uniqueItems": True},
            "llguidance does not enforce uniqueItems; leave it out of the schema, and check the output",
        ),
        ({"if": {}, "then": {}}, "llguidance does not enforce if, then; leave it out of the schema, and check the output"),
        (
            {"type": "object", "propertyNames": {"pattern": "^a$"}},
            "llguidance does not enforce propertyNames; use the grammar backend combined, which needs the extra xgrammar",
        ),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "llguidance does not enforce a oneOf whose branches overlap; use anyOf, or give each branch a property with its own const",
        ),
        ({"type": "string", "format": "foo"}, "the format 'foo' is unknown; leave it out, or use pattern"),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2},
            (
                "llguidance does not count optional properties for minProperties and maxProperties; list all properties in required, "
                "or use the grammar backend combined, which needs the extra xgrammar"
            ),
        ),
        (
            {"type": "integer", "minimum": -(10**20), "maximum": 10**20},
            "minimum or maximum is too large; keep it within 64 bits (9223372036854775807), or leave it out",
        ),
    ],
)
def test_a_rejected_schema_gets_a_remedy(backend: LLGuidanceBackend, schema: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        backend.compile("json_schema", json.dumps(schema))
    assert str(raised.value) == f"json_schema does not compile: {sentence}"
