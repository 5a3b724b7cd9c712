"""The grammar backend `llguidance`: JSON schema, JSON objects, regular expressions, EBNF, choices,
structural tags.

A grammar compiles in about a millisecond; masks are computed at run time, each under the library's
own work limits. Knows one tokenizer and one vocabulary.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from pydantic import BaseModel

from frame.core.interfaces.sampling import MAX_ROLLBACK, GrammarBackend, GrammarContext
from frame.plugins.grammar_backends import ebnf, structural_tags
from frame.plugins.grammar_backends.closed_schema import close_schema
from frame.plugins.grammar_backends.library_errors import WorkLimitError, explain_rejection, is_work_limit
from frame.plugins.grammar_backends.options import GrammarOptions
from frame.plugins.grammar_backends.sources import check_source, one_sentence
from frame.plugins.grammar_backends.states.shared_masks import Key, SharedMask, SharedMasks, State, TokenBytes, read_states

MAX_THREADS = 16  # that compute masks
NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MAX_MATCHERS = min(MAX_THREADS, NUM_CORES)  # of one grammar; as many threads compute its masks in parallel
# For EBNF: accepting a token holds the interpreter's lock, and the work for an ambiguous grammar
# grows with the square of this number. The library's own limit of 2000 stays for JSON schemas: an
# object with 300 optional properties needs 1,200.
MAX_EBNF_ITEMS = 256
QUICK = 5e-3  # seconds; a grammar that takes longer to parse gets one matcher, and its masks are measured
# The library's own limit of 250,000 allows 400 MB for one grammar.
MAX_LEXER_STATES = 50_000
# Masks create lexer states, which stay in the compiled grammar. The library counts the work of
# creating them (`lexer_cost`), 2 to 39 bytes of memory a unit, and has it in the text of an error.
BYTES_PER_COST = 32
_COST = re.compile(r'"lexer_cost": (\d+)')
MATCHER_BYTES = 384 << 10  # of a matcher that computes masks, beside its source and its states
READ_SECONDS = 1.0  # of masks of one request, after which the count is read: 2 us to 1 ms, by the size of the grammar
NO_ROLLBACK = 1 << 30  # tokens: an error
MAX_AHEAD = 256  # tokens that a matcher catches up with at once, in less than a millisecond
COPIES_PER_MATCHER = 4  # before there is a further matcher: parsing it takes as long as dozens of masks
# Requests of one grammar at a time, from which on its requests share masks. For fewer ones, states
# take the engine's thread longer than all masks take the library's threads.
SHARING_REQUESTS = max(2, NUM_CORES // 2)
SHARING_KINDS = ("json_schema", "regex", "choice", "structural_tag")  # whose states are known; see `states`
# Expressions: where a grammar allows all tokens of one, a mask takes them as a whole, and walks the
# other tokens byte by byte. The library's own list has `_TEXT` with 10, 30 and any number of
# characters. Strings near their `maxLength` need the short ones, expressions the letters.
_TEXT, _LETTERS, _WORD = r"[^\"\\\x00-\x1F\x7F]", "[a-z]", "[a-zA-Z0-9_-]"
_LENGTHS = ((_TEXT, (4, 7, 10, 14, 30)), (_LETTERS, (10, 20)), (_WORD, (10, 20)))
SLICES = [r"[\x20\x0A\x0D\x09]+", f"{_TEXT}+", *(f"{what}{{1,{maximum}}}" for what, lengths in _LENGTHS for maximum in lengths)]
_SEPARATORS = {"key_separator": ": ", "item_separator": ", "}  # in structural tags, as xgrammar writes JSON without free whitespace
_LIMITS = ("ParserTooComplex", "LexerTooComplex", "InternalError")
# ECMAScript and xgrammar define the shorthands over ASCII, the library over Unicode. It also gives
# `\\<` and `\\>` a meaning of its own.
_ASCII_ESCAPES = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]",
    "s": r"[\x20\t-\r]", "S": r"[^\x20\t-\r]", "<": "<", ">": ">",
}  # fmt: skip


class LLMaskBatch:
    """Computes masks in the library's threads (`MaskBatch`). `handles` are grammars. Outputs in one
    state get one mask."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(MAX_THREADS, NUM_CORES if NUM_CORES < 4 else NUM_CORES - 2)  # the engine's threads need cores
        self._executor: LLExecutor | None = None  # the process that compiles needs no threads

    def fill_masks(self, handles: Sequence[LLGrammar], rows: Sequence[int], masks: np.ndarray) -> None:
        """See `MaskBatch.fill_masks`."""
        firsts: dict[Key, tuple[LLGrammar, int]] = {}
        entries, others = [], []
        for grammar, row in zip(handles, rows, strict=True):
            if grammar.key is not None and firsts.setdefault(grammar.key, (grammar, row))[0] is not grammar:
                others.append((grammar, row))
            else:
                entries.append((grammar, row))
        self._compute(entries, masks)
        rest = []
        for grammar, row in others:
            assert grammar.key is not None
            first, first_row = firsts[grammar.key]
            # A matcher that stops at a limit leaves a mask with an end token alone.
            if first.matcher.is_stopped() or first.needs_own_mask(grammar, masks[first_row]):
                rest.append((grammar, row))
            else:
                masks[row] = masks[first_row]
        self._compute(rest, masks)

    def _compute(self, entries: list[tuple[LLGrammar, int]], masks: np.ndarray) -> None:
        if not entries:
            return
        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        # A thread gets neighbours: copies of one matcher, which share a lock.
        entries = sorted(entries, key=lambda entry: entry[0].origin)
        matchers = [(grammar.catch_up(), row) for grammar, row in entries]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.__array_interface__["data"][0], masks.strides[0], len(masks))


