"""Grammars by llguidance: JSON schema, any JSON object, regular expressions, EBNF (or its own Lark dialect), choices.

A grammar is compiled in a fraction of a millisecond and its masks are computed as it goes, each under the library's own limits of
work. Choices and plain regular expressions are automata of our own instead, whose masks are kept. Knows one tokenizer and one vocabulary.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from frame.core.interfaces.sampling import GrammarBackend
from frame.plugins.grammars import ebnf
from frame.plugins.grammars.automaton import AutomatonCompiled, Masks, Vocabulary
from frame.plugins.grammars.closed_schema import closed
from frame.plugins.grammars.options import GrammarOptions
from frame.plugins.grammars.regular import Language, Node
from frame.plugins.grammars.regular_syntax import NotReadError, literals, read
from frame.plugins.grammars.schema_language import read_schema
from frame.plugins.grammars.sources import check_source, one_sentence
from frame.plugins.grammars.states import TooMuchWorkError

if TYPE_CHECKING:
    from pydantic import BaseModel

_FORMATS = {"regex": "regex", "ebnf": "ebnf", "choice": "choice"}  # kind -> the library's name
MOST_THREADS = min(8, os.cpu_count() or 1)  # that make masks at a time
OWN = ("regex", "choice", "ebnf", "json_schema")  # kinds that may become automata of our own
# Of EBNF: taking a token in holds the interpreter's lock, and an ambiguous grammar's takes as long as the square of this. The library's own
# limit of 2000 stays for JSON schemas, of which an object with 300 optional properties has 1,200.
MOST_ITEMS = 256
QUICK = 5e-3  # seconds; a grammar that takes longer to parse is parsed once
_LIMITS = ("ParserTooComplex", "LexerTooComplex", "InternalError")


class LLGrammar:
    """One request's matcher (`Grammar`)."""

    def __init__(self, matcher: Any, stop_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stops = stop_token_ids
        self._is_ended = False

    def fill(self, mask: np.ndarray) -> bool:
        """See `Grammar.fill`; when the end was accepted everything is allowed. Raises ValueError when the library's limits are reached."""
        if self._is_ended:
            mask[...] = -1
            return False
        self._matcher.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)  # three times as quick as `mask.ctypes`
        self._check_limits()
        return True

    def accept(self, token_id: int) -> bool:
        if self._is_ended:
            return False
        if token_id in self._stops:
            self._is_ended = self._matcher.is_accepting()
            return self._is_ended
        is_taken = self._matcher.try_consume_tokens([token_id]) == 1
        if not is_taken:
            self._check_limits()
        return is_taken

    def is_finished(self) -> bool:
        return self._is_ended or self._matcher.is_stopped()

    def _check_limits(self) -> None:
        if self._matcher.is_stopped() and self._matcher.stop_reason() in _LIMITS:
            raise ValueError("the grammar takes more work for one token than the budget of its backend allows; simplify it")


class LLCompiled:
    """A compiled grammar (`CompiledGrammar`).

    Copies of a matcher share what was found out about the grammar, and a lock. So that several threads can make masks, requests get
    copies of several matchers in turn; further ones are made as they are needed, if that takes no longer than a step can wait.
    """

    def __init__(self, parse: Callable[[], Any], source: str, stop_token_ids: frozenset[int]) -> None:
        began = time.perf_counter()
        self._parse = parse
        self._matchers = [parse()]
        self._most = MOST_THREADS if time.perf_counter() - began < QUICK else 1
        self._turn = 0
        self._stops = stop_token_ids
        # the library does not say; lexer states come to tens of kilobytes
        self.num_bytes = 64 * len(source) + self._most * (64 << 10)

    @property
    def matcher(self) -> Any:
        """The first."""
        return self._matchers[0]

    def start(self) -> LLGrammar:
        turn = self._turn
        self._turn = (turn + 1) % self._most
        if turn == len(self._matchers):
            self._matchers.append(self._parse())
        return LLGrammar(self._matchers[turn].deep_copy(), self._stops)


