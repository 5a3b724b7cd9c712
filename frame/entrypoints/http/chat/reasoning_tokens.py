"""How many of an answer's tokens are thinking: its tokens are read once more, by a parser of their own. Knows no parser by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frame.core.interfaces.parsing import ReasoningDelta, ReasoningParser

BLOCK = 64  # tokens that are read at once where nothing changes


class ThinkingCount:
    """A token is thinking if thinking comes out of the parser with it; one with which nothing comes out (a tag's, a gap's) is what the
    tokens before it were, or at the beginning, what the first that comes out is."""

    def __init__(self) -> None:
        self.count = 0
        self._is_thinking: bool | None = None
        self._undecided = 0  # tokens before anything came out

    def is_plain(self, delta: ReasoningDelta) -> bool:
        """Whether tokens that gave this are all of one kind."""
        if delta.reasoning:
            return not delta.content and self._is_thinking is not False
        return not delta.content or not self._is_thinking

    def take(self, tokens: int, delta: ReasoningDelta) -> None:
        """Count tokens of one kind."""
        if delta.reasoning:
            self.count += self._undecided + tokens
            self._undecided, self._is_thinking = 0, not delta.content
        elif delta.content:
            self._undecided, self._is_thinking = 0, False
        elif self._is_thinking:
            self.count += tokens
        elif self._is_thinking is None:
            self._undecided += tokens


def count_thinking(token_ids: Sequence[int], decode: Callable[[list[int]], str], make: Callable[[], ReasoningParser]) -> int:
    """`make` gives a parser that has been told of the prompt. Text that is decoded in parts may differ from the whole in spaces and in
    halves of characters, which is nothing to a parser."""
    found, ahead, behind = ThinkingCount(), make(), make()
    for start in range(0, len(token_ids), BLOCK):
        block = list(token_ids[start : start + BLOCK])
        text = decode(block)
        delta = ahead.feed(text)
        if found.is_plain(delta):
            behind.feed(text)
            found.take(len(block), delta)
            continue
        for token in block:
            found.take(1, behind.feed(decode([token])))
    found.take(0, ahead.finish())
    return found.count
