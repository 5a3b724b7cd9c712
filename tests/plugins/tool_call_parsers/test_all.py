"""Every tool call parser: same result for every split, never raises, matches its grammar."""

from __future__ import annotations

import json
import random
import time

import pytest

from frame.interfaces.parsing import CallRule, Function
from frame.plugins.loader import load_registry
from frame.testing.contexts import PARSER
from tests.plugins.tool_call_parsers.texts import FUNCTIONS, WRITERS, collect, cut, damaged, dumped, old_mistral, python_calls, some_calls

REGISTRY = load_registry(installed=False)
NAMES = sorted(record.name for record in REGISTRY.all_records()["tool_call_parser"])


def make(name):
    parser = REGISTRY.load(REGISTRY.get("tool_call_parser", name))(PARSER)
    parser.begin(FUNCTIONS)
    return parser


def parse(name, chunks):
    """-> (content, [(name, arguments)])"""
    return collect(make(name), chunks)


def read(name, text):
    content, calls = parse(name, [text])
    return content, [(called, json.loads(arguments)) for called, arguments in calls]


def test_every_parser_has_texts():
    assert sorted(WRITERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(8))
def test_calls_are_read(name, seed):
    calls = some_calls(random.Random(seed))
    text = WRITERS[name](calls)
    assert read(name, text) == ("", calls)
    if name not in ("llama3", "pythonic"):  # these begin the answer
        assert read(name, f"Let me see.\n{text}\n") == ("Let me see.", calls)


@pytest.mark.parametrize("name", NAMES)
def test_text_stays_text(name):
    for text in (
        "",
        "Hello.",
        " a < b [1] {2} \n",
        '{"city": "Rome"}',
        "[1, 2]",
        "[f(1)]",
        "<tool",
        "[TOOL_CALLS",
        "x <|python_tag|",
        "\n",
    ):
        assert parse(name, [text]) == (text, [])
        assert parse(name, text) == (text, [])


@pytest.mark.parametrize("name", NAMES)
def test_every_split_gives_the_same(name):
    for seed in range(40):
        dice = random.Random(f"{name}{seed}")
        text = f"{dice.choice(('', 'So: ', ' '))}{WRITERS[name](some_calls(dice))}{dice.choice(('', ' end', chr(10)))}"
        if seed % 2:
            text = damaged(text, dice)
        whole = parse(name, [text])
        assert parse(name, text) == whole, (text, whole)
        assert parse(name, cut(text, dice)) == whole, (text, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lead", ["", "Let me see.\n"])
def test_no_markup_of_a_cut_call_becomes_content(name, lead):
    """An answer may end anywhere when its tokens are up: within the marks of its first call, or of
    its second, or within a character of a mark."""
    if lead and name in ("llama3", "pythonic"):
        pytest.skip("its calls begin the answer")
    text = lead + WRITERS[name]([("get_weather", {"city": "Rome"}), ("now", {}), ("get_weather", {"city": "Rome", "days": 2})])
    whole = parse(name, [text])[1]
    for size in range(len(text.encode())):
        begin = text.encode()[:size].decode(errors="replace")
        content, calls = collect(make(name), list(begin) if size % 2 else [begin], is_cut=True)
        assert lead.startswith(content), (begin, content)
        assert content.strip() or size < len(lead.strip()) or not lead
        for (called, arguments), (expected, complete) in zip(calls, whole, strict=False):
            assert called == expected
            assert complete.startswith(arguments) or json.loads(complete) == json.loads(arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_output_keeps_its_text(name):
    for text in ("Hello, wor", '{"city": "Ro', "1 + [2]", "x\n\ny"):
        assert collect(make(name), [text], is_cut=True) == (text, [])


def test_invalid_schemas():
    """What clients send as a schema is not looked at before; a parser must not fail on it."""
    for schema in ({"enum": 3}, {"type": [{}, "integer"]}, {"anyOf": 1}, {"anyOf": [2]}, {"type": {}}, [], None):
        parser = REGISTRY.load(REGISTRY.get("tool_call_parser", "qwen3_coder"))(PARSER)
        parser.begin((Function("f", {"properties": {"a": schema}}),))
        assert parser.feed("<function=f><parameter=a>7</parameter></function>").calls


def test_older_mistral():
    calls = some_calls(random.Random(3))
    assert read("mistral", old_mistral(calls) + " done") == ("done", calls)
    assert read("mistral", "[TOOL_CALLS] [1]") == ("[TOOL_CALLS] [1]", [])
    assert read("mistral", '[TOOL_CALLS] [{"a": 1}]') == ('[TOOL_CALLS] [{"a": 1}]', [])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("llama3", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ("llama3", 'So <|python_tag|>{"name": "now"}', "So", [("now", {})]),
        ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("pythonic", "[now(), oops(1)] x", " oops(1)] x", [("now", {})]),
        ("pythonic", "[unknown(a=1)]", "[unknown(a=1)]", []),
        ("pythonic", "[now(__import__('os'))]", "[now(__import__('os'))]", []),
        ("pythonic", "<|python_start|>[now(a=[-1, {'b': None}], c=true)]<|python_end|>", "",
         [("now", {"a": [-1, {"b": None}], "c": True})]),
        ("qwen3_coder", "<function=get_weather><parameter=days>7</parameter><parameter=x>7</function>", "",
         [("get_weather", {"days": 7, "x": "7"})]),
        ("qwen3_coder", "<function=get_weather><parameter=days>1e999</parameter></function>", "", [("get_weather", {"days": "1e999"})]),
        ("qwen3_coder", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now{}", "<｜tool▁call▁begin｜>now{}", []),
        ("gpt-oss", "<|channel|>commentary to=functions.now<|message|>{}", "", [("now", {})]),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]ab12[ARGS]{}", "", [("now", {})]),
    ],
)  # fmt: skip
def test_odd_texts(name, text, content, calls):
    assert read(name, text) == (content, calls)


@pytest.mark.parametrize("name", NAMES)
def test_time_grows_with_the_text_alone(name):
    """A long answer comes a token at a time; what is held must not be read again and again."""
    (text,) = [WRITERS[name]([("get_weather", {"city": "a" * 20_000})])]
    started = time.process_time()
    parse(name, [*text, *(" " * 10_000), *("\n<" * 3_000)])
    assert time.process_time() - started < 10  # quadratic: minutes


xgrammar = pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def compiler():
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([bytes([i]) for i in range(256)]))


