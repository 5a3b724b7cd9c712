"""llguidance's structural tags allow the texts that xgrammar's do, for the formats of parsers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.interfaces.parsing import CallRule, Function
from frame.plugins.grammar_backends.llguidance import LLGuidanceBackend
from frame.plugins.grammar_backends.options import GrammarOptions
from frame.plugins.loader import load_registry
from frame.testing.contexts import PARSER
from frame.testing.parsing.texts import accepts, draw
from frame.text.tokenizer import Tokenizer

REGISTRY = load_registry(installed=False)
TOKENIZER = Tokenizer.load(find_model(EMBEDDED))
BACKEND = LLGuidanceBackend(GrammarContext(TOKENIZER, 2048), GrammarOptions(any_whitespace=True, max_whitespace=1024))
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}}, "required": ["city"]}
CLOSED = {**CITY, "additionalProperties": False}
FUNCTIONS = (Function("weather", CLOSED, True), Function("now", {"type": "object", "properties": {}, "additionalProperties": False}, True))
PARSERS = sorted(record.name for record in REGISTRY.records("tool_call_parser"))
THINK: dict[str, Any] = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}


def llguidance_accepts(form: Any, text: str, backend: LLGuidanceBackend = BACKEND) -> bool:
    grammar = backend.compile("structural_tag", json.dumps({"type": "structural_tag", "format": form})).start()
    ids = TOKENIZER.backend.encode(text, add_special_tokens=False).ids
    return all(grammar.accept_token(token) for token in ids) and grammar.matcher.is_accepting()


@pytest.mark.pairwise
@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize("name", PARSERS)
def test_calls_are_those_of_xgrammar(name: str, is_required: bool, is_parallel: bool) -> None:
    pytest.importorskip("xgrammar")
    parser = REGISTRY.load(REGISTRY.get("tool_call_parser", name))(PARSER)
    calls = parser.grammar(CallRule(FUNCTIONS, is_required=True, is_parallel=is_parallel))
    form = calls if is_required else parser.grammar(CallRule(FUNCTIONS, is_required=False, is_parallel=is_parallel))
    if "qwen_xml" in json.dumps(form):
        with pytest.raises(ValueError, match="style 'qwen_xml' is not supported"):
            llguidance_accepts(form, "")
        return
    dice = random.Random(name)
    drawn = draw(calls, 6)
    assert all(accepts(form, text) for text in drawn)
    assert drawn
    for text in ("", "Hello.", *drawn, *(f"Let me see. {text}" for text in drawn)):
        place = dice.randrange(len(text) or 1)
        for each in (text, text[:place] + text[place + 1 :], text + "x"):
            assert llguidance_accepts(form, each) == accepts(form, each), each


FORMS = [
    ({"type": "sequence", "elements": [{"type": "optional", "content": THINK}, {"type": "regex", "pattern": "a/b\\d"}]},
     ["a/b1", "<think>x < y</think>a/b2"], ["a/b", "<think>x", "<think>x</think>", "xa/b1"]),
    ({"type": "or", "elements": [{"type": "const_string", "value": 'a"\\\n'}, {"type": "any_text"}]}, ['a"\\\n', "", "é😀"], []),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9]+'}, ["x12"], ["x", "12"]),
    ({"type": "tags_with_separator", "separator": ", ", "tags": [{**THINK, "begin": "<", "end": ">"}]},
     ["", "<a>", "<a>, <b>"], ["<a><b>", "<a>, "]),
    ({"type": "sequence", "elements": [{"type": "const_string", "value": "<|user|>x"}]}, ["<|user|>x"], ["x", "<|eos|>x"]),
    ({"type": "triggered_tags", "triggers": ["<|user|>"], "tags": [{**THINK, "begin": "<|user|>a", "end": "<|pad|>"}]},
     ["hi", "hi <|user|>abc<|pad|> x"], ["<|user|>b", "<|user|>ab"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), FORMS)
def test_formats(form: Any, good: list[str], bad: list[str]) -> None:
    """Special tokens of the tokenizer (`<|user|>`) are matched as such."""
    assert [text for text in good if not llguidance_accepts(form, text)] == []
    assert [text for text in bad if llguidance_accepts(form, text)] == []


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"type": "nope"}, "the format type 'nope' is not supported"),
        ({"type": "tag", "begin": "a"}, "tag lacks content"),
        ({"type": "any_text", "excludes": ["x"]}, "any_text has an unsupported field 'excludes'"),
        ({"type": "or", "elements": []}, "or has no elements"),
        ({"type": "triggered_tags", "triggers": [""], "tags": [THINK]}, "is empty"),
        ({"type": "triggered_tags", "triggers": ["b"], "tags": [THINK]}, "tags must be"),
        ({"type": "triggered_tags", "triggers": 3, "tags": 4}, "does not compile"),
        ({"type": "json_schema", "json_schema": 3}, "json_schema must be an object"),
    ],
)
def test_what_is_not_supported_is_named(form: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        BACKEND.compile("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
