"""JSON is compact by default with every backend; a request may allow bounded whitespace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frame import SamplingParams
from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.entrypoints.http.chat.constraints import replace_constraint, to_format
from frame.interfaces.parsing import CallRule, Function
from frame.plugins.loader import load_registry
from frame.testing.contexts import PARSER
from frame.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
HARD = {**SCHEMA, "$defs": {"n": {"type": "object"}}, "properties": {**SCHEMA["properties"], "c": {"multipleOf": 2}}}  # for the library
OPEN = {"type": "object"}
TOKENIZER = Tokenizer.load(find_model(EMBEDDED))
REGISTRY = load_registry(installed=False)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar", "combined"])
def backend(request: pytest.FixtureRequest) -> Any:
    record = REGISTRY.get("grammar_backend", request.param)
    made = REGISTRY.load(record)(GrammarContext(TOKENIZER, TOKENIZER.backend.get_vocab_size()), REGISTRY.options(record, {}))
    return made, record.capabilities.kinds


def allows(backend: Any, params: SamplingParams, text: str) -> bool:
    made, kinds = backend
    assert params.grammar is not None
    if params.grammar[0] not in kinds:
        pytest.skip("this backend has no structural tags")
    grammar = made.compile(*params.grammar).start()
    return all(grammar.accept_token(token) for token in TOKENIZER.backend.encode(text, add_special_tokens=False).ids)


WRITTEN = ('{"a":7,"b":[true,false]}', '{"a": 7, "b": [true, false]}')  # by llguidance and our automata, and by xgrammar
SPACED = ('{ "a":7', '{ "a": 7', '{"a" : 7', '{"a":\n7', '{"a":  7', '{"a":7 ', '{"a": 7,\n', '{"a":7,"b":[ ', '{"a": 7, "b": [true,  ')


@pytest.mark.parametrize("schema", [SCHEMA, HARD, OPEN, None])
def test_json_is_compact(backend: Any, schema: dict[str, Any] | None) -> None:
    params = SamplingParams(json_object=True) if schema is None else SamplingParams(json_schema=json.dumps(schema))
    assert [allows(backend, params, text) for text in WRITTEN].count(True) == 1
    assert [text for text in SPACED if allows(backend, params, text)] == []


@pytest.mark.parametrize("schema", [SCHEMA, OPEN])
def test_json_within_a_larger_format_is_compact(backend: Any, schema: dict[str, Any]) -> None:
    params = SamplingParams(json_schema=json.dumps(schema))
    form = to_format(params)
    assert form is not None
    tagged = replace_constraint(params, {"type": "tag", "begin": "<x>", "content": form, "end": "</x>"})
    assert [allows(backend, tagged, f"<x>{text}</x>") for text in WRITTEN].count(True) == 1
    assert [text for text in SPACED if allows(backend, tagged, f"<x>{text}")] == []


@pytest.mark.parametrize("name", sorted(record.name for record in REGISTRY.all_records()["tool_call_parser"]))
def test_arguments_of_calls_are_compact(backend: Any, name: str) -> None:
    parser = REGISTRY.load(REGISTRY.get("tool_call_parser", name))(PARSER)
    form = parser.grammar(CallRule((Function("f", {**OPEN, "properties": {"a": SCHEMA}, "required": ["a"]}),), is_required=True))
    if "qwen_xml" in json.dumps(form):
        return  # whitespace around a value is part of that form; within one there is one character at most
    params = replace_constraint(SamplingParams(json_object=True), form)
    call = json.dumps(form)
    assert "max_whitespace_cnt" not in call
    made, kinds = backend
    if "structural_tag" in kinds:
        assert made.compile(*params.grammar).start()


@pytest.mark.parametrize("schema", [SCHEMA, OPEN, None])
def test_a_request_may_have_whitespace(backend: Any, schema: dict[str, Any] | None) -> None:
    values: Any = {"json_object": True} if schema is None else {"json_schema": json.dumps(schema)}
    params = SamplingParams(**values, disable_any_whitespace=False)
    for text in (*WRITTEN, *SPACED):
        assert allows(backend, params, text)
    assert not allows(backend, params, '{"a":' + "\n" * 20 + "7")
    form = to_format(params)
    assert form is not None
    tagged = replace_constraint(params, {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, form]})
    assert allows(backend, tagged, "x" + SPACED[3])