class LLGrammar:
    """One request's matcher (`BatchedGrammar`), a copy of matcher `number` of the compiled grammar.
    `origin`: the same for copies of one matcher.

    While the masks are known, the matcher gets no tokens: it catches up when it has to compute one.
    """

    def __init__(self, matcher: Any, number: int, compiled: LLCompiled) -> None:
        self.matcher = matcher.deep_copy()
        self.origin = id(matcher)
        self.batch = compiled.batch
        self._number = number
        self._compiled = compiled
        self._cost = compiled.cost  # of the library so far, of which the compiled grammar knows
        self._unread = 0.0  # seconds of masks since then
        self._is_ended = False
        self._shared = compiled.shared
        self._state: State | None = None
        self._last = -1  # token
        self._ahead: list[int] = []  # tokens that the matcher has not got
        # The states and tokens before: not pairs, which garbage collections would traverse.
        self._earlier: deque[State | None] = deque(maxlen=MAX_ROLLBACK)
        self._earlier_tokens: deque[int] = deque(maxlen=MAX_ROLLBACK)
        if self._shared is not None:
            self._state = self._shared.find_state(self._shared.root, -1)

    @property
    def key(self) -> Key | None:
        """The same for outputs with the same mask. None: not known."""
        return None if self._state is None else self._state.key

    @property
    def _mask(self) -> SharedMask | None:
        """The mask of the state, if it is known."""
        state = self._state
        if state is None or self._shared is None:
            return None
        return state.mask or self._shared.find_mask(state)  # another request may have added it

    def fill_mask(self, mask: np.ndarray) -> bool:
        """See `Grammar.fill_mask`. All tokens are allowed after the end token. Raises ValueError
        when the library's limits are reached."""
        if self.start_mask(mask) is None:
            return not self._is_ended
        began = time.perf_counter()  # an estimate is enough here, and a thread's clock takes a system call
        self.catch_up().unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)  # a third of the time of `mask.ctypes`
        seconds = time.perf_counter() - began
        self._compiled.num_quick += 1 if seconds < QUICK else -self._compiled.num_quick
        return self.finish_mask(mask, seconds)

    def start_mask(self, mask: np.ndarray) -> LLGrammar | None:
        """See `BatchedGrammar.start_mask`."""
        if self._is_ended:
            mask[...] = -1
            return None
        known = self._mask
        if known is None:
            return self
        known.write(mask)
        return None

    def finish_mask(self, mask: np.ndarray, seconds: float) -> bool:
        """See `BatchedGrammar.finish_mask`."""
        self._unread += seconds
        if self._unread > READ_SECONDS:
            self._count_states(self.matcher.deep_copy())
        self._check_limits()
        if self._state is not None and self._shared is not None:
            if not self._ahead:  # else the mask was computed by another request
                self._shared.put(self._state.key, self._last, mask, self.matcher.is_accepting(), self.matcher.is_stopped())
            self._state = self._shared.find_state(self._state.node, self._last)
        return True

    def catch_up(self) -> Any:
        """Give the matcher the tokens that it has not got. Returns it."""
        if self._ahead:
            tokens, self._ahead = self._ahead, []
            if self.matcher.try_consume_tokens(tokens) != len(tokens):
                self._check_rejection()
                raise RuntimeError("llguidance rejects tokens of a mask of the same grammar")
        return self.matcher

    @property
    def num_measured(self) -> int:
        """See `BatchedGrammar`."""
        return 0 if self._shared is None else self._compiled.num_quick

    def needs_own_mask(self, other: LLGrammar, mask: np.ndarray) -> bool:
        """Whether the mask of this output is not that of another one with the same `key`."""
        return self._last != other._last and self._shared is not None and self._shared.is_forced(mask)

    def __del__(self) -> None:
        if self._unread:
            self._count_states(self.matcher)
        self._compiled.release_matcher(self._number)

    def _count_states(self, matcher: Any) -> None:
        """Add the states that this request's masks created. `matcher` is not used after."""
        cost = read_cost(matcher)
        self._compiled.add_bytes(BYTES_PER_COST * (cost - self._cost))
        self._cost, self._unread = cost, 0.0

    def accept_token(self, token_id: int) -> bool:
        if self._is_ended:
            return False
        mask = self._mask
        if token_id in self._compiled.stop_token_ids:
            self._is_ended = self.catch_up().is_accepting() if mask is None else mask.is_accepting
            return self._is_ended
        if mask is not None and len(self._ahead) < MAX_AHEAD and mask.allows(token_id):
            self._ahead.append(token_id)
        elif self.catch_up().try_consume_tokens([token_id]) != 1:
            self._check_rejection()
            return False
        if self._shared is not None:
            self._earlier.append(self._state)
            self._earlier_tokens.append(self._last)
            self._set_state(None if self._state is None else self._shared.follow(self._state, token_id), token_id)
        return True

    def advance_token(self, token_id: int) -> SharedMask | None:
        """See `frame.interfaces.known_masks`."""
        state, shared = self._state, self._shared  # written out: calls would take as long as all of it
        if state is None or shared is None or (mask := state.mask) is None or self._is_ended or len(self._ahead) >= MAX_AHEAD:
            return None
        if token_id in self._compiled.stop_token_ids or not mask.allows(token_id):
            return None
        lengths = state.lengths
        if lengths is None or not 0 < (length := lengths[token_id]) <= state.max_length:
            after = state.followers.get(token_id)
        else:
            after = state.followers.get(-length)
        if after is None or after.mask is None:
            after = shared.follow(state, token_id)
        else:
            shared.num_followed += 1
        if after is None or (known := after.mask) is None or known.is_finished:
            shared.num_followed -= 1  # `accept_token` follows too
            return None
        self._ahead.append(token_id)
        self._earlier.append(state)
        self._earlier_tokens.append(self._last)
        self._state, self._last = after, token_id
        return known

    def _set_state(self, state: State | None, last: int) -> None:
        self._state, self._last = state, last
        if state is None:
            self.catch_up()

    def is_finished(self) -> bool:
        if self._is_ended or (self._state is not None and not self._state.node.is_nullable):
            return self._is_ended
        if (mask := self._mask) is not None:
            return mask.is_finished
        return bool(self.catch_up().is_stopped())

    def rollback_tokens(self, count: int) -> None:
        if count and self._is_ended:  # the matcher has not consumed the end token
            self._is_ended = False
            count -= 1
        num_ahead = min(count, len(self._ahead))
        del self._ahead[len(self._ahead) - num_ahead :]
        if count > num_ahead:
            self.matcher.rollback(count - num_ahead)
        if count and self._earlier:
            state, last = self._earlier[-count], self._earlier_tokens[-count]
            for _ in range(count):
                self._earlier.pop()
                self._earlier_tokens.pop()
            self._set_state(state, last)

    def _check_rejection(self) -> None:
        """Raise ValueError if the library has rejected tokens at its limits. Where another request
        has reached them, it says so for the next mask alone."""
        if not self.matcher.is_stopped():
            self.matcher.compute_bitmask()
        self._check_limits()

    def _check_limits(self) -> None:
        if self.matcher.is_stopped() and self.matcher.stop_reason() in _LIMITS:
            self._compiled.add_bytes(MAX_LEXER_STATES * 2048)  # copies share the states: the next request compiles it again
            raise ValueError("the grammar takes more work for one token than the budget of its backend allows; simplify it")