class LLGuidanceBackend(GrammarBackend):
    """Compiles for one tokenizer: a `tokenizers.Tokenizer`, or what holds one as `backend`, with its `eos_token_ids`.

    Raises ValueError when the tokenizer cannot be read or is larger than the model's vocabulary.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, options: BaseModel | None = None) -> None:
        self._options = options if isinstance(options, GrammarOptions) else GrammarOptions()
        self._words = -(-vocab_size // 32)
        backend = getattr(tokenizer, "backend", tokenizer)
        stops = [int(token) for token in getattr(tokenizer, "eos_token_ids", ()) if token < vocab_size]
        self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=stops or None)
        self._stops = frozenset(self._tokenizer.eos_tokens)
        self._masks: Masks | None = None
        self._lock = threading.Lock()  # while those are made

    def compile(self, kind: str, source: str) -> LLCompiled | AutomatonCompiled:
        """See `GrammarBackend.compile`. Raises ValueError, one sentence, for a grammar that is too large or does not compile."""
        check_source(kind, source, self._options.max_source_chars, self._options.max_depth)
        if kind in OWN:
            try:
                return self._own(kind, source)
            except (NotReadError, TooMuchWorkError, RecursionError):
                pass  # the library knows more of the syntax, or says what is wrong with it
            except ValueError as error:
                raise ValueError(one_sentence(kind, str(error))) from error
        return self._by_library(kind, source)

    def _by_library(self, kind: str, source: str, lark: str = "") -> LLCompiled:
        try:
            translated = lark or self._translate(kind, source)
            compiled = LLCompiled(lambda: self._matcher(translated, kind == "ebnf"), source, self._stops)
        except Exception as error:  # the translation from EBNF raises whatever it meets
            raise ValueError(one_sentence(kind, str(error))) from error
        matcher = compiled.matcher
        if matcher.is_stopped() and not matcher.is_accepting():  # root ::= root
            raise ValueError(f"{kind} allows no text at all")
        return compiled

    def _matcher(self, translated: str, is_ebnf: bool) -> Any:
        """One that knows its first mask: its copies need not find it out."""
        limits = LLParserLimits(max_items_in_row=MOST_ITEMS if is_ebnf else None)
        matcher, first = LLMatcher(self._tokenizer, translated, log_level=0, limits=limits), np.zeros(self._words, np.int32)
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("<state>")[0])
        matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        return matcher

    def _own(self, kind: str, source: str) -> LLCompiled | AutomatonCompiled:
        language = Language()
        node: Node | None
        if kind == "ebnf":
            rules = ebnf.read(source)
            node = ebnf.regular(language, rules)
            if node is None:
                return self._by_library(kind, source, ebnf.to_lark(rules))
        elif kind == "regex":
            node = read(language, source)
        elif kind == "json_schema":
            node = read_schema(language, closed(json.loads(source)), self._options.max_whitespace if self._options.any_whitespace else 0)
        else:
            node = literals(language, json.loads(source))
        return AutomatonCompiled(language, node, self._loaded_masks(), lambda: self._by_library(kind, source).start())

    def _loaded_masks(self) -> Masks:
        with self._lock:
            if self._masks is None:
                tokenizer = self._tokenizer
                texts = [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
                self._masks = Masks(Vocabulary(texts, self._stops, tokenizer.tokenize_bytes))
            return self._masks

    def _translate(self, kind: str, source: str) -> str:
        if kind in ("json_schema", "json_object"):
            overrides: Any = {"whitespace_flexible": False}
            if self._options.any_whitespace:
                overrides = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{self._options.max_whitespace}}}"}
            schema = json.dumps(closed(json.loads(source))) if kind == "json_schema" else '{"type": "object"}'
            return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        if kind == "choice":
            return grammar_from("choice", json.dumps(json.loads(source), ensure_ascii=False))
        if kind in _FORMATS:
            return grammar_from(_FORMATS[kind], source)
        raise ValueError(f"grammar kind {kind!r} is unknown")