def accepts(compiler, form, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": form})))
    return matcher.accept_string(text) and matcher.is_completed()


def constrained_text(name, calls):
    """The calls as a constrained model writes them."""
    if name == "pythonic":
        return python_calls(calls, dumped)
    return WRITERS[name](calls).removesuffix("<|call|>").removeprefix("<|python_tag|>")


ROME = ("get_weather", {"city": "Rome", "days": 2, "exact": True})


@pytest.mark.parametrize("name", NAMES)
def test_grammars_allow_what_the_parser_reads_and_nothing_else(name, compiler):
    once = name == "gpt-oss"  # whose call ends the turn

    def written(*calls):
        return constrained_text(name, list(calls))

    required = make(name).grammar(CallRule(FUNCTIONS, is_required=True))
    assert accepts(compiler, required, written(ROME))
    assert accepts(compiler, required, written(("get_weather", {"city": "Köln"})))
    assert accepts(compiler, required, written(("now", {})))
    assert accepts(compiler, required, written(ROME, ("now", {}))) is not once
    for wrong in ("", "Hello.", written(("get_weather", {"city": "Bonn"})), written(("other", {})), written(ROME) + " and so"):
        assert not accepts(compiler, required, wrong), wrong
    single = make(name).grammar(CallRule(FUNCTIONS, is_required=True, is_parallel=False))
    assert accepts(compiler, single, written(ROME))
    assert not accepts(compiler, single, written(ROME, ROME))
    free = make(name).grammar(CallRule(FUNCTIONS))
    assert accepts(compiler, free, "Hello.")
    assert accepts(compiler, free, written(ROME))
    assert not accepts(compiler, free, written(("get_weather", {"city": "Bonn"})))


@pytest.mark.parametrize("name", NAMES)
def test_functions_without_parameters(name, compiler):
    functions = (Function("f"), Function("g", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}))
    form = make(name).grammar(CallRule(functions, is_required=True, is_parallel=False))
    for call in (("f", {}), ("g", {"a": 1}), ("g", {"b": 2}), ("g", {"a": 1, "b": 2}), ("g", {})):
        text = constrained_text(name, [call])
        assert accepts(compiler, form, text), text
