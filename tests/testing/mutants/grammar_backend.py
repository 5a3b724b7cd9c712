"""Grammar backends with one deliberate bug each. Used by the tests of the conformance suite.

They are derived from `llguidance`: each wraps its constraints or its sources.
"""

from __future__ import annotations

import json
import re
import threading
import time
import unicodedata
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from frame.core.interfaces.sampling import Grammar, GrammarCapabilities
from frame.plugins.grammar_backends.llguidance import LLGuidanceBackend
from tests.testing.mutants import MutantList, grammar_words

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import CompiledGrammar

KINDS = ("json_schema", "json_object", "regex", "ebnf", "choice")


class Constraint:
    """One request's constraint, as the library gives it (`Grammar`)."""

    def __init__(self, inner: Grammar, compiled: Compiled) -> None:
        self.inner, self.compiled = inner, compiled

    def fill_mask(self, mask: np.ndarray) -> bool:
        return self.inner.fill_mask(mask)

    def accept_token(self, token_id: int) -> bool:
        return self.inner.accept_token(token_id)

    def is_finished(self) -> bool:
        return self.inner.is_finished()

    def rollback_tokens(self, count: int) -> None:
        self.inner.rollback_tokens(count)


class Compiled:
    """A compiled grammar that starts a `Request` of the backend (`CompiledGrammar`)."""

    def __init__(self, inner: CompiledGrammar, backend: Wrapped) -> None:
        self.inner, self.backend = inner, backend
        self.share = 1  # of the memory that is counted

    @property
    def num_bytes(self) -> int:
        return self.share * self.inner.num_bytes

    def start(self) -> Grammar:
        return self.backend.Request(self.inner.start(), self)


class Wrapped(LLGuidanceBackend):
    """`llguidance`, wrapped."""

    Request: ClassVar[type[Constraint]] = Constraint

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(context, options)
        self.ends = list(context.tokenizer.eos_token_ids)

    def compile(self, kind: str, source: str) -> Any:
        return Compiled(super().compile(kind, source), self)


mutant = MUTANTS = MutantList("grammar_backend", reference=Wrapped, capabilities=GrammarCapabilities(KINDS))


