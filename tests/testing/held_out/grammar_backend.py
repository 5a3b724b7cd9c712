"""Grammar backends: one of several texts, and backends with a bug each."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.sampling import GrammarBackend, GrammarCapabilities, GrammarContext
from tests.testing.held_out import Wrong


def read_tokens(tokenizer: Any) -> dict[bytes, list[int]]:
    """The ids of each text of a byte-level vocabulary. Its letters stand for bytes: printable ones
    for themselves, those from U+0100 on for the others."""
    backend = getattr(tokenizer, "backend", tokenizer)
    alphabet, further = {}, 0x100
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(further)] = byte
            further += 1
    special = set(backend.get_added_tokens_decoder())
    found: dict[bytes, list[int]] = {}
    for text, number in backend.get_vocab().items():
        if number not in special and text and all(letter in alphabet for letter in text):
            found.setdefault(bytes(alphabet[letter] for letter in text), []).append(number)
    return found


class Vocabulary:
    def __init__(self, context: GrammarContext) -> None:
        self.ids = read_tokens(context.tokenizer)
        self.texts = {number: text for text, numbers in self.ids.items() for number in numbers}
        self.ends = [int(number) for number in getattr(context.tokenizer, "eos_token_ids", ())]
        self.longest = max(map(len, self.ids), default=0)
        self.size = context.vocab_size


class OneOf:
    """A request's place in the texts: those that begin with its output are a range."""

    def __init__(self, texts: list[bytes], vocabulary: Vocabulary) -> None:
        self.texts, self.vocabulary = texts, vocabulary
        self.output, self.has_ended = b"", False
        self.earlier: Any = []  # (output, has_ended) before each token

    def list_open(self) -> list[bytes]:
        """What may follow the output, each once."""
        first = bisect_left(self.texts, self.output)
        rests = []
        for text in self.texts[first:]:
            if not text.startswith(self.output):
                break
            rests.append(text[len(self.output) :])
        return rests

    def list_allowed(self) -> set[int]:
        ids, longest = self.vocabulary.ids, self.vocabulary.longest
        rests = self.list_open()
        starts = {rest[:size] for rest in rests for size in range(1, min(longest, len(rest)) + 1)}
        allowed = {number for start in starts for number in ids.get(start, ())}
        return allowed.union(self.vocabulary.ends) if b"" in rests else allowed

    def fill_mask(self, mask: np.ndarray) -> bool:
        bits = np.zeros(mask.size * 32, np.uint8)
        bits[list(self.list_allowed())] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def accept_token(self, token_id: int) -> bool:
        before = self.output, self.has_ended
        if token_id in self.vocabulary.ends:
            if b"" not in self.list_open():
                return False
            self.has_ended = True
        else:
            text = self.vocabulary.texts.get(token_id)
            if text is None or self.has_ended or not self.can_add(text):
                return False
            self.output += text
        self.keep(before)
        return True

    def can_add(self, text: bytes) -> bool:
        return any(rest.startswith(text) for rest in self.list_open())

    def keep(self, before: tuple[bytes, bool]) -> None:
        self.earlier.append(before)

    def is_finished(self) -> bool:
        return self.list_open() == [b""]

    def rollback_tokens(self, count: int) -> None:
        for _ in range(count):
            self.output, self.has_ended = self.earlier.pop()


class CompiledTexts:
    grammar: ClassVar[type[OneOf]] = OneOf

    def __init__(self, texts: list[bytes], vocabulary: Vocabulary) -> None:
        self.texts, self.vocabulary = texts, vocabulary

    @property
    def num_bytes(self) -> int:
        return 200 + sum(64 + len(text) for text in self.texts)

    def start(self) -> OneOf:
        return self.grammar(self.texts, self.vocabulary)


class SortedTexts(GrammarBackend):
    """Compiles `choice`."""

    capabilities: ClassVar[GrammarCapabilities] = GrammarCapabilities(kinds=("choice",))
    compiled: ClassVar[type[CompiledTexts]] = CompiledTexts

    def __init__(self, context: GrammarContext, options: BaseModel | None = None) -> None:
        self.vocabulary = Vocabulary(context)

    def compile(self, kind: str, source: str) -> CompiledTexts:
        if kind != "choice":
            raise ValueError(f"the kind {kind} is not compiled; use choice")
        return self.compiled(sorted({self.encode(text) for text in self.read(source)}), self.vocabulary)

    def encode(self, text: str) -> bytes:
        return text.encode()

    def read(self, source: str) -> list[str]:
        try:
            texts = json.loads(source)
        except (ValueError, RecursionError):
            raise ValueError("choice is no JSON; send a list of texts") from None
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("choice must be a list of texts, of which none is empty")
        return texts


TWIN = SortedTexts
WRONG = Wrong()


class OneState(CompiledTexts):
    def start(self) -> OneOf:
        if not hasattr(self, "first"):
            self.first = super().start()
        return self.first


@WRONG.add("Two requests with one grammar advance each other: both get the same state.")
class SharesState(SortedTexts):
    compiled = OneState


