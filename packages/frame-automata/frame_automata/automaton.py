"""Token masks of regular languages: a state's mask is computed once for all requests of a grammar,
and cached.

Text that a state forces is returned in the tokens that the tokenizer would produce. Used by the
backend. Knows one vocabulary.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from frame.core.interfaces.sampling import MAX_ROLLBACK
from frame.plugins.grammar_backends.states.regular import Language, Node, form_of, rebuild
from frame_automata.mask_cache import Costs, LruCache, Mask
from frame_automata.states import Repetitions, States, TooMuchWorkError, is_run, only_byte
from frame_automata.vocabulary_tree import NOT_AT_ALL, VocabularyTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frame.core.interfaces.sampling import Grammar

MAX_FORCED_BYTES = 64
MIN_RUN = 4  # repetitions; a shorter run does not pay for a pass over the whole vocabulary
MAX_RUNS = 16  # kinds of runs that are cached; a megabyte each for 128,000 tokens
MAX_RECENT = 1024  # masks found without a lock
MAX_PARALLEL_COUNTS = 16  # of one state
WARMUP_TEXTS = 4  # random texts whose masks are computed at compile time
WARMUP_BYTES = 400
WARMUP_SECONDS = 0.015  # of CPU
ENDS = sum(1 << byte for byte in b'"]},:')  # bytes that end a JSON value or name
CACHE_BYTES = 48 << 20  # of masks, and as much of costs


class Vocabulary:
    """The tokens of a tokenizer. `tokenize` splits bytes as the tokenizer does; `stops` are the end
    tokens."""

    def __init__(self, texts: Sequence[bytes], stops: frozenset[int], tokenize: Callable[[bytes], list[int]]) -> None:
        self.tree = VocabularyTree(texts)
        self.stops = stops
        self.tokenize = tokenize
        self.repetitions = Repetitions.none(self.tree.num_nodes)
        self._lock = threading.Lock()

    def prepare(self, node: Node) -> None:
        """Compute what the masks of a language need of the vocabulary, once for each kind of
        run."""
        seen, waiting = {node}, [node]
        while waiting:
            each = waiting.pop()
            if is_run(each) and (each.maximum is None or each.maximum >= MIN_RUN):
                self._learn(each.parts[0])
            waiting += [part for part in each.parts if part not in seen]
            seen.update(each.parts)

    def _learn(self, part: Node) -> None:
        form = form_of(part)
        if form in self.repetitions.rows:
            return
        needs, alone, language = None, None, Language()
        with suppress(TooMuchWorkError):
            table, nodes = States(language).table(language.repeat(rebuild(language, part), 0, None))
            if not any(node.is_nullable for node in nodes[2:]):  # the end of a repetition must be unambiguous
                needs, alone = self.tree.repetitions(table), self.tree.costs_alone(table)
        with self._lock:
            known = self.repetitions if len(self.repetitions.rows) < MAX_RUNS else Repetitions.none(self.tree.num_nodes)
            self.repetitions = known.plus(form, needs, alone)


class Masks:
    """LRU cache of masks by state, limited in bytes."""

    def __init__(self, vocabulary: Vocabulary, limit: int = CACHE_BYTES) -> None:
        self.vocabulary = vocabulary
        self._cache: LruCache[Node, Mask] = LruCache(limit)
        self._costs: LruCache[tuple[Node, Node], Costs] = LruCache(limit)
        self._recent: dict[Node, Mask] = {}  # by node, without order and lock

    def get_mask(self, states: States, node: Node) -> Mask:
        """Return the allowed tokens of a state. Raises ValueError if there is none,
        TooMuchWorkError if the mask needs too much work."""
        found = self._recent.get(node)
        if found is None:
            check_width(node)
            states.language.forget()
            state = states.language.clamp(node, self.vocabulary.tree.max_length)
            found = self._cache.get(state)
            if found is None:
                found = self._make(states, state)
                self._cache.put(state, found)
            if len(self._recent) > MAX_RECENT:
                self._recent.clear()
            self._recent[node] = found
        return found

    def _make(self, states: States, state: Node) -> Mask:
        token = self._forced(states.language, state)
        if token is not None:
            return Mask(np.array([1 << token % 32], np.uint32).view(np.int32), np.array([token // 32]))
        repeat, after = state.parts if state.kind == "cat" else (state, states.language.empty)
        costs = self._costs_of(states, repeat, after)
        if costs is not None:
            found = costs.mask(repeat.maximum or 0)
        else:
            also = [*self.vocabulary.stops] if state.is_nullable else []
            with states.lock:
                found = Mask.of(self.vocabulary.tree.mask(states.begin(state, self.vocabulary.repetitions), states, also))
        if not found.words.any():
            raise ValueError("no token of the vocabulary continues the text as the grammar requires")
        return found

    def _costs_of(self, states: States, repeat: Node, after: Node) -> Costs | None:
        """For a state that may repeat something a limited number of times: how many repetitions
        each token takes. Computed once for all such limits. None: not such a state."""
        if not is_run(repeat) or repeat.minimum or repeat.maximum is None:
            return None
        (part,), known = repeat.parts, self.vocabulary.repetitions
        alone = known.alone[known.row(states.language, part)]
        if alone is None or part.first & after.first:
            return None
        found = self._costs.get((part, after))
        if found is None:
            first = np.unpackbits(np.frombuffer(part.first.to_bytes(32, "little"), np.uint8), bitorder="little").view(np.bool_)
            tree, endless = self.vocabulary.tree, states.language.cat(states.language.repeat(part, 0, None), after)
            costs = np.full(32 * tree.words, NOT_AT_ALL, np.uint8)
            with states.lock:
                costs[: len(alone)] = tree.costs(states.begin(endless, known), states, first, alone)
            costs[[*self.vocabulary.stops]] = 0 if after.is_nullable else NOT_AT_ALL
            found = Costs.of(costs)
            self._costs.put((part, after), found)
        return found

    def _forced(self, language: Language, state: Node) -> int | None:
        """The first token of the forced text, if the tokenizer would not join it with the text
        after it."""
        text = bytearray()
        while len(text) < MAX_FORCED_BYTES and not state.is_nullable:
            byte = only_byte(state)
            if byte is None:
                break
            text.append(byte)
            state = language.derive(state, byte)
        if len(text) < 2:
            return None
        tokens = self.vocabulary.tokenize(bytes(text))
        texts = self.vocabulary.tree.texts
        if len(tokens) < 2 and state is not language.empty:  # the last token may be longer
            return None
        return tokens[0] if tokens and b"".join(texts[token] for token in tokens) == text else None


class AutomatonGrammar:
    """One request's state in a regular language (`Grammar`). If a mask needs too much work, the
    fallback grammar takes over."""

    def __init__(self, compiled: AutomatonCompiled) -> None:
        self._compiled = compiled
        self._tokens: list[int] = []
        self._fallback_grammar: Grammar | None = None
        self._language = compiled.language
        self._node = compiled.node
        self._earlier: deque[Node] = deque(maxlen=MAX_ROLLBACK)
        self._masks = compiled.masks
        self._is_ended = False

    def fill_mask(self, mask: np.ndarray) -> bool:
        """See `Grammar.fill_mask`. All tokens are allowed after the end token."""
        if self._fallback_grammar is not None:
            return self._fallback_grammar.fill_mask(mask)
        if self._is_ended:
            mask[...] = -1
            return False
        try:
            self._masks.get_mask(self._compiled.states, self._node).write(mask)
        except TooMuchWorkError:
            self._compiled.is_too_large = True
            self._fallback_grammar = self._compiled.start_fallback()
            if not all(self._fallback_grammar.accept_token(token) for token in self._tokens):
                raise
            return self._fallback_grammar.fill_mask(mask)
        return True

    def accept_token(self, token_id: int) -> bool:
        if self._fallback_grammar is not None:
            return self._fallback_grammar.accept_token(token_id)
        if self._is_ended:
            return False
        vocabulary = self._masks.vocabulary
        if token_id in vocabulary.stops:
            self._is_ended = self._node.is_nullable
            return self._is_ended
        text = vocabulary.tree.texts[token_id]
        node = self._compiled.states.follow(self._node, text)
        if node is self._language.none or not text:
            return False
        self._earlier.append(self._node)
        self._node = node
        self._tokens.append(token_id)
        return True

    def is_finished(self) -> bool:
        if self._fallback_grammar is not None:
            return self._fallback_grammar.is_finished()
        return self._is_ended or self._node is self._language.empty

    def rollback_tokens(self, count: int) -> None:
        if self._fallback_grammar is not None:
            self._fallback_grammar.rollback_tokens(count)
            return
        if count and self._is_ended:
            self._is_ended = False
            count -= 1
        for _ in range(count):
            self._node = self._earlier.pop()
            self._tokens.pop()


class AutomatonCompiled:
    """A compiled regular language (`CompiledGrammar`). `start_fallback` starts the same grammar
    with another backend, for masks that need too much work. Raises ValueError if the language is
    empty, TooMuchWorkError if its first mask needs too much work."""

    def __init__(self, language: Language, node: Node, masks: Masks, start_fallback: Callable[[], Grammar]) -> None:
        if node is language.none:
            raise ValueError("the grammar allows no text at all")
        self.language = language
        self.states = States(language)
        self.node = node
        self.masks = masks
        self.start_fallback = start_fallback
        self.is_too_large = False  # whether a mask needed too much work
        self.num_bytes = 2 << 20  # an estimate of the states; the backend owns the masks
        masks.vocabulary.prepare(node)
        masks.get_mask(self.states, node)
        self._warm_up()

    def start(self) -> Grammar:
        return self.start_fallback() if self.is_too_large else AutomatonGrammar(self)

    def _warm_up(self) -> None:
        """Compute the masks along a few random texts, while no step waits for them."""
        numbers, texts = random.Random(0), self.masks.vocabulary.tree.texts
        began = time.thread_time()
        try:
            for _ in range(WARMUP_TEXTS):
                node = self.node
                for token in self.masks.vocabulary.tokenize(draw_text(numbers, self.language, node)):
                    if time.thread_time() - began > WARMUP_SECONDS or node is self.language.none:
                        return
                    self.masks.get_mask(self.states, node)
                    node = self.states.follow(node, texts[token])
        except TooMuchWorkError:
            self.is_too_large = True
        except ValueError:  # no token continues the text; the request that gets there reports it
            pass


def check_width(node: Node) -> None:
    """Raise TooMuchWorkError for a state with many counts in parallel: each byte leads to a new
    state."""
    parts = node.parts if node.kind == "alt" else (node.parts[0].parts if node.kind == "cat" and node.parts[0].kind == "alt" else ())
    if sum((part.parts[0] if part.kind == "cat" else part).kind == "repeat" for part in parts) > MAX_PARALLEL_COUNTS:
        raise TooMuchWorkError("the grammar has too many counts side by side; simplify it")


def draw_text(numbers: random.Random, language: Language, node: Node) -> bytes:
    """Draw a random prefix of a text; JSON values in it end early."""
    found = bytearray()
    while len(found) < WARMUP_BYTES and node.first:
        members = node.first & ENDS if node.first & ENDS and numbers.random() < 0.5 else node.first
        bytes_ = [byte for byte in range(256) if members >> byte & 1]
        found.append(numbers.choice(bytes_))
        node = language.derive(node, found[-1])
    return bytes(found)