def _set(mask: np.ndarray, tokens: list[int], value: bool) -> None:
    for token in tokens:
        bit = np.uint32(1 << (token % 32))
        words = mask.view(np.uint32)
        words[token // 32] = words[token // 32] | bit if value else words[token // 32] & ~bit


@mutant
class AllowsAll(Wrapped):
    """Never limits a token."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            return False


@mutant
class ShiftsTheMask(Wrapped):
    """Allows the token after the one that continues the text."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            mask[:] = np.packbits(np.roll(np.unpackbits(mask.view(np.uint8), bitorder="little"), 1), bitorder="little").view(np.int32)
            return found


@mutant
class AddsToTheMask(Wrapped):
    """Sets bits of allowed tokens, and leaves those that were set before."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            before = mask.copy()
            found = super().fill_mask(mask)
            mask |= before
            return found


@mutant
class WritesTheNextRow(Wrapped):
    """Writes one word more than the mask has."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            if isinstance(mask.base, np.ndarray) and mask.base.ndim == 2:
                mask.base[-1, 0] = 0
            return found


@mutant
class KeepsTheFirstMask(Wrapped):
    """Computes the mask once for each request."""

    class Request(Constraint):
        mask: np.ndarray | None = None

        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            if self.mask is None:
                self.mask = mask.copy()
            mask[:] = self.mask
            return found


@mutant
class HasNoEnd(Wrapped):
    """Never allows an end token."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            _set(mask, self.compiled.backend.ends, False)
            return found


@mutant
class HasOneEnd(Wrapped):
    """Allows the first end token alone, and not the others of the model."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            _set(mask, self.compiled.backend.ends[1:], False)
            return found


@mutant
class EndsAnywhere(Wrapped):
    """Always allows an end token."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            _set(mask, self.compiled.backend.ends, True)
            return found


@mutant
class AllowsPadding(Wrapped):
    """Allows the ids past the tokenizer's."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            mask[-1] = -1
            return found


@mutant
class AllowsSpecialTokens(Wrapped):
    """Takes special tokens for text."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            _set(mask, [3], True)
            return found


@mutant
class NeedsWholeCharacters(Wrapped):
    """Bans tokens that are a part of a character."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            whole = mask.copy()
            _set(whole, list(range(100, 262)), False)
            if whole.any():
                mask[:] = whole
            return found


@mutant
class AcceptsAll(Wrapped):
    """Accepts tokens that the mask does not have."""

    class Request(Constraint):
        def accept_token(self, token_id: int) -> bool:
            super().accept_token(token_id)
            return True


@mutant
class RefusesTheEnd(Wrapped):
    """Refuses the end token that its mask allows."""

    class Request(Constraint):
        def accept_token(self, token_id: int) -> bool:
            return token_id not in self.compiled.backend.ends and super().accept_token(token_id)


@mutant
class RefusesOnceMore(Wrapped):
    """Refuses all tokens after one that was refused."""

    class Request(Constraint):
        has_failed = False

        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            if self.has_failed:
                mask[:] = 0
            return found

        def accept_token(self, token_id: int) -> bool:
            self.has_failed |= not super().accept_token(token_id)
            return not self.has_failed


@mutant
class NeverFinishes(Wrapped):
    """Does not say that only an end token may follow."""

    class Request(Constraint):
        def is_finished(self) -> bool:
            return False


@mutant
class FinishesEarly(Wrapped):
    """Says that it is finished wherever the text may end."""

    class Request(Constraint):
        def is_finished(self) -> bool:
            mask = np.zeros(65, np.int32)
            super().fill_mask(mask)
            return super().is_finished() or bool(mask[0] >> 1 & 1)


@mutant
class RollsBackTooFew(Wrapped):
    """Undoes three tokens at most."""

    class Request(Constraint):
        def rollback_tokens(self, count: int) -> None:
            super().rollback_tokens(min(count, 3))


@mutant
class KeepsItsMask(Wrapped):
    """Keeps the mask that was computed before tokens were undone."""

    class Request(Constraint):
        kept: np.ndarray | None = None

        def fill_mask(self, mask: np.ndarray) -> bool:
            if self.kept is not None:
                mask[:] = self.kept
                return True
            found = super().fill_mask(mask)
            self.kept = mask.copy() if found else None
            return found

        def accept_token(self, token_id: int) -> bool:
            is_taken = super().accept_token(token_id)
            self.kept = None if is_taken else self.kept
            return is_taken


@mutant
class KeepsTheEnd(Wrapped):
    """Does not undo an end token."""

    class Request(Constraint):
        num_ends = 0

        def accept_token(self, token_id: int) -> bool:
            is_taken = super().accept_token(token_id)
            self.num_ends += is_taken and token_id in self.compiled.backend.ends
            return is_taken

        def rollback_tokens(self, count: int) -> None:
            super().rollback_tokens(max(0, count - self.num_ends))


@mutant
class SharesOneState(Wrapped):
    """Gives all requests of a grammar the same constraint."""

    def compile(self, kind: str, source: str) -> Any:
        compiled = super().compile(kind, source)
        first = compiled.start()
        compiled.start = lambda: first
        return compiled


class Caching(Wrapped):
    """Keeps compiled grammars by `key`."""

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(context, options)
        self.cache: dict[str, Any] = {}

    def compile(self, kind: str, source: str) -> Any:
        return self.cache.setdefault(self.key(kind, source), super().compile(kind, source))

    def key(self, kind: str, source: str) -> str:
        raise NotImplementedError


@mutant
class CachesByKind(Caching):
    """Keeps one compiled grammar for each kind."""

    def key(self, kind: str, source: str) -> str:
        return kind


@mutant
class CachesBySource(Caching):
    """Keeps compiled grammars by their source, whatever their kind."""

    def key(self, kind: str, source: str) -> str:
        return source


@mutant
class CachesByPrefix(Caching):
    """Keeps compiled grammars by the first 20 characters of their source."""

    def key(self, kind: str, source: str) -> str:
        return kind + source[:20]


@mutant
class LoadsTheLast(Wrapped):
    """Loads the grammar that was dumped last."""

    last: ClassVar[tuple[str, str]] = ("regex", "a")

    def compile(self, kind: str, source: str) -> Any:
        found = super().compile(kind, source)
        found.key = (kind, source)
        return found

    def dump(self, compiled: CompiledGrammar) -> bytes:
        type(self).last = compiled.key  # type: ignore[attr-defined]
        return b"x"

    def load(self, kind: str, source: str, data: bytes) -> Any:
        return super().compile(*self.last)


@mutant
class SharesABuffer(Wrapped):
    """Computes masks in one buffer of the grammar backend, which threads overwrite."""

    buffer: ClassVar[dict[int, np.ndarray]] = {}

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            buffer = SharesABuffer.buffer.setdefault(len(mask), np.zeros(len(mask), np.int32))
            found = super().fill_mask(buffer)
            time.sleep(1e-4)
            mask[:] = buffer
            return found


@mutant
class ForgetsAThread(Wrapped):
    """Works in the thread alone that made the backend."""

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(context, options)
        self.thread = threading.get_ident()

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            found = super().fill_mask(mask)
            return found and self.compiled.backend.thread == threading.get_ident()  # type: ignore[attr-defined]


@mutant
class AllowsInvalid(Wrapped):
    """Compiles an invalid grammar as free text."""

    def compile(self, kind: str, source: str) -> Any:
        try:
            return super().compile(kind, source)
        except ValueError:
            return super().compile("regex", "(.|\n)*")


@mutant
class RaisesAnotherError(Wrapped):
    """Raises the error of its library for an invalid grammar."""

    def compile(self, kind: str, source: str) -> Any:
        try:
            return super().compile(kind, source)
        except ValueError as error:
            raise RuntimeError(str(error)) from error


@mutant
class RaisesATrace(Wrapped):
    """Raises an error of many lines for an invalid grammar."""

    def compile(self, kind: str, source: str) -> Any:
        try:
            return super().compile(kind, source)
        except ValueError as error:
            raise ValueError(f"error:\n  in {source}\n{error}") from error


@mutant
class ChoicesAreExpressions(Wrapped):
    """Joins the choices to a regular expression without escaping them."""

    def compile(self, kind: str, source: str) -> Any:
        if kind == "choice":
            return super().compile("regex", "|".join(f"({text})" for text in json.loads(source)))
        return super().compile(kind, source)


@mutant
class SearchesExpressions(Wrapped):
    """Lets any text follow a regular expression, as a search does."""

    def compile(self, kind: str, source: str) -> Any:
        return super().compile(kind, f"({source})[a-z]*" if kind == "regex" else source)


class Changed(Wrapped):
    """Compiles another source."""

    change: Any

    def compile(self, kind: str, source: str) -> Any:
        return super().compile(kind, self.change(kind, source))


mutant.each(Changed, "change", *grammar_words.BUGS)


@mutant
class SharesABufferOfTheGrammar(Wrapped):
    """Computes masks in a buffer of the grammar, which requests of other threads overwrite."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            buffer = vars(self.compiled).setdefault("buffer", np.zeros_like(mask))
            found = super().fill_mask(buffer)
            mask[:] = buffer
            return found


@mutant
class AnyJsonIsAnObject(Wrapped):
    """Allows any JSON value where an object was asked for."""

    def compile(self, kind: str, source: str) -> Any:
        return super().compile("json_schema", "{}") if kind == "json_object" else super().compile(kind, source)


@mutant
class TakesTooLong(Wrapped):
    """Takes 30 ms for a mask."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            time.sleep(0.03)
            return super().fill_mask(mask)


@mutant
class HasNoSize(Wrapped):
    """Says that its grammars take no memory, so that none is evicted."""

    def compile(self, kind: str, source: str) -> Any:
        found = super().compile(kind, source)
        found.share = 0
        return found


MASKS: list[np.ndarray] = []


@mutant
class KeepsMasksInItsModule(Wrapped):
    """Keeps a copy of each mask in a list of its module."""

    class Request(Constraint):
        def fill_mask(self, mask: np.ndarray) -> bool:
            is_filled = super().fill_mask(mask)
            MASKS.append(mask.copy())
            return is_filled


@mutant
class ComposesCharacters(Wrapped):
    """Compiles a choice in the normal form of Unicode in which letters and accents are one."""

    def compile(self, kind: str, source: str) -> Any:
        if kind == "choice":
            source = json.dumps(json.loads(source, object_hook=dict), ensure_ascii=False)
        return super().compile(kind, unicodedata.normalize("NFC", source) if kind == "choice" else source)


@mutant
class TakesHalfCharacters(Wrapped):
    """Drops halves of characters from a choice, in place of an error."""

    def compile(self, kind: str, source: str) -> Any:
        return super().compile(kind, re.sub(r"\\ud[89a-f][0-9a-f]{2}", "", source) if kind == "choice" else source)


@mutant
class TakesEndsAnywhere(Wrapped):
    """Takes an end token where the mask has none."""

    class Request(Constraint):
        def accept_token(self, token_id: int) -> bool:
            return super().accept_token(token_id) or token_id in self.compiled.backend.ends


@mutant
class CountsNoBytes(Wrapped):
    """Says that each grammar takes 64 bytes."""

    def compile(self, kind: str, source: str) -> Any:
        compiled = super().compile(kind, source)
        compiled.share = 64 / max(1, compiled.inner.num_bytes)
        return compiled


@mutant
class KeepsGrammars(Wrapped):
    """Keeps all grammars that it has compiled."""

    def compile(self, kind: str, source: str) -> Any:
        self.kept = {**getattr(self, "kept", {}), (kind, source): super().compile(kind, source)}
        return self.kept[kind, source]
