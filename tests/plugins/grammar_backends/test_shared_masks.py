"""Masks shared by state: random outputs of a grammar get the masks of the library, rollbacks
included, and most of them without a call of it."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

from frame.plugins.grammar_backends import llguidance
from frame.plugins.grammar_backends.llguidance import LLCompiled, LLGrammar, LLGuidanceBackend
from frame.plugins.grammar_backends.states import shared_masks

SIZE = 2048
WORDS = SIZE // 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": -5, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "kind": {"enum": ["a", "b", 1, None]},
        "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{2,4})?$"},
        "score": {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": 4}]},
    },
    "required": ["name", "age", "tags"],
}
ARRAY = {"type": "array", "minItems": 900, "items": PERSON}


def tag_of(schema: Any, opening: str, **more: bool) -> str:
    tags = [
        {"begin": f'{opening}{{"name": "f{i}", "arguments": ', "content": {"type": "json_schema", "json_schema": schema}, "end": "}</c>"}
        for i in range(2)
    ]
    return json.dumps({"type": "structural_tag", "format": {"type": "tags_with_separator", "tags": tags, "separator": "\n", **more}})


GRAMMARS = {
    "schema": ("json_schema", json.dumps(ARRAY)),
    "counts": ("regex", "([a-z]{1,50} ){400}"),
    "forced count": ("regex", "(ab{2,30}|a[b-d]{1,20}e)+f{300}"),
    "alternatives": ("regex", "(abc|abd|a[a-z]+x){3,}(foo|foobar)?"),
    "choice": ("choice", json.dumps(["red", "green", "greenish", "blue"])),
    "call": ("structural_tag", tag_of(ARRAY, "<c>\n", at_least_one=True, stop_after_first=True)),
    "calls": ("structural_tag", tag_of(PERSON, "<|im_start|>", at_least_one=True)),
}


@pytest.fixture(autouse=True)
def two_requests_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "SHARING_REQUESTS", 2)


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(GrammarContext(Tokenizer.load(find_model(EMBEDDED)), SIZE))


def start_pair(compiled: LLCompiled) -> tuple[LLGrammar, LLGrammar]:
    """A grammar whose masks are shared, and one of which the library computes each mask."""
    shared = compiled.start()
    kept, compiled.shared = compiled.shared, None
    alone = compiled.start()
    compiled.shared = kept
    assert kept is not None
    return shared, alone


def draw(numbers: random.Random, mask: np.ndarray) -> int:
    """An allowed token; likely ones have small ids."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[int(len(allowed) * numbers.random() ** 2)])


