"""The prompts of each family's form, as its model card writes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frame.text.fill_in_middle import find_form, list_end_ids


def knows(*tokens: str) -> Any:
    return SimpleNamespace(find_token_id={text: number for number, text in enumerate(tokens, 7)}.get)


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"), "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>"),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "<fim_prefix>A<fim_suffix>B<fim_middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>"),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX]B[PREFIX]A"),
    ],
)
def test_forms(tokens: tuple[str, ...], prompt: str) -> None:
    form = find_form(knows(*tokens))
    assert form is not None
    assert form.join("A", "B") == prompt


def test_ends_are_the_tokens_that_no_middle_has() -> None:
    tokenizer = knows("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "other")
    form = find_form(tokenizer)
    assert form is not None
    assert list_end_ids(tokenizer, form) == (7, 8, 9, 10)
    assert find_form(knows("<|fim_prefix|>", "<|fim_suffix|>")) is None, "one token of the form is missing"