@WRONG.add("A request gets the choices of another one whose list begins alike: compiled grammars are found by 64 characters.")
class CutsSource(SortedTexts):
    def __init__(self, context: GrammarContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.known: dict[str, CompiledTexts] = {}

    def compile(self, kind: str, source: str) -> CompiledTexts:
        if len(self.known) > 100:
            self.known.clear()
        if source[:64] not in self.known:
            self.known[source[:64]] = super().compile(kind, source)
        return self.known[source[:64]]


class EndIsNoToken(OneOf):
    def keep(self, before: tuple[bytes, bool]) -> None:
        if not self.has_ended:
            super().keep(before)

    def rollback_tokens(self, count: int) -> None:
        self.has_ended = False
        super().rollback_tokens(min(count, len(self.earlier)))


class EndIsNoTokenTexts(CompiledTexts):
    grammar = EndIsNoToken


@WRONG.add("With drafts the output repeats a part: an end token is not kept, so a rollback over it undoes one token too many.")
class ForgetsEnd(SortedTexts):
    compiled = EndIsNoTokenTexts


class RefusedMoves(OneOf):
    def accept_token(self, token_id: int) -> bool:
        text = self.vocabulary.texts.get(token_id, b"")
        taken = super().accept_token(token_id)
        if not taken and text:
            self.output += text
        return taken


class RefusedMovesTexts(CompiledTexts):
    grammar = RefusedMoves


@WRONG.add("A draft that the grammar refuses breaks the request: the state moves on before the token is checked.")
class MovesOnRefusal(SortedTexts):
    compiled = RefusedMovesTexts


class AddsBits(OneOf):
    def fill_mask(self, mask: np.ndarray) -> bool:
        fresh = np.zeros_like(mask)
        super().fill_mask(fresh)
        mask |= fresh
        return True


class AddsBitsTexts(CompiledTexts):
    grammar = AddsBits


@WRONG.add("The model writes tokens of an earlier step or request: bits are added to the mask, which is not cleared.")
class AddsToMask(SortedTexts):
    compiled = AddsBitsTexts


class WholeWords(OneOf):
    def fill_mask(self, mask: np.ndarray) -> bool:
        fresh = np.zeros_like(mask)
        super().fill_mask(fresh)
        words = self.vocabulary.size // 32
        mask[:words] = fresh[:words]
        return True


class WholeWordsTexts(CompiledTexts):
    grammar = WholeWords


@WRONG.add("Where the vocabulary is no multiple of 32, its last tokens are as the memory was: only whole words are written.")
class WritesWholeWords(SortedTexts):
    compiled = WholeWordsTexts


class ShortHistory(OneOf):
    def __init__(self, texts: list[bytes], vocabulary: Vocabulary) -> None:
        super().__init__(texts, vocabulary)
        self.earlier = deque(maxlen=64)


class ShortHistoryTexts(CompiledTexts):
    grammar = ShortHistory


@WRONG.add("A request with a long jump forward ends with an error: 64 tokens can be undone, not 512.")
class UndoesFew(SortedTexts):
    compiled = ShortHistoryTexts


class OneScratch(OneOf):
    def fill_mask(self, mask: np.ndarray) -> bool:
        scratch: np.ndarray = self.vocabulary.__dict__.setdefault("scratch", np.zeros(mask.size * 32, np.uint8))
        scratch[:] = 0
        for number in self.list_allowed():
            scratch[number] = 1
        mask[:] = np.packbits(scratch, bitorder="little").view(np.int32)[: mask.size]
        return True


class OneScratchTexts(CompiledTexts):
    grammar = OneScratch


@WRONG.add("Under load a request gets the mask of another one: threads fill their masks in one scratch array.")
class SharesScratch(SortedTexts):
    compiled = OneScratchTexts


@WRONG.add("Choices with letters that are not ASCII can never be written as they are: other letters are dropped.")
class DropsLetters(SortedTexts):
    def encode(self, text: str) -> bytes:
        return text.encode("ascii", "ignore") or b"?"


class NoSize(CompiledTexts):
    num_bytes = 0  # type: ignore[assignment]


@WRONG.add("The cache of grammars grows until the server is killed: a compiled grammar says that it takes no memory.")
class HidesSize(SortedTexts):
    compiled = NoSize


@WRONG.add("A list with a number in it is answered with an error of the server instead of 400: its entries are not checked.")
class TrustsEntries(SortedTexts):
    def read(self, source: str) -> list[str]:
        texts: list[str] = json.loads(source)
        return texts


class FinishesEarly(OneOf):
    def is_finished(self) -> bool:
        return b"" in self.list_open()


class FinishesEarlyTexts(CompiledTexts):
    grammar = FinishesEarly


@WRONG.add("Of `yes` and `yes, but`, only the shorter is ever returned: a grammar has finished as soon as one text is whole.")
class StopsAtFirst(SortedTexts):
    compiled = FinishesEarlyTexts


class EndlessEnds(OneOf):
    def list_allowed(self) -> set[int]:
        return super().list_allowed().union(self.vocabulary.ends if self.output else ())


class EndlessEndsTexts(CompiledTexts):
    grammar = EndlessEnds


@WRONG.add("The answer may be cut in the middle of a choice: an end token is allowed after the first token.")
class EndsAnywhere(SortedTexts):
    compiled = EndlessEndsTexts
