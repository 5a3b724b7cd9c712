"""Hermes calls: same result for every split; arguments stream; other text stays content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frame.plugins.loader import load_registry
from frame.testing.contexts import PARSER
from tests.plugins.tool_call_parsers.texts import collect

REGISTRY = load_registry(installed=False)


def make():
    return REGISTRY.load(REGISTRY.get("tool_call_parser", "hermes"))(PARSER)


def parse(chunks):
    return collect(make(), chunks)


def block(body):
    return f"<tool_call>\n{body}\n</tool_call>"


ONE = block('{"name": "weather", "arguments": {"city": "Köln </tool_call> \\"}", "days": [1, 2]}}')
ARGUMENTS = '{"city": "Köln </tool_call> \\"}", "days": [1, 2]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("No call.", "No call.", []),
        (ONE, "", [("weather", ARGUMENTS)]),
        (f"Let me see.\n{ONE}\n{ONE}\n", "Let me see.", [("weather", ARGUMENTS)] * 2),
        (f"a {ONE} b ", "ab ", [("weather", ARGUMENTS)]),
        (block('{"arguments": {"a": {}}, "id": 3, "name": "f"}'), "", [("f", '{"a": {}}')]),
        (block('{"name": "f"}'), "", [("f", "{}")]),
        (block('{"name": "f", "arguments": null}'), "", [("f", "null")]),
        (block('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
        (block('{"name": "f", "parameters": {"a": 1}, "more": "x}"} junk'), "", [("f", '{"a": 1}')]),
        (block('{"name": "f"}\n{"name": "g"}'), "", [("f", "{}"), ("g", "{}")]),  # both in one block
        ("<tool_call>\n \n", "<tool_call>\n \n", []),
        (block("not json"), "<tool_call>\nnot json\n</tool_call>", []),
        (block("{}") + " x", "<tool_call>\n{}\n</tool_call> x", []),
        ("a\n<tool_call>[1]", "a\n<tool_call>[1]", []),
        ("a <tool_ca", "a <tool_ca", []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        ('<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1} oops</tool_call>x', "x", [("f", '{"a": 1}')]),
        ("", "", []),
    ],
)
def test_texts(text, content, calls):
    assert parse([text]) == (content, calls)
    assert parse(text) == (content, calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON)), max_size=3), st.booleans(), st.integers(1, 7))
def test_every_call_is_read(wanted, ascii_only, size):
    text = "\n".join(block(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)) for name, arguments in wanted)
    content, calls = parse([text[i : i + size] for i in range(0, len(text), size)])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == wanted


PIECES = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '{"a": 1}', *'{}"\\< \nx[,:1']),
    max_size=16,
)


@given(PIECES, st.randoms(use_true_random=False))
def test_every_split_gives_the_same(pieces, random):
    text = "".join(pieces)
    whole = parse([text])
    assert parse(text) == whole
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(4))
    assert parse([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


def test_arguments_stream():
    parser = make()
    assert parser.feed('<tool_call>{"name": "f", "arguments": ').calls == ()
    (start,) = parser.feed('{"a"').calls
    assert (start.index, start.name, start.arguments) == (0, "f", '{"a"')
    (more,) = parser.feed(": 1}").calls
    assert (more.name, more.arguments) == (None, ": 1}")
