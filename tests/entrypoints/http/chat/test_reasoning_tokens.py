"""The count of reasoning tokens, compared with token lists whose kinds are known, for tags and
channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frame.entrypoints.http.chat.output_parser import BLOCK, count_reasoning_tokens
from frame.interfaces.parsing import ReasoningParser
from frame.plugins.reasoning_parsers import ThinkTagsOptions
from frame.plugins.reasoning_parsers.gpt_oss import GptOss
from frame.plugins.reasoning_parsers.think_tags import ThinkTags
from frame.testing.contexts import PARSER


def count_of(pieces: list[str], make_parser: Callable[[], ReasoningParser]) -> int:
    return count_reasoning_tokens(range(len(pieces)), lambda ids: "".join(pieces[i] for i in ids), make_parser)


def open_at_once() -> ReasoningParser:
    return ThinkTags(PARSER, ThinkTagsOptions(starts_open=True))


def think_tags() -> ReasoningParser:
    return ThinkTags(PARSER)


def gpt_oss() -> ReasoningParser:
    return GptOss(PARSER)


WORDS = ["why", " not"]
TAGGED = ["<think>", "\n", *WORDS, "\n", "</think>", "\n\n"]
SPLIT = ["<thi", "nk>", *WORDS, "</", "think", ">"]
ANALYSIS = ["<|channel|>", "analysis", "<|message|>", *WORDS, "<|end|>"]
# Without output: counted with the tokens before it
HEADER = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>"]


@pytest.mark.parametrize(
    ("reasoning", "content", "make_parser"),
    [
        (TAGGED, ["Well", "."], think_tags),
        (SPLIT, ["Well", "."], think_tags),
        (SPLIT[:-1], [], think_tags),  # cut off
        ([*WORDS, "</think>"], ["Well"], open_at_once),
        ([], ["Well", ",", " <think>", "x"], think_tags),
        ([], ["<think>", "</think>", "Well"], think_tags),  # no reasoning
        ([], ["<thi"], think_tags),
        ([], ["<think>", " \n"], open_at_once),
        ([*ANALYSIS, *HEADER], ["Well", "."], gpt_oss),
        ([], [*HEADER[2:], "Well", "."], gpt_oss),
        ([*ANALYSIS, *HEADER[:2], *ANALYSIS], [], gpt_oss),
    ],
)
@pytest.mark.parametrize("more", [0, 1, BLOCK - 3, 5 * BLOCK])
def test_reasoning_tokens_are_counted(reasoning: list[str], content: list[str], make_parser: Any, more: int) -> None:
    if reasoning:
        at = reasoning.index("why")
        reasoning = [*reasoning[:at], *[" so"] * more, *reasoning[at:]]
    if "Well" in content:
        content = [*content, *[" it is"] * more]
    assert count_of([*reasoning, *content], make_parser) == len(reasoning)


def test_reasoning_after_content_is_counted() -> None:
    once = [*ANALYSIS, *HEADER, "Well", *HEADER[:2]]
    again = ANALYSIS[2:]  # the parser adds a line break between both parts of the reasoning
    assert count_of([*once, *ANALYSIS[:2], *again], gpt_oss) == len(ANALYSIS) + len(HEADER) + len(again)