@pytest.mark.parametrize("name", GRAMMARS)
def test_shared_masks_are_those_of_the_library(backend: LLGuidanceBackend, name: str) -> None:
    compiled, numbers = backend.compile(*GRAMMARS[name]), random.Random(name)
    first = compiled.start()
    assert first.key is None  # it computes its own masks
    found, expected = np.zeros((2, WORDS), np.int32)
    num_masks = num_known = 0
    for _ in range(5):
        (shared, alone), taken = start_pair(compiled), []
        for _ in range(150):
            num_masks += 1
            num_known += shared._mask is not None
            assert shared.fill_mask(found) == alone.fill_mask(expected)
            assert (found == expected).all(), f"after {backend._tokenizer.decode_str(taken)!r}"
            token = draw(numbers, found)
            assert shared.accept_token(token) and alone.accept_token(token)
            taken.append(token)
            assert shared.is_finished() == alone.is_finished()
            if numbers.random() < 0.06 and (count := numbers.randint(0, min(len(taken), 20))):
                shared.rollback_tokens(count)
                alone.rollback_tokens(count)
                del taken[-count:]
            if shared.is_finished():
                break
        forbidden = next(token for token in range(SIZE) if not expected[token // 32] >> token % 32 & 1)
        assert shared.accept_token(forbidden) == alone.accept_token(forbidden)
    if name != "choice":  # all of its outputs are short
        assert num_known > num_masks // 2


def test_a_batch_computes_one_mask_for_each_state(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = backend.compile(*GRAMMARS["schema"])
    computed: list[int] = []
    plain = type(compiled.batch)._compute

    def count(self: Any, entries: Any, masks: np.ndarray) -> None:
        computed.append(len(entries))
        plain(self, entries, masks)

    monkeypatch.setattr(type(compiled.batch), "_compute", count)
    _first = compiled.start()
    pairs, numbers = [start_pair(compiled) for _ in range(12)], random.Random(3)
    masks, expected = np.zeros((12, WORDS), np.int32), np.zeros((12, WORDS), np.int32)
    for _ in range(40):
        handles = [(pair[0].start_mask(masks[i]), i) for i, pair in enumerate(pairs)]
        missing = [(handle, i) for i, handle in enumerate([handle for handle, _ in handles]) if handle is not None]
        if missing:
            compiled.batch.fill_masks([handle for handle, _ in missing], [i for _, i in missing], masks)
            for handle, i in missing:
                handle.finish_mask(masks[i], 0.0)
        for i, (shared, alone) in enumerate(pairs):
            alone.fill_mask(expected[i])
            token = draw(numbers, expected[i])
            assert (masks[i] == expected[i]).all() and shared.accept_token(token) and alone.accept_token(token)
    assert sum(computed) < 12 * 40 // 3


def test_a_matcher_that_is_behind_catches_up(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that find all masks known, and then leave what is known."""
    monkeypatch.setattr("frame.plugins.grammar_backends.llguidance.MAX_AHEAD", 7)
    compiled, numbers = backend.compile(*GRAMMARS["counts"]), random.Random(5)
    _first = compiled.start()
    found, expected = np.zeros((2, WORDS), np.int32)
    for round_ in range(3):
        shared, alone = start_pair(compiled)
        for step in range(100):
            shared.fill_mask(found)
            alone.fill_mask(expected)
            assert (found == expected).all() and len(shared._ahead) <= 7
            token = draw(numbers, found)
            assert shared.accept_token(token) and alone.accept_token(token)
            if step == 60 + round_:
                compiled.shared._masks.clear()  # type: ignore[union-attr]


def test_memory_is_bounded_and_counted(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_masks, "MASK_BYTES", 4000)
    monkeypatch.setattr(shared_masks, "MAX_SIZE", 600)
    compiled, numbers, mask = backend.compile(*GRAMMARS["schema"]), random.Random(7), np.zeros(WORDS, np.int32)
    _first = compiled.start()
    before = compiled.num_bytes
    sizes = set()
    for _ in range(3):
        grammar = compiled.start()
        for _ in range(100):
            grammar.fill_mask(mask)
            assert grammar.accept_token(draw(numbers, mask))
            shared = compiled.shared
            assert shared is not None
            assert sum(each.num_bytes for each in shared._masks.values()) == shared._num_bytes <= 4000
            sizes.add(compiled.num_bytes)
    assert before < max(sizes) and len(sizes) > 3


def test_each_token_is_counted_once(backend: LLGuidanceBackend) -> None:
    """Also where `advance_token`, which is asked first, derives the state and does not know its
    mask."""
    compiled, mask, count, numbers = backend.compile(*GRAMMARS["schema"]), np.zeros(WORDS, np.int32), 0, random.Random(2)
    _first = compiled.start()
    for _ in range(3):
        grammar = compiled.start()
        for _ in range(40):
            grammar.fill_mask(mask)
            token = draw(numbers, mask)
            if grammar.advance_token(token) is None:
                assert grammar.accept_token(token)
            if grammar.is_finished():
                break
            count += 1
            assert compiled.shared is not None and compiled.shared.num_followed == count


def test_a_grammar_whose_states_do_not_return_is_not_followed(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of this language leads to a new state."""
    monkeypatch.setattr(shared_masks, "MIN_FOLLOWED", 50)
    compiled, numbers, mask = backend.compile("regex", "(a|b)*a(a|b){30}"), random.Random(1), np.zeros(WORDS, np.int32)
    _first = compiled.start()
    grammar, letters = compiled.start(), backend._tokenizer.tokenize_str("a") + backend._tokenizer.tokenize_str("b")
    for _ in range(200):
        grammar.fill_mask(mask)
        assert grammar.accept_token(numbers.choice(letters))
    assert grammar.key is None and compiled.start().key is None


def test_few_requests_at_a_time_share_nothing(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "SHARING_REQUESTS", 3)
    compiled = backend.compile(*GRAMMARS["schema"])
    for _ in range(4):  # one after the other
        pair = [compiled.start(), compiled.start()]
        assert [grammar.key for grammar in pair] == [None, None]
        del pair
    running = [compiled.start() for _ in range(4)]
    assert [grammar.key is None for grammar in running] == [True, True, False, False]


@pytest.mark.parametrize(
    "kind, source",
    [
        ("json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}}})),
        ("json_object", ""),
        ("ebnf", 'root ::= "a" root | "b"'),
        ("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})),
    ],
)
def test_other_grammars_are_served_as_before(backend: LLGuidanceBackend, kind: str, source: str) -> None:
    compiled, mask = backend.compile(kind, source), np.zeros(WORDS, np.int32)
    _first = compiled.start()
    grammar = compiled.start()
    assert compiled.shared is None and grammar.key is None and grammar.fill_mask(mask) and mask.any()
