"""Grammar backends: masks allow what the grammar allows, and an invalid grammar is refused with one
sentence."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.plugins.loader import load_registry
from frame.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(find_model(EMBEDDED))


def load(name, tokenizer):
    for library in ("xgrammar", "llguidance") if name == "combined" else (name,):
        pytest.importorskip(library)
    registry = load_registry(installed=False)
    record = registry.get("grammar_backend", name)
    return registry.load(record)(GrammarContext(tokenizer, 2048), registry.options(record, {}))


@pytest.fixture(scope="module", params=["xgrammar", "llguidance", "combined"])
def backend(request, tokenizer):
    return load(request.param, tokenizer)


@pytest.fixture(scope="module")
def tagging(tokenizer):
    return load("xgrammar", tokenizer)


def start(backend, kind, source):
    """As an engine does: compiled in one process, loaded in another."""
    return backend.load(kind, source, backend.dump(backend.compile(kind, source))).start()


def allowed_ids(grammar):
    mask = np.zeros(64, np.int32)
    grammar.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def wander(grammar, tokenizer, seed):
    """A random text that the grammar allows."""
    numbers, ids = random.Random(seed), []
    for _ in range(400):
        choices = allowed_ids(grammar).tolist()
        ends = [token for token in choices if token in tokenizer.eos_token_ids]
        token = ends[0] if ends and (len(ends) == len(choices) or len(ids) > 60) else numbers.choice(choices)
        assert grammar.accept_token(token)
        if token in tokenizer.eos_token_ids:
            assert grammar.is_finished()
            return tokenizer.decode(ids)
        ids.append(token)
    return None


@pytest.mark.parametrize("seed", range(6))
def test_json_schema_yields_what_the_schema_says(backend, tokenizer, seed):
    text = wander(start(backend, "json_schema", json.dumps(SCHEMA)), tokenizer, seed)
    if text is not None:  # a random walk may spend its tokens on whitespace
        value = json.loads(text, strict=False)  # xgrammar lets control characters into strings with a maxLength
        assert set(value) == {"name", "age"} and 0 <= value["age"] <= 99


def test_regex_and_ebnf(backend, tokenizer):
    assert {wander(start(backend, "regex", "(yes|no|maybe)"), tokenizer, seed) for seed in range(12)} == {"yes", "no", "maybe"}
    assert wander(start(backend, "ebnf", 'root ::= "a" [0-9] "b"'), tokenizer, 1)[::2] == "ab"


def test_a_choice_is_one_of_the_texts(backend, tokenizer):
    texts = {'a "quoted"\nline', "naïve 😀", "plain"}
    assert {wander(start(backend, "choice", json.dumps(sorted(texts))), tokenizer, seed) for seed in range(24)} == texts


CALL = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}


def test_a_structural_tag_constrains_what_follows_its_trigger(tagging, tokenizer):
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL]}
    grammar = start(tagging, "structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    free = set(allowed_ids(grammar).tolist())
    assert len(free) > 1900 and free & set(tokenizer.eos_token_ids)  # free text may end at any time
    for token in tokenizer.encode("so: <f>", False):
        assert not grammar.is_finished()
        assert grammar.accept_token(token)
    assert {tokenizer.decode([token]).lstrip()[:1] for token in allowed_ids(grammar).tolist()} <= {"{", ""}
    for token in tokenizer.encode('{"name": "x", "age": 1}</f>', False):
        assert grammar.accept_token(token)
    assert set(allowed_ids(grammar).tolist()) & set(tokenizer.eos_token_ids)


def test_a_structural_tag_may_be_all_that_is_allowed(tagging, tokenizer):
    calls = {"type": "tags_with_separator", "tags": [CALL], "separator": "\n", "at_least_one": True, "stop_after_first": True}
    grammar = start(tagging, "structural_tag", json.dumps({"type": "structural_tag", "format": calls}))
    for token in tokenizer.encode('<f>{"name": "x", "age": 1}</f>', False):
        assert not grammar.is_finished()
        assert grammar.accept_token(token)
    assert grammar.is_finished()


def test_json_object_starts_with_a_brace(backend, tokenizer):
    first = {tokenizer.decode([token]).lstrip()[:1] for token in allowed_ids(start(backend, "json_object", "")).tolist()}
    assert first <= {"{", ""} and "{" in first


def test_a_token_outside_is_refused_and_the_end_comes_last(backend, tokenizer):
    grammar = start(backend, "regex", "ab")
    assert not grammar.accept_token(tokenizer.encode("x", False)[0])
    assert not grammar.is_finished()
    for letter in "ab":
        assert grammar.accept_token(tokenizer.encode(letter, False)[0])
    assert grammar.is_finished()
    assert set(allowed_ids(grammar).tolist()) == set(tokenizer.eos_token_ids)
    assert grammar.accept_token(tokenizer.eos_token_ids[0])
    mask = np.zeros(64, np.int32)
    assert not grammar.fill_mask(mask) and (mask == -1).all()
    assert not grammar.accept_token(5)


BAD = [
    ("json_schema", "{", "is not JSON"),
    ("json_schema", "[1]", "must be a JSON object"),
    ("json_schema", '{"type": "nonsense"}', "does not compile"),
    ("json_schema", '{"a":' * 100 + "1" + "}" * 100, "deeper than 64"),
    ("regex", "(((", "does not compile"),
    ("regex", "a" * 70_000, "the limit is 65536"),
    ("regex", "a\0b", "NUL character"),
    ("ebnf", "root ::= undefined_rule", "does not compile"),
    ("ebnf", 'root ::= root "a"', "allows no text"),
    ("json_schema", '{"$ref": "#"}', "allows no text|Circular"),
    (
        "json_schema",
        '{"items": {"$ref": "http://x/y.json"}, "type": "array"}',
        r"the \$ref 'http://x/y.json'.*refer to it as '#/\$defs/NAME'",
    ),
    ("json_schema", '{"properties": {"a": {"$ref": "other.json#/x"}}, "type": "object"}', r"the \$ref 'other.json#/x'"),
    ("json_schema", '{"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {}}', r"\$ref '#/\$defs/x', which points to no part"),
    ("json_schema", '{"$defs": {"a": {"$dynamicAnchor": "n"}}, "$dynamicRef": "#n"}', r"a \$dynamicRef, which is not supported"),
    ("json_schema", '{"properties": {"a": {"$recursiveRef": "#"}}, "type": "object"}', r"a \$recursiveRef, which is not supported"),
    ("json_schema", '{"type": "string", "pattern": "^(?!x)[a-z]{3}$"}', "look-around"),
    ("json_schema", '{"type": "object", "patternProperties": {"^(?=.*x)a": {}}}', "look-around"),
    ("lark", "x", "is unknown"),
]
BAD_TAGS = [
    ("structural_tag", "{", "is not JSON"),
    ("structural_tag", '{"format": {"type": "nope"}}', "not recognized: nope"),
    ("structural_tag", '{"type": "structural_tag"}', "must have a format"),
    (
        "structural_tag",
        '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"$ref": "http://x/y"}}}',
        r"a schema of this request has the \$ref 'http://x/y'",
    ),
]


def is_one_sentence(backend, kind, source, words):
    with pytest.raises(ValueError, match=words) as error:
        backend.compile(kind, source)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300 and ".cc" not in str(error.value)
    backend.compile("regex", "ok")


@pytest.mark.parametrize(("kind", "source", "words"), BAD)
def test_a_bad_grammar_is_one_sentence(backend, kind, source, words):
    is_one_sentence(backend, kind, source, words)


@pytest.mark.parametrize(("kind", "source", "words"), BAD_TAGS)
def test_a_bad_structural_tag_is_one_sentence(tagging, kind, source, words):
    is_one_sentence(tagging, kind, source, words)


NAMED = {"type": "array", "items": {"$ref": "#digit"}, "minItems": 1, "maxItems": 1, "$defs": {"a": {"$anchor": "digit", "const": 7}}}


def test_an_anchor_is_resolved_or_refused(backend, tagging, tokenizer):
    with pytest.raises(ValueError, match="the \\$ref '#digit', which this grammar backend does not resolve"):
        tagging.compile("json_schema", json.dumps(NAMED))
    if type(backend) is not type(tagging):
        assert json.loads(wander(start(backend, "json_schema", json.dumps(NAMED)), tokenizer, 3)) == [7]


def test_requests_of_one_grammar_are_independent(backend, tokenizer):
    compiled = backend.compile("regex", "(yes|no)!")
    one, two = compiled.start(), compiled.start()
    assert one.accept_token(tokenizer.encode("n", False)[0])
    assert {tokenizer.decode([token])[0] for token in allowed_ids(two).tolist()} == {"y", "n"}
    assert compiled.num_bytes > 0


def test_combined_gives_rejected_schemas_to_the_other_library(tokenizer):
    backend = load("combined", tokenizer)
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "minProperties": 1})
    with pytest.raises(ValueError, match="does not compile"):
        load("llguidance", tokenizer).compile("json_schema", schema)
    compiled = backend.compile("json_schema", schema)
    assert len(backend.dump(compiled)) > 1000 and backend.dump(backend.compile("json_object", "")) == b""
    text = wander(start(backend, "json_schema", schema), tokenizer, 1)
    assert text is None or json.loads(text)
