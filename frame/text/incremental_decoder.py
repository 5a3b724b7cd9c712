"""Incremental decoding of one sequence: decoders, stop strings, and text that is held back.

The joined text does not depend on how the ids are split. Used by the detokenizer. Must not know
messages other than `Finish`.
"""

from __future__ import annotations

import logging
import re
from codecs import utf_8_decode
from typing import TYPE_CHECKING, Protocol

from frame.core.messages import Finish
from frame.text.stop_regex import RegexSearch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FAILED = Finish("error", error="the detokenizer failed on this request; the server's log says why")
PROMPT_TAIL = 6  # prompt tokens that a windowed decoder needs for the first characters of the output
MAX_HELD = 1024  # characters that are held back because they may be part of a match of `stop_regex`
MAX_PENDING = 16  # tokens that a windowed decoder holds back; a character has four bytes at most


class Decoder(Protocol):
    """The incremental decoder of one sequence."""

    def feed(self, token_id: int) -> str:
        """Return the characters that no later token can change."""
        ...

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        ...


class ByteDecoder:
    """Decoder for byte-level vocabularies: each id is a fixed byte string, and the text is the
    joined bytes as UTF-8."""

    __slots__ = ("pending", "pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.pending = b""

    def feed(self, token_id: int) -> str:
        data = self.pending + (self.pieces[token_id] if token_id < len(self.pieces) else b"")
        text, used = utf_8_decode(data, "replace", False)
        self.pending = data[used:]
        return text

    def flush(self) -> str:
        data, self.pending = self.pending, b""
        return data.decode("utf-8", "replace")


class WindowDecoder:
    """Decoder for all other vocabularies: decodes a short window with and without the new tokens
    and returns the difference.

    The window starts at the last returned character, so that spaces between tokens and merged bytes
    equal those of the whole text. At most `MAX_PENDING` tokens are held back, which bounds the cost
    of a token.
    """

    __slots__ = ("ids", "num_seen", "shown", "skip_special", "tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, tail: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self.ids = list(tail)
        self.num_seen = len(self.ids)  # ids[:num_seen] are returned
        self.shown: int | None = None  # characters of ids[:num_seen]; None: not decoded yet

    def feed(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self._added()
        is_full = len(self.ids) - self.num_seen >= MAX_PENDING
        if not text:
            if is_full:
                del self.ids[self.num_seen :]  # tokens without text, such as skipped special tokens
            return ""
        if text.endswith("\ufffd") and not is_full:
            return ""  # may be the first bytes of a character
        self.ids = self.ids[self.num_seen :]
        self.num_seen, self.shown = len(self.ids), None
        return text

    def flush(self) -> str:
        text = self._added()
        self.num_seen, self.shown = len(self.ids), None
        return text

    def _added(self) -> str:
        if self.shown is None:
            self.shown = len(self.tokenizer.decode(self.ids[: self.num_seen], self.skip_special))
        return self.tokenizer.decode(self.ids, self.skip_special)[self.shown :]


class StopSearch:
    """Finds stop strings in a text that arrives in pieces, in linear time (Knuth, Morris and Pratt
    1977).

    The tables grow with the matched prefix, so that strings that never match cost nothing.
    """

    __slots__ = ("_first", "_matched", "_stops", "_tables")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self._tables = [[0] for _ in stops]  # [i]: the longest proper prefix of stop[: i + 1] that is also its suffix
        self._first = re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]")

    def feed(self, added: str) -> tuple[int, str] | None:
        """Read more text. Returns (characters from the start of the match to the end of the text,
        stop string) of the match that starts first, the longest of these. None: no match."""
        if not any(self._matched) and self._first.search(added) is None:
            return None
        ends = [self._find(number, added) for number in range(len(self._stops))]
        matches = [(len(stop) - end, len(stop), stop) for stop, end in zip(self._stops, ends, strict=True) if end is not None]
        if not matches:
            return None
        behind, _, stop = max(matches)
        return behind + len(added), stop

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that may start a stop string."""
        return max(self._matched)

    def _find(self, number: int, added: str) -> int | None:
        """Where in `added` the stop string first ends. None: nowhere."""
        stop, table, matched = self._stops[number], self._tables[number], self._matched[number]
        for place, character in enumerate(added, 1):
            while matched and stop[matched] != character:
                matched = table[matched - 1]
            if stop[matched] == character:
                matched += 1
                if matched == len(stop):
                    return place
                if matched > len(table):
                    table.append(_next_entry(stop, table))
        self._matched[number] = matched
        return None


def _next_entry(stop: str, table: list[int]) -> int:
    """The next entry of a table of `StopSearch`."""
    character, size = stop[len(table)], table[-1]
    while size and stop[size] != character:
        size = table[size - 1]
    return size + (stop[size] == character)


class StopConditions:
    """The stop strings and stop patterns of one sequence."""

    __slots__ = ("_patterns", "_strings")

    def __init__(self, params: SamplingParams) -> None:
        self._strings = StopSearch(params.stop) if params.stop else None
        self._patterns = RegexSearch(params.stop_regex) if params.stop_regex else None

    def skip(self, added: str) -> None:
        """Read text in which none is searched."""
        if self._patterns is not None:
            self._patterns.skip(added)

    def feed(self, added: str) -> tuple[int, int, str] | None:
        """Read more text. Returns (characters from the start of the match to the end of the text,
        characters behind the match, stop string or pattern) of the match that starts first."""
        matches = []
        if self._strings is not None and (match := self._strings.feed(added)) is not None:
            matches.append((match[0], match[0] - len(match[1]), match[1]))
        if self._patterns is not None and (pattern := self._patterns.feed(added)) is not None:
            matches.append(pattern)
        return max(matches, default=None)

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that may be part of a match."""
        strings = 0 if self._strings is None else self._strings.num_held
        return max(strings, 0 if self._patterns is None else min(MAX_HELD, self._patterns.num_held))


class TextStream:
    """The text of one sequence: decoder, stop strings, and held-back text that may start a stop
    string."""

    __slots__ = ("closed", "decoder", "held", "include_stop", "minimum", "request_hash", "search", "seen", "strings")

    def __init__(self, decoder: Decoder, params: SamplingParams, strings: Sequence[str | None] | None = None) -> None:
        self.decoder = decoder
        self.search = StopConditions(params) if params.stop or params.stop_regex else None
        self.include_stop = params.include_stop_str_in_output
        self.minimum = params.min_tokens if self.search is not None else 0
        self.seen = 0
        self.held = ""
        self.closed = False  # a stop string was found; later tokens are ignored
        self.strings = strings  # text by id; None for an id whose bytes are part of a character
        self.request_hash = 0  # in the in-flight file

    def feed(self, token_ids: Sequence[int], finish: Finish | None) -> tuple[str, int, Finish | None]:
        """Returns (text, number of tokens up to a stop string, how the request ended). A decoder
        that fails ends the request."""
        try:
            return self._feed(token_ids, finish)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in a Rust library is no Exception
            log.exception("decoding the text of a request failed; the request ends")
            self.closed = True
            return "", len(token_ids), FAILED

    def _feed(self, token_ids: Sequence[int], finish: Finish | None) -> tuple[str, int, Finish | None]:
        # the output includes the id of a stop token, not its text
        hidden = finish is not None and isinstance(finish.matched, int) and not self.include_stop and token_ids[-1:] == [finish.matched]
        shown = token_ids[:-1] if hidden else token_ids
        feed, search = self.decoder.feed, self.search
        if search is None:
            text = "".join([feed(i) for i in shown])
            return (text if finish is None else text + self.decoder.flush()), len(token_ids), finish
        pieces = []
        for count, token_id in enumerate(shown, 1):
            text, stop = self._cut(search, feed(token_id))
            pieces.append(text)
            if stop is not None:
                self.closed = True
                return "".join(pieces), count, Finish("stop", stop)
        if finish is not None:
            text, stop = self._cut(search, self.decoder.flush())
            pieces += [text, self.held]
            self.held = ""
            if stop is not None:
                finish = Finish("stop", stop)
        return "".join(pieces), len(token_ids), finish

    def _cut(self, search: StopConditions, added: str) -> tuple[str, str | None]:
        """Returns (text that cannot become part of a stop string, the stop string that was
        found)."""
        self.seen += 1
        if self.seen < self.minimum:
            search.skip(added)
            return added, None
        text = self.held + added
        match = search.feed(added)
        if match is not None:
            start, end, stop = match
            self.held = ""
            return text[: max(0, len(text) - (end if self.include_stop else start))], stop
        keep = search.num_held
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None
