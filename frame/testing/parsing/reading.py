"""What the suites of both kinds of parsers check alike: splits of a text, responses in turn, odd
texts and the time. Must not know a parser.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from frame.testing.generators import require_bounded, require_fast

LONG, GROWTH, QUICK = 2_500, 9.0, 0.1  # characters, fed one by one; most growth of the time for four times as many; seconds
MAX_PIECE = 1.5e-3  # seconds of a piece of text
PIECE, PIECES = "word ", 10_000  # of a long response, which has up to four times as many
LIMIT = 5.0  # seconds of CPU time for 4 * LONG characters
MAX_HELD = 512  # characters of plain text that a parser may hold back
ODD = ("", "\0", "�" * 3, "\u2028\u0301", "{" * 3000, "[" * 3000, '"' * 9, "\\" * 99, "-", "1e999", "]" * 40, "</", "🙂" * 9, "\ud83d")


def require_no_error(call: Callable[[], object], text: str) -> None:
    try:
        call()
    except AssertionError:
        raise
    except Exception as error:
        short = text if len(text) < 80 else f"{text[:80]}…"
        raise AssertionError(f"the parser raises {type(error).__name__} ({str(error)[:80]}) on {short!r}") from error


def compare_splits(read: Callable[[Iterable[str]], Any], texts: Sequence[str]) -> None:
    """Read each text whole, by character, by pieces, and with empty pieces."""
    dice = random.Random(1)
    for text in texts:
        whole = read([text])
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for split in (list(text), pieces, ["", text[: len(text) // 2], "", text[len(text) // 2 :], ""]):
            result = read(split)
            assert result == whole, f"{text!r} gives {whole} in one piece, and {result} in the pieces {split}"


def compare_interleaved(start: Callable[[], Any], read: Callable[[Iterable[str]], Any], texts: Sequence[str]) -> None:
    alone = [read([text]) for text in texts]
    others = [start() for _ in texts]
    for other, text in zip(others, texts, strict=True):  # responses that do not end
        other.feed(text[: len(text) // 2 + 1])
    again = []
    for number, text in enumerate(texts):  # each after a response whose client has left
        left = start()
        left.feed(texts[number - 1][: len(texts[number - 1]) // 2 + 1])
        again.append(read([text]))
    assert again == alone, "a response is read otherwise while others are: parsers share state"
    fed: list[tuple[Any, str, list[Any]]] = [(start(), text, []) for text in texts]
    for turn in range(max(map(len, texts))):
        for parser, text, deltas in fed:
            deltas += [parser.feed(text[turn])] if turn < len(text) else []
    for parser, text, deltas in fed:
        single = start()
        expected = [*map(single.feed, text), single.finish()]
        assert [*deltas, parser.finish()] == expected, f"{text!r} is read otherwise when another response is read in turn"


def require_linear_time(read: Callable[[Iterable[str]], Any], heads: Sequence[str]) -> None:
    """Four times as many tokens take four times as long, and not 16 times."""
    for head in heads:
        _compare_lengths(read, head, [*("a" if head else " <")], LONG)
        _compare_lengths(read, head, [PIECE], PIECES)


def _compare_lengths(read: Callable[[Iterable[str]], Any], head: str, filling: list[str], length: int) -> None:
    few, many = 0.0, LIMIT
    for _ in range(3):  # again, in case the machine was busy
        few, many = max(few, _measure(read, [head, *filling * length])), min(many, _measure(read, [head, *filling * 4 * length]))
        if many <= max(QUICK, GROWTH * few):
            break
    what = f"{4 * length} times {''.join(filling)!r} after {head!r} take {many:.2f} s"
    assert many < LIMIT, f"{what}: the parser reads what it holds again and again"
    assert many <= max(QUICK, GROWTH * few), f"{what}, and {length} times {few:.2f} s: the time is not linear in the text"


def require_quick_pieces(start: Callable[[], Any]) -> None:
    """A piece of plain text is read at once: the event loop reads those of all responses."""
    parser = start()
    require_fast(lambda: parser.feed("word "), MAX_PIECE, "a piece of five characters", calls=40)


def require_bounded_responses(start: Callable[[], Any]) -> None:
    """Nothing is kept of responses that have ended."""

    def work(number: int) -> None:
        parser = start()
        parser.feed(f"text {number}")
        parser.finish()

    require_bounded(start(), work, 2000, "responses that have ended")


def _measure(read: Callable[[Iterable[str]], Any], pieces: list[str]) -> float:
    gc.collect()
    gc.disable()  # whose time grows with what the whole process holds
    try:
        began = time.process_time()
        read(pieces)
        return time.process_time() - began
    finally:
        gc.enable()
