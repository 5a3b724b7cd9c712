"""Tokens of thinking are counted as such: against what each token is known to be, for tags and channels, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frame.core.interfaces.parsing import ReasoningParser
from frame.entrypoints.http.chat.reasoning_tokens import BLOCK, count_thinking
from frame.plugins.reasoning_parsers.gpt_oss import GptOss
from frame.plugins.reasoning_parsers.options import ThinkTagsOptions
from frame.plugins.reasoning_parsers.think_tags import ThinkTags


def counted(pieces: list[str], make: Callable[[], ReasoningParser]) -> int:
    return count_thinking(range(len(pieces)), lambda ids: "".join(pieces[i] for i in ids), make)


def open_at_once() -> ReasoningParser:
    return ThinkTags(ThinkTagsOptions(starts_open=True))


WORDS = ["why", " not"]
TAGGED = ["<think>", "\n", *WORDS, "\n", "</think>", "\n\n"]
SPLIT = ["<thi", "nk>", *WORDS, "</", "think", ">"]
ANALYSIS = ["<|channel|>", "analysis", "<|message|>", *WORDS, "<|end|>"]
HEADER = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>"]  # nothing comes out with it: it is what was before it


@pytest.mark.parametrize(
    ("thinking", "answer", "make"),
    [
        (TAGGED, ["Well", "."], ThinkTags),
        (SPLIT, ["Well", "."], ThinkTags),
        (SPLIT[:-1], [], ThinkTags),  # cut off
        ([*WORDS, "</think>"], ["Well"], open_at_once),
        ([], ["Well", ",", " <think>", "x"], ThinkTags),
        ([], ["<think>", "</think>", "Well"], ThinkTags),  # it did not think
        ([], ["<thi"], ThinkTags),
        ([], ["<think>", " \n"], open_at_once),
        ([*ANALYSIS, *HEADER], ["Well", "."], GptOss),
        ([], [*HEADER[2:], "Well", "."], GptOss),
        ([*ANALYSIS, *HEADER[:2], *ANALYSIS], [], GptOss),
    ],
)
@pytest.mark.parametrize("more", [0, 1, BLOCK - 3, 5 * BLOCK])
def test_each_token_is_what_it_says(thinking: list[str], answer: list[str], make: Any, more: int) -> None:
    if thinking:
        at = thinking.index("why")
        thinking = [*thinking[:at], *[" so"] * more, *thinking[at:]]
    if "Well" in answer:
        answer = [*answer, *[" it is"] * more]
    assert counted([*thinking, *answer], make) == len(thinking)


def test_thinking_may_come_again() -> None:
    once = [*ANALYSIS, *HEADER, "Well", *HEADER[:2]]
    again = ANALYSIS[2:]  # a line's end comes with it, which parts it from what was thought before
    assert counted([*once, *ANALYSIS[:2], *again], GptOss) == len(ANALYSIS) + len(HEADER) + len(again)
