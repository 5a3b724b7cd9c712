"""Counts the reasoning tokens of a finished sequence, for `reasoning_tokens` in usage.

Decodes the output tokens again and feeds them to a new reasoning parser. Used by `chat_request`.
Must not depend on a parser plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from frame.core.interfaces.parsing import ReasoningDelta, ReasoningParser

BLOCK = 64  # tokens that are fed at once where all of them are of one kind


class ReasoningTokenCounter:
    """Assigns tokens to reasoning or content by the parser's deltas.

    A token is reasoning if the parser returns reasoning for it. A token without output (a tag, or
    whitespace that is dropped) is of the kind of the tokens before it; at the start of the output
    it is of the kind of the first output.
    """

    def __init__(self) -> None:
        self.count = 0  # reasoning tokens
        self._is_reasoning: bool | None = None  # the kind of the last output; None before any
        self._undecided = 0  # tokens before any output

    def is_plain(self, delta: ReasoningDelta) -> bool:
        """Whether the tokens that gave this delta are all of one kind."""
        if delta.reasoning:
            return not delta.content and self._is_reasoning is not False
        return not delta.content or not self._is_reasoning

    def add_tokens(self, num_tokens: int, delta: ReasoningDelta) -> None:
        """Count tokens of one kind, for which the parser returned `delta`."""
        if delta.reasoning:
            self.count += self._undecided + num_tokens
            self._undecided, self._is_reasoning = 0, not delta.content
        elif delta.content:
            self._undecided, self._is_reasoning = 0, False
        elif self._is_reasoning:
            self.count += num_tokens
        elif self._is_reasoning is None:
            self._undecided += num_tokens


def count_reasoning_tokens(token_ids: Sequence[int], decode: Callable[[list[int]], str], make: Callable[[], ReasoningParser]) -> int:
    """The number of reasoning tokens in `token_ids`. `make` returns a new, started parser.

    Text that is decoded in blocks may differ from the whole text in spaces and in incomplete
    characters. This does not change what a parser finds.
    """
    # `ahead` reads whole blocks; `behind` reads the same text, token by token where a block is
    # mixed.
    counter, ahead, behind = ReasoningTokenCounter(), make(), make()
    for start in range(0, len(token_ids), BLOCK):
        block = list(token_ids[start : start + BLOCK])
        text = decode(block)
        delta = ahead.feed(text)
        if counter.is_plain(delta):
            behind.feed(text)
            counter.add_tokens(len(block), delta)
            continue
        for token in block:
            counter.add_tokens(1, behind.feed(decode([token])))
    counter.add_tokens(0, ahead.finish())
    return counter.count