class LLCompiled:
    """A compiled grammar (`CompiledGrammar`).

    Copies of a matcher share cached states and a lock. So that several threads can compute masks,
    requests that run at a time get copies of several matchers. A further one is created while each
    has `COPIES_PER_MATCHER` requests, if parsing takes no longer than a step can wait.
    """

    def __init__(
        self, parse: Callable[[], Any], source: str, stop_token_ids: frozenset[int], batch: LLMaskBatch, threads: int | None = None
    ) -> None:
        self.batch = batch
        self.shared: SharedMasks | None = None
        self.read_states: Callable[[], SharedMasks | None] | None = None  # for requests that share masks; None: it was called
        began = time.perf_counter()
        self._parse = parse
        self._matchers = [parse()]
        self.cost = read_cost(self.matcher.deep_copy())
        self._maximum = (threads or MAX_MATCHERS) if time.perf_counter() - began < QUICK else 1
        self._sharing_requests = SHARING_REQUESTS if threads is None else max(2, threads // 2)
        self._num_copies = [0]  # of each matcher, with requests
        self.num_quick = 0  # masks that took less than `QUICK`, since the last that took more
        self.stop_token_ids = stop_token_ids
        self._matcher_bytes = 64 * len(source) + BYTES_PER_COST * self.cost + MATCHER_BYTES
        self.num_bytes = self._matcher_bytes  # an estimate; grows with the states that masks create
        # guards `num_bytes` and `_num_copies`: requests end, and masks are computed, in several
        # threads; a collection may end requests while this thread holds it
        self._lock = threading.RLock()

    @property
    def matcher(self) -> Any:
        """The first matcher."""
        return self._matchers[0]

    def start(self) -> LLGrammar:
        if self.read_states is not None and sum(self._num_copies) + 1 >= self._sharing_requests:
            self.shared, self.read_states = self.read_states(), None
        elif self.shared is not None and not self.shared.is_usable:
            self.shared = None
        with self._lock:
            number = self._num_copies.index(min(self._num_copies))
            if self._num_copies[number] >= COPIES_PER_MATCHER and len(self._matchers) < self._maximum:
                number = len(self._matchers)
                self._matchers.append(self._parse())
                self._num_copies.append(0)
                self.num_bytes += self._matcher_bytes
            self._num_copies[number] += 1
        return LLGrammar(self._matchers[number], number, self)

    def release_matcher(self, number: int) -> None:
        """Note the end of a request with a copy of this matcher."""
        with self._lock:
            self._num_copies[number] -= 1

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self.num_bytes += count


class LLGuidanceBackend(GrammarBackend):
    """Compiles for one tokenizer: a `tokenizers.Tokenizer`, or an object that holds one as
    `backend`, with its `eos_token_ids`.

    Raises ValueError when the tokenizer cannot be read or is larger than the model's vocabulary.
    """

    def __init__(self, context: GrammarContext, options: BaseModel | None = None) -> None:
        self._options = options if isinstance(options, GrammarOptions) else GrammarOptions()
        tokenizer, vocab_size = context.tokenizer, context.vocab_size
        self._words = -(-vocab_size // 32)
        backend = getattr(tokenizer, "backend", tokenizer)
        stops = [int(token) for token in getattr(tokenizer, "eos_token_ids", ()) if token < vocab_size]
        self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=stops or None, slices=SLICES)
        self._stops = frozenset(self._tokenizer.eos_tokens)
        added = backend.get_added_tokens_decoder()
        # The library has more special tokens than the tokenizer, such as Qwen3's `</think>`.
        special = (number for number, token in added.items() if token.special or self._tokenizer.is_special_token(number))
        self._special_ids = {added[number].content: number for number in special}
        self._threads = context.threads
        self._batch = LLMaskBatch(context.threads)
        self._vocabulary, self._tokens = backend, cast("TokenBytes | None", None)

    def compile(self, kind: str, source: str) -> LLCompiled:
        """See `GrammarBackend.compile`. Raises ValueError, one sentence, for a grammar that is too
        large or does not compile."""
        check_source(kind, source, self._options.max_source_chars, self._options.max_depth)
        if self._tokens is None:
            self._tokens = TokenBytes(self._tokenizer, self._vocabulary.get_vocab(), self._special_ids, 32 * self._words)
        try:
            translated = self._translate(kind, source)
            has_ebnf = kind == "ebnf" or (kind == "structural_tag" and '"grammar"' in source)
            compiled = LLCompiled(lambda: self._make_matcher(translated, has_ebnf), source, self._stops, self._batch, self._threads)
            compiled.read_states = partial(self._read_states, kind, source, compiled.add_bytes)
        except Exception as error:  # the library's translation from EBNF raises many types
            if is_work_limit(str(error)):
                raise WorkLimitError(f"{kind} takes more work than its backend allows; shorten it") from error
            raise ValueError(one_sentence(kind, explain_rejection(str(error)))) from error
        matcher = compiled.matcher
        if matcher.is_stopped() and not matcher.is_accepting():  # root ::= root
            raise ValueError(f"{kind} allows no text at all")
        return compiled

    def _read_states(self, kind: str, source: str, add_bytes: Callable[[int], None]) -> SharedMasks | None:
        if kind not in SHARING_KINDS or self._options.any_whitespace:
            return None
        assert self._tokens is not None, "see `compile`"
        read: Callable[[str], Any] = str if kind == "regex" else json.loads
        form = read(source)
        if kind == "json_schema":
            form = close_schema(form)
        return read_states(kind, form["format"] if kind == "structural_tag" else form, self._tokens, add_bytes)

    def _make_matcher(self, translated: str, has_ebnf: bool) -> Any:
        """A matcher whose first mask is computed, so that its copies need not compute it."""
        limits = LLParserLimits(max_items_in_row=MAX_EBNF_ITEMS if has_ebnf else None, max_lexer_states=MAX_LEXER_STATES)
        matcher, first = LLMatcher(self._tokenizer, translated, log_level=0, limits=limits), np.zeros(self._words, np.int32)
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("<state>")[0])
        matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        return matcher

    def _translate(self, kind: str, source: str) -> str:
        """The source in the library's own format."""
        if kind in ("json_schema", "json_object"):
            schema = json.dumps(close_schema(json.loads(source))) if kind == "json_schema" else '{"type": "object"}'
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=self._whitespace()))
        if kind == "structural_tag":
            return structural_tags.to_lark(source, self._special_ids, self._write_schema)
        if kind == "choice":
            return str(grammar_from("choice", json.dumps(json.loads(source), ensure_ascii=False)))
        if kind == "regex":
            return str(grammar_from("regex", with_ascii_escapes(source)))
        if kind == "ebnf":
            try:
                return ebnf.to_lark(ebnf.read(source))
            except (ebnf.UnsupportedSyntaxError, RecursionError):
                return str(grammar_from("ebnf", source))  # the library supports more syntax, or says what is wrong
        raise ValueError(f"grammar kind {kind!r} is unknown")

    def _whitespace(self, limit: int | None = None) -> dict[str, Any]:
        """The library's settings for whitespace between the parts of JSON; `limit` characters in
        one place, by default those of the options."""
        if limit is None and self._options.any_whitespace:
            limit = self._options.max_whitespace
        return {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{limit}}}"} if limit else {"whitespace_flexible": False}

    def _write_schema(self, schema: Any, max_whitespace: int | None, pattern: str | None) -> str:
        if not isinstance(schema, dict):
            raise ValueError("json_schema must be an object")
        spaces = self._whitespace(max_whitespace) if pattern is None else {"whitespace_pattern": with_ascii_escapes(pattern)}
        if not spaces.get("whitespace_flexible", True):
            spaces |= _SEPARATORS
        return json.dumps({**close_schema(schema), "x-guidance": spaces})


def read_cost(matcher: Any) -> int:
    """The library's count of the work on lexer states of a matcher, which has an error after."""
    matcher.rollback(NO_ROLLBACK)
    match = _COST.search(matcher.get_error())
    return 0 if match is None else int(match[1])


def with_ascii_escapes(pattern: str) -> str:
    """The expression with `\\d`, `\\w`, `\\s` and their complements written as ASCII classes,
    inside classes too."""
    return re.sub(r"\\(.)", lambda match: _ASCII_ESCAPES.get(match[1], match[0]), pattern, flags=re.DOTALL)
