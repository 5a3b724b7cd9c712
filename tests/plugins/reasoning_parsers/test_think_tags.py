"""Reasoning between tags is separated for every split of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frame.plugins.loader import load_registry
from frame.testing.contexts import PARSER

REGISTRY = load_registry(installed=False)
RECORD = REGISTRY.get("reasoning_parser", "think-tags")


def make(**options):
    return REGISTRY.load(RECORD)(PARSER, REGISTRY.options(RECORD, options))


def parse(chunks, **options):
    parser = make(**options)
    deltas = [*(parser.feed(chunk) for chunk in chunks), parser.finish()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nhm, 2\n</think>\n\nFour.", ("hm, 2", "Four.")),
        ("  <think>a</think>b", ("a", "b")),
        ("Four.", ("", "Four.")),
        ("  Four. <think>x</think>", ("", "  Four. <think>x</think>")),
        ("<think></think>b <think>c", ("", "b <think>c")),
        ("<think>a </ think> b", ("a </ think> b", "")),
        ("<think>a\n", ("a\n", "")),
        ("<thin", ("", "<thin")),
        ("<think>a</thi", ("a</thi", "")),
        ("", ("", "")),
        (" \n", ("", " \n")),
    ],
)
def test_texts(text, expected):
    assert parse([text]) == expected
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("hm\n</think>\nFour.", ("hm", "Four.")), ("<think>hm</think>Four.", ("hm", "Four.")), ("hm", ("hm", "")), ("<th", ("<th", ""))],
)
def test_outputs_that_start_inside(text, expected):
    assert parse([text], starts_open=True) == expected
    assert parse(text, starts_open=True) == expected


def test_own_tags():
    assert parse("[[a]]b", open="[[", close="]]") == ("a", "b")


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "bc", "é"]), max_size=14)


@given(PIECES, st.booleans(), st.randoms(use_true_random=False))
def test_every_split_gives_the_same(pieces, starts_open, random):
    text = "".join(pieces)
    whole = parse([text], starts_open=starts_open)
    assert parse(text, starts_open=starts_open) == whole
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(4))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(chunks, starts_open=starts_open) == whole


def test_reasoning_streams():
    parser = make()
    assert parser.feed("<think>abc").reasoning == "abc"
    assert parser.feed(" def").reasoning == " def"
    assert parser.feed("</").reasoning == ""
    assert parser.feed("x").reasoning == "</x"
