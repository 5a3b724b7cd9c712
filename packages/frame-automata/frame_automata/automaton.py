"""Grammars of regular languages as automata of our own: a state's mask is made once, for all requests of a grammar, and kept.

A text that a state leaves no choice about is given in the tokenizer's own tokens. Knows one vocabulary.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from frame_automata.kept import Costs, Kept, Mask
from frame_automata.regular import Language, Node, form_of, rebuilt
from frame_automata.states import Repetitions, States, TooMuchWorkError, is_run, only_byte
from frame_automata.vocabulary_tree import NOT_AT_ALL, VocabularyTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frame.core.interfaces.sampling import Grammar

MOST_FORCED = 64  # bytes
LEAST_RUN = 4  # repetitions that are worth a look at the whole vocabulary
MOST_RUNS = 16  # that are kept; a megabyte each for 128,000 tokens
MOST_RECENT = 1024  # masks
MOST_WIDE = 16  # repetitions that a state may be in at a time
REHEARSALS = 4  # texts
REHEARSED_BYTES = 400
REHEARSED_SECONDS = 0.015  # of CPU
ENDS = sum(1 << byte for byte in b'"]},:')  # bytes that end a part of JSON
KEPT_BYTES = 48 << 20  # of masks, and of costs


class Vocabulary:
    """A tokenizer's tokens. `tokenize` splits bytes as the tokenizer would; `stops` end a text."""

    def __init__(self, texts: Sequence[bytes], stops: frozenset[int], tokenize: Callable[[bytes], list[int]]) -> None:
        self.tree = VocabularyTree(texts)
        self.stops = stops
        self.tokenize = tokenize
        self.repetitions = Repetitions.none(self.tree.num_nodes)
        self._lock = threading.Lock()

    def prepare(self, node: Node) -> None:
        """Find out what masks of a language will need, but for its states."""
        seen, waiting = {node}, [node]
        while waiting:
            each = waiting.pop()
            if is_run(each) and (each.most is None or each.most >= LEAST_RUN):
                self._learn(each.parts[0])
            waiting += [part for part in each.parts if part not in seen]
            seen.update(each.parts)

    def _learn(self, part: Node) -> None:
        form = form_of(part)
        if form in self.repetitions.rows:
            return
        needs, alone, language = None, None, Language()
        with suppress(TooMuchWorkError):
            table, nodes = States(language).table(language.repeat(rebuilt(language, part), 0, None))
            if not any(node.is_nullable for node in nodes[2:]):  # a part's end must be certain where it comes
                needs, alone = self.tree.repetitions(table), self.tree.costs_alone(table)
        with self._lock:
            known = self.repetitions if len(self.repetitions.rows) < MOST_RUNS else Repetitions.none(self.tree.num_nodes)
            self.repetitions = known.plus(form, needs, alone)


class Masks:
    """Masks by state, the latest that were used, up to a number of bytes."""

    def __init__(self, vocabulary: Vocabulary, limit: int = KEPT_BYTES) -> None:
        self.vocabulary = vocabulary
        self._kept: Kept[Node, Mask] = Kept(limit)
        self._costs: Kept[tuple[Node, Node], Costs] = Kept(limit)
        self._recent: dict[Node, Mask] = {}  # by nodes as they are, where there is neither order nor lock

    def of(self, states: States, node: Node) -> Mask:
        """The allowed tokens. Raises ValueError where there are none, or they take too much work."""
        found = self._recent.get(node)
        if found is None:
            check_width(node)
            states.language.forget()
            state = states.language.clamp(node, self.vocabulary.tree.longest)
            found = self._kept.get(state)
            if found is None:
                found = self._make(states, state)
                self._kept.put(state, found)
            if len(self._recent) > MOST_RECENT:
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
            found = costs.mask(repeat.most or 0)
        else:
            also = [*self.vocabulary.stops] if state.is_nullable else []
            with states.lock:
                found = Mask.of(self.vocabulary.tree.mask(states.begin(state, self.vocabulary.repetitions), states, also))
        if not found.words.any():
            raise ValueError("no token of the vocabulary continues the text as the grammar wants it")
        return found

    def _costs_of(self, states: States, repeat: Node, after: Node) -> Costs | None:
        """Where a state may repeat something so many times before it goes on otherwise: what each token takes of that. It is found out
        once for all such numbers. None elsewhere."""
        if not is_run(repeat) or repeat.least or repeat.most is None:
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
        """The first token of the text that must follow, where the tokenizer would not join it with what comes after."""
        text = bytearray()
        while len(text) < MOST_FORCED and not state.is_nullable:
            byte = only_byte(state)
            if byte is None:
                break
            text.append(byte)
            state = language.derive(state, byte)
        if len(text) < 2:
            return None
        tokens = self.vocabulary.tokenize(bytes(text))
        texts = self.vocabulary.tree.texts
        if len(tokens) < 2 and state is not language.empty:  # the last may go on
            return None
        return tokens[0] if tokens and b"".join(texts[token] for token in tokens) == text else None


