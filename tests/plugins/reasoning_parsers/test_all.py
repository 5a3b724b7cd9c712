"""Every reasoning parser: same result for every split, respects the prompt's end, grammar
matches."""

from __future__ import annotations

import json
import random

import pytest

from frame.plugins.loader import load_registry
from frame.testing.contexts import PARSER
from tests.plugins.tool_call_parsers.texts import THOUGHTS, WRITERS, cut, damaged, some_calls

REGISTRY = load_registry(installed=False)
NAMES = sorted(record.name for record in REGISTRY.all_records()["reasoning_parser"])
FINAL = {"gpt-oss": "<|channel|>final<|message|>"}


def make(name, prompt_end=""):
    record = REGISTRY.get("reasoning_parser", name)
    parser = REGISTRY.load(record)(PARSER, REGISTRY.options(record, {}))
    parser.begin(prompt_end)
    return parser


def parse(name, chunks, prompt_end=""):
    parser = make(name, prompt_end)
    deltas = [*(parser.feed(chunk) for chunk in chunks), parser.finish()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


def test_every_parser_has_texts():
    assert sorted(THOUGHTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_is_separated(name):
    before, after = THOUGHTS[name]
    text = f"{before}so 2 < 3 ö{after}{FINAL.get(name, '')}Four 🙂 <b>."
    assert parse(name, [text]) == parse(name, text) == ("so 2 < 3 ö", "Four 🙂 <b>.")


@pytest.mark.parametrize("name", NAMES)
def test_every_split_gives_the_same(name):
    before, after = THOUGHTS[name]
    for seed in range(40):
        dice = random.Random(f"{name}{seed}")
        text = (
            f"{before}hm\n{dice.choice(('', '</', '<|', 'ö'))} {after}{FINAL.get(name, '')}{WRITERS['gpt-oss'](some_calls(dice))}<|end|> x"
        )
        if seed % 2:
            text = damaged(text, dice)
        prompt_end = dice.choice(
            ("", "<think>\n", "<think>\n\n</think>\n\n", "[THINK]", "<|start|>assistant<|channel|>analysis<|message|>")
        )
        whole = parse(name, [text], prompt_end)
        assert parse(name, text, prompt_end) == whole, text
        assert parse(name, cut(text, dice), prompt_end) == whole, text


@pytest.mark.parametrize("name", ["think-tags", "qwen3", "deepseek_r1"])
def test_the_end_of_the_prompt_counts(name):
    assert parse(name, ["a</think>b"], "<|im_start|>assistant\n<think>\n") == ("a", "b")
    assert parse(name, ["b </think>"], "<think>\n\n</think>\n\n") == ("", "b </think>")


def test_reasoning_that_is_switched_off():
    reply = {"type": "const_string", "value": "7"}
    for name in NAMES:
        parser = make(name)
        parser.begin("<assistant>", may_think=False)
        form = json.dumps(parser.grammar(reply, is_calls=False))
        assert "any_text" not in form
        assert parser.feed(f"{FINAL.get(name, '')}7 of 8").content + parser.finish().content == "7 of 8"


def test_a_prompt_that_ends_in_a_harmony_message():
    assert parse(
        "gpt-oss", ["a<|end|><|start|>assistant<|channel|>final<|message|>b"], "<|start|>assistant<|channel|>analysis<|message|>"
    ) == ("a", "b")
    assert parse("gpt-oss", ["<|channel|>final<|message|>b"], "<|start|>user<|message|>x<|end|><|start|>assistant") == ("", "b")


def test_the_grammar_continues_an_open_harmony_message():
    reply = {"type": "const_string", "value": "7"}
    form = make("gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>").grammar(reply, is_calls=False)
    assert form["elements"][0]["elements"][0]["begin"] == ""
    assert make("gpt-oss", "<|start|>assistant<|channel|>final<|message|>").grammar(reply, is_calls=False) == reply


def test_harmony_passes_calls_on():
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    assert parse("gpt-oss", text) == ("hm", "<|channel|>commentary to=functions.f<|message|>{}<|call|>")
    assert parse("gpt-oss", "plain text") == ("", "plain text")


@pytest.mark.parametrize("name", NAMES)
def test_grammars_allow_reasoning_before_the_output(name):
    xgrammar = pytest.importorskip("xgrammar")
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([bytes([i]) for i in range(256)]))
    before, after = THOUGHTS[name]
    reply = {"type": "json_schema", "json_schema": {"type": "integer"}}

    def accepts(text, *, is_calls=False, prompt_end=""):
        form = make(name, prompt_end).grammar(reply, is_calls=is_calls)
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": form})))
        return matcher.accept_string(text) and matcher.is_completed()

    final = FINAL.get(name, "")
    assert accepts(f"{before}hm{after}{final}12")
    assert accepts(f"{before}hm{after}12", is_calls=True)
    assert not accepts(f"{before}hm{after}{final}twelve")
    if name != "deepseek_r1":  # which always thinks
        assert accepts(f"{final}12")
    if name in ("think-tags", "qwen3", "deepseek_r1"):
        assert accepts("12", prompt_end="</think>")
        assert not accepts("12", prompt_end="<think>")
        assert accepts("hm</think>\n\n12", prompt_end="<think>")
