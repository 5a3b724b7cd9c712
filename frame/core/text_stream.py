"""One answer's token ids as text, token by token: decoders, stop strings, and what is held back because more may follow.

For every split of the ids into pieces the joined text is the same. Knows no message between processes but how an answer ends.
"""

from __future__ import annotations

import logging
from codecs import utf_8_decode
from typing import TYPE_CHECKING, Protocol

from frame.core.interfaces.parsing import held_back
from frame.core.messages import Finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frame.core.sampling_params import SamplingParams
    from frame.core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FAILED = Finish("error", error="the detokenizer failed on this request; the server's log says why")
PROMPT_TAIL = 6  # tokens before the answer that a windowed decoder needs for its first characters


class Decoder(Protocol):
    """One request's incremental decoder."""

    def feed(self, token_id: int) -> str:
        """The characters that are certain after this token."""
        ...

    def flush(self) -> str:
        """What was held back, at the end."""
        ...


class ByteDecoder:
    """For byte-level vocabularies: every id is a fixed string of bytes, and the text is the joined bytes as UTF-8."""

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
    """For any other decoder: decode a short window with and without the new tokens, and take what was added.

    The window begins where text was last certain, so spaces between tokens and merged bytes come out as in the whole text.
    """

    __slots__ = ("ids", "known", "skip_special", "tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, tail: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self.ids = list(tail)
        self.known = len(self.ids)  # ids[:known] are out

    def feed(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self._added()
        if not text or text.endswith("\ufffd"):
            return ""  # perhaps a character's first bytes
        self.ids = self.ids[self.known :]
        self.known = len(self.ids)
        return text

    def flush(self) -> str:
        text = self._added()
        self.known = len(self.ids)
        return text

    def _added(self) -> str:
        before = self.tokenizer.decode(self.ids[: self.known], self.skip_special)
        return self.tokenizer.decode(self.ids, self.skip_special)[len(before) :]


class TextStream:
    """One answer's text: decoder, stop strings, and what is held back because a stop string may begin in it."""

    __slots__ = ("closed", "decoder", "held", "include_stop", "mark", "minimum", "seen", "stops", "strings")

    def __init__(self, decoder: Decoder, params: SamplingParams, strings: Sequence[str | None] | None = None) -> None:
        self.decoder = decoder
        self.stops = params.stop
        self.include_stop = params.include_stop_str_in_output
        self.minimum = params.min_tokens if params.stop else 0
        self.seen = 0
        self.held = ""
        self.closed = False  # a stop string was found; the engine's last tokens of this request are not wanted
        self.strings = strings  # whole characters by id; None for an id whose bytes are a part of a character
        self.mark = 0  # in a roster

    def feed(self, token_ids: Sequence[int], finish: Finish | None) -> tuple[str, int, Finish | None]:
        """-> (text that is certain, how many of the tokens count, how the request ended). A decoder that fails ends the request."""
        try:
            return self._feed(token_ids, finish)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in a library's Rust is no Exception
            log.exception("the text of a request could not be made; it ends, alone")
            self.closed = True
            return "", len(token_ids), FAILED

    def _feed(self, token_ids: Sequence[int], finish: Finish | None) -> tuple[str, int, Finish | None]:
        # the text of a stop token is not a part of the answer, its id is
        hidden = finish is not None and isinstance(finish.matched, int) and not self.include_stop and token_ids[-1:] == [finish.matched]
        shown = token_ids[:-1] if hidden else token_ids
        feed = self.decoder.feed
        if not self.stops:
            text = "".join([feed(i) for i in shown])
            return (text if finish is None else text + self.decoder.flush()), len(token_ids), finish
        parts = []
        for count, token_id in enumerate(shown, 1):
            text, stop = self._search(feed(token_id))
            parts.append(text)
            if stop is not None:
                self.closed = True
                return "".join(parts), count, Finish("stop", stop)
        if finish is not None:
            text, stop = self._search(self.decoder.flush())
            parts += [text, self.held]
            self.held = ""
            if stop is not None:
                finish = Finish("stop", stop)
        return "".join(parts), len(token_ids), finish

    def _search(self, added: str) -> tuple[str, str | None]:
        """-> (text that no later character can make a part of a stop string, the stop string that was found)."""
        self.seen += 1
        if self.seen < self.minimum:
            return added, None
        text = self.held + added
        found = min(((at, -len(stop), stop) for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            at, _, stop = found
            self.held = ""
            return text[: at + len(stop) if self.include_stop else at], stop
        keep = held_back(text, *self.stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None