class AutomatonGrammar:
    """One request's place in a regular language (`Grammar`). Where a mask is too much work another grammar takes over."""

    def __init__(self, compiled: AutomatonCompiled) -> None:
        self._compiled = compiled
        self._tokens: list[int] = []
        self._other: Grammar | None = None
        self._language = compiled.language
        self._node = compiled.node
        self._masks = compiled.masks
        self._is_ended = False

    def fill(self, mask: np.ndarray) -> bool:
        """See `Grammar.fill`; when the end was accepted everything is allowed."""
        if self._other is not None:
            return self._other.fill(mask)
        if self._is_ended:
            mask[...] = -1
            return False
        try:
            self._masks.of(self._compiled.states, self._node).write(mask)
        except TooMuchWorkError:
            self._compiled.is_hard = True
            self._other = self._compiled.otherwise()
            if not all(self._other.accept(token) for token in self._tokens):
                raise
            return self._other.fill(mask)
        return True

    def accept(self, token_id: int) -> bool:
        if self._other is not None:
            return self._other.accept(token_id)
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
        self._node = node
        self._tokens.append(token_id)
        return True

    def is_finished(self) -> bool:
        if self._other is not None:
            return self._other.is_finished()
        return self._is_ended or self._node is self._language.empty


class AutomatonCompiled:
    """A regular language, ready for any number of requests (`CompiledGrammar`). `otherwise` starts the same grammar by other means, for
    masks that are too much work. Raises ValueError when the language has no text, TooMuchWorkError when its first mask is too much."""

    def __init__(self, language: Language, node: Node, masks: Masks, otherwise: Callable[[], Grammar]) -> None:
        if node is language.none:
            raise ValueError("the grammar allows no text at all")
        self.language = language
        self.states = States(language)
        self.node = node
        self.masks = masks
        self.otherwise = otherwise
        self.is_hard = False  # whether a mask of it was too much work
        self.num_bytes = 2 << 20  # a guess: what states take; masks are the backend's
        masks.vocabulary.prepare(node)
        masks.of(self.states, node)
        self._rehearse()

    def start(self) -> Grammar:
        return self.otherwise() if self.is_hard else AutomatonGrammar(self)

    def _rehearse(self) -> None:
        """Make the masks that some short texts need, while no step waits for them."""
        numbers, texts = random.Random(0), self.masks.vocabulary.tree.texts
        began = time.thread_time()
        try:
            for _ in range(REHEARSALS):
                node = self.node
                for token in self.masks.vocabulary.tokenize(some_text(numbers, self.language, node)):
                    if time.thread_time() - began > REHEARSED_SECONDS or node is self.language.none:
                        return
                    self.masks.of(self.states, node)
                    node = self.states.follow(node, texts[token])
        except TooMuchWorkError:
            self.is_hard = True
        except ValueError:  # no token: found out again where it matters
            pass


def check_width(node: Node) -> None:
    """Raise TooMuchWorkError for a state in which many counts run side by side: each byte makes a new state of it."""
    parts = node.parts if node.kind == "alt" else (node.parts[0].parts if node.kind == "cat" and node.parts[0].kind == "alt" else ())
    if sum((part.parts[0] if part.kind == "cat" else part).kind == "repeat" for part in parts) > MOST_WIDE:
        raise TooMuchWorkError("the grammar has too many counts side by side; simplify it")


def some_text(numbers: random.Random, language: Language, node: Node) -> bytes:
    """The beginning of a text, one that comes to an end of its parts soon."""
    found = bytearray()
    while len(found) < REHEARSED_BYTES and node.first:
        members = node.first & ENDS if node.first & ENDS and numbers.random() < 0.5 else node.first
        bytes_ = [byte for byte in range(256) if members >> byte & 1]
        found.append(numbers.choice(bytes_))
        node = language.derive(node, found[-1])
    return bytes(found)
