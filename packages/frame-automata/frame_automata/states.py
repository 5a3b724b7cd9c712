"""The states of a regular language as numbers with a transition table: an automaton over arrays.
Knows no vocabulary."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from frame.plugins.grammar_backends.states.regular import Form, Language, Node, first_sets
from frame_automata.vocabulary_tree import NEVER

MAX_WORK = 20_000  # derivatives for one mask; takes less than 100 ms
MAX_WHOLE_STATES = 40  # of an automaton whose table is computed completely
MAX_RUN_SIZE = 400  # nested parts of the repeated expression
MAX_STATES = 1024  # then all are dropped; two kilobytes each


class TooMuchWorkError(ValueError):
    """A mask or automaton needs more work than allowed."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """How often tokens repeat the parts of runs, one row per kind of run. Immutable. Row 0: a run
    that no token repeats."""

    needs: np.ndarray  # uint16 [rows, nodes]; `VocabularyTree.repetitions`
    alone: tuple[np.ndarray | None, ...] = (None,)  # by row, uint8 [tokens]; `VocabularyTree.costs_alone`
    rows: dict[Form, int] = field(default_factory=dict)

    @classmethod
    def none(cls, num_nodes: int) -> Repetitions:
        return cls(np.full((1, num_nodes), NEVER, np.uint16))

    def plus(self, part: Form, needs: np.ndarray | None, alone: np.ndarray | None) -> Repetitions:
        """Return these and one more row; needs None: the run has none."""
        if needs is None:
            return Repetitions(self.needs, self.alone, {**self.rows, part: 0})
        return Repetitions(np.concatenate((self.needs, needs[None])), (*self.alone, alone), {**self.rows, part: len(self.needs)})

    def row(self, language: Language, part: Node) -> int:
        return self.rows.get(language.form(part), 0)


class States:
    """The states of a language (`vocabulary_tree.Automaton`). State 0 is the dead state. Table rows
    are computed on first use. Hold `lock` while using numbers: they are valid only until it is
    released."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.lock = threading.Lock()
        self._begin(Repetitions.none(1))

    def begin(self, node: Node, repetitions: Repetitions | None = None) -> int:
        """Return the number of a start state, and start counting the work of a mask."""
        repetitions = self._repetitions if repetitions is None else repetitions
        if len(self._nodes) > MAX_STATES or repetitions is not self._repetitions:
            self._begin(repetitions)
        self._max_work = self.language.num_derived + MAX_WORK
        return self._number(node)

    def step(self, pairs: np.ndarray) -> np.ndarray:
        """See `Automaton`. Raises TooMuchWorkError."""
        found = self._table.take(pairs)
        unknown = (found < 0).nonzero()[0]  # the method has less overhead than the function
        if unknown.size:
            for number in np.unique(pairs[unknown] // 256).tolist():
                self._work_out(number)
            found = self._table.take(pairs)
        return found

    def covers(self, nodes: np.ndarray, states: np.ndarray) -> np.ndarray:
        """See `Automaton`."""
        return self._needs.take(self._row.take(states) + nodes) <= self._maximum.take(states)

    def covers_one(self, node: int, state: int) -> bool:
        """See `Automaton`."""
        return bool(self._needs.item(self._row.item(state) + node) <= self._maximum.item(state))

    def follow(self, node: Node, text: bytes) -> Node:
        """`Language.follow`, using the computed part of the table."""
        with self.lock:
            number = self._numbers.get(node)
            if number is None:
                return self.language.follow(node, text)
            table = self._table
            for i, byte in enumerate(text):
                after = table.item(256 * number + byte)
                if after < 0:
                    return self.language.follow(self._nodes[number], text[i:])
                number = after
            return self._nodes[number]

    def table(self, node: Node) -> tuple[np.ndarray, list[Node]]:
        """Return all states reachable from a node, which is state 1: the table, intp [states, 256],
        and their nodes."""
        self.begin(node)
        number = 1
        while number < len(self._nodes):
            if number > MAX_WHOLE_STATES:
                raise TooMuchWorkError("the automaton has too many states")
            self._work_out(number)
            number += 1
        return self._table[: 256 * number].reshape(-1, 256), self._nodes

    def _begin(self, repetitions: Repetitions) -> None:
        self._repetitions, self._needs = repetitions, repetitions.needs.ravel()
        self._nodes = [self.language.none]
        self._numbers = {self.language.none: 0}
        self._table = np.full(64 * 256, -1, np.intp)
        self._table[:256] = 0
        self._row: np.ndarray = np.zeros(64, np.intp)  # offset of a state's row of `needs`
        self._maximum: np.ndarray = np.zeros(64, np.uint16)

    def _number(self, node: Node) -> int:
        number = self._numbers.setdefault(node, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(node)
            if 256 * number == len(self._table):
                self._table = np.concatenate((self._table, np.full_like(self._table, -1)))
                self._row, self._maximum = (np.concatenate((each, np.zeros_like(each))) for each in (self._row, self._maximum))
            repeat = node.parts[0] if node.kind == "cat" else node
            if is_run(repeat):
                self._row[number] = self._repetitions.row(self.language, repeat.parts[0]) * self._repetitions.needs.shape[1]
                self._maximum[number] = NEVER - 1 if repeat.maximum is None else min(repeat.maximum, NEVER - 1)
        return number

    def _work_out(self, number: int) -> None:
        row = np.zeros(256, np.intp)
        for members in classes(self._nodes[number]):
            if self.language.num_derived > self._max_work:
                raise TooMuchWorkError("the grammar needs more work for a token than its backend allows; simplify it")
            target = self._number(self.language.derive(self._nodes[number], (members & -members).bit_length() - 1))
            row[np.unpackbits(np.frombuffer(members.to_bytes(32, "little"), np.uint8), bitorder="little").view(np.bool_)] = target
        self._table[256 * number : 256 * number + 256] = row


def classes(node: Node) -> list[int]:
    """The first bytes of a node's texts as sets in bits. Bytes of one set have the same
    derivative."""
    found: list[int] = []
    for members in first_sets(node):
        split = []
        for each in found:
            both = each & members
            split += [part for part in (both, each ^ both) if part]
            members ^= both
        found = [*split, members] if members else split
    return found


def only_byte(node: Node) -> int | None:
    """The first byte of every text of a node. None: there are several."""
    return None if not node.first or node.first & (node.first - 1) else node.first.bit_length() - 1


def is_run(node: Node) -> bool:
    """Whether a node repeats something as small as a character."""
    return node.kind == "repeat" and node.parts[0].size <= MAX_RUN_SIZE
