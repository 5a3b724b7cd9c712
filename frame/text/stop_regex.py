"""Finds regular expressions in a text that arrives in pieces (`stop_regex`).

Simulates a nondeterministic automaton (Thompson 1968) whose sets of places are bit masks, so the
time of a character is bounded by the number of places in the patterns, whatever the patterns and
the text are. Patterns have the syntax of Python's `re`, without what needs backtracking. Used by
the text stream of a sequence and by the checks of requests. Must not know requests.
"""

from __future__ import annotations

import importlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

# Of all patterns of a request, repetitions written out; an assertion counts as two. A character of
# text takes up to 0.6 us for each of them.
MAX_PLACES = 50
MAX_ENTRIES = 50  # different characters, ranges and classes in the patterns
_MAX_NODES = 4 * MAX_PLACES  # with branches
_parser: Any = importlib.import_module("re._parser")  # the parser of `re`; typeshed does not describe it
_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.UNICODE
_CLASSES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda c: c.isalnum() or c == "_",
}
_UNSUPPORTED = {
    "ASSERT": "a lookahead or lookbehind",
    "ASSERT_NOT": "a lookahead or lookbehind",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}
_is_word = _CLASSES["WORD"]
# Of the characters before and after, which are empty where there is none. None: the next one is not
# known, and the text so far ends here.
_ASSERTIONS: dict[str, Callable[[str, str | None, bool], bool]] = {
    "AT_BEGINNING": lambda before, after, multiline: not before or (multiline and before == "\n"),
    "AT_BEGINNING_STRING": lambda before, after, multiline: not before,
    "AT_END": lambda before, after, multiline: not after or (multiline and after == "\n"),
    "AT_END_STRING": lambda before, after, multiline: not after,
    "AT_BOUNDARY": lambda before, after, multiline: after is not None and _is_word(before) != _is_word(after),
    "AT_NON_BOUNDARY": lambda before, after, multiline: after is not None and _is_word(before) == _is_word(after),
}


class PatternError(ValueError):
    """One sentence that says why a pattern is not accepted, without its subject."""


class _Reader(NamedTuple):
    """What a place accepts: a character in one of the ranges or classes, or in none of them."""

    ranges: tuple[tuple[int, int], ...]
    classes: tuple[str, ...]  # keys of `_CLASSES`, after NOT_ where negated
    is_negated: bool = False
    ignores_case: bool = False

    def accepts(self, character: str) -> bool:
        forms = _case_forms(character) if self.ignores_case else (character,)
        return any(self._has(form) for form in forms) is not self.is_negated

    def _has(self, character: str) -> bool:
        point = ord(character)
        if any(first <= point <= last for first, last in self.ranges):
            return True
        return any(_CLASSES[name.removeprefix("NOT_")](character) is not name.startswith("NOT_") for name in self.classes)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the automaton: it reads a character (`reader`), holds between two characters
    (`holds`), ends a pattern (`is_end`), or does nothing."""

    reader: _Reader | None = None
    holds: Callable[[str, str | None], bool] | None = None
    is_end: bool = False
    after: tuple[int, ...] = ()  # nodes that follow

    @property
    def is_branch(self) -> bool:
        return self.reader is None and self.holds is None and not self.is_end


class _Automaton:
    """The nodes of patterns as bits. A mask is a set of places, assertions and ends."""

    def __init__(self, nodes: list[_Node], firsts: list[int], ends: dict[int, str]) -> None:
        bits = {index: 1 << place for place, index in enumerate(i for i, node in enumerate(nodes) if not node.is_branch)}
        closures = _close(nodes, bits)
        self.start = _union(closures[first] for first in firsts)
        self.follows = {bit: _union(closures[each] for each in nodes[index].after) for index, bit in bits.items()}  # by bit
        self.ends = {bits[index]: pattern for index, pattern in ends.items()}
        self.end_bits = _union(self.ends)
        self.assertions = [(bits[i], node.holds) for i, node in enumerate(nodes) if node.holds is not None]
        self.assertion_bits = _union(bit for bit, _ in self.assertions)
        self._readers: dict[_Reader, int] = {}  # -> the places with it
        for index, bit in bits.items():
            if (reader := nodes[index].reader) is not None:
                self._readers[reader] = self._readers.get(reader, 0) | bit
        self._breaks = sorted({edge for reader in self._readers for low, high in reader.ranges for edge in (low, high + 1)})
        self._ignores_case = any(reader.ignores_case for reader in self._readers)
        self._accepted: dict[object, int] = {}  # kind of a character -> the places that accept it
        self._held: dict[tuple[str, str], tuple[int, int]] = {}  # kinds of two characters -> see `find_holding`

    def find_accepting(self, character: str) -> int:
        """The places that accept a character. Characters between the same bounds of ranges, and of
        the same classes, are of one kind: the same places accept them."""
        kind: object = self._find_kind(character)
        if self._ignores_case:
            kind = tuple([self._find_kind(form) for form in _case_forms(character)])
        if (accepted := self._accepted.get(kind)) is None:
            accepted = _union(places for reader, places in self._readers.items() if reader.accepts(character))
            self._accepted[kind] = accepted
        return accepted

    def find_holding(self, before: str, after: str | None) -> tuple[int, int]:
        """(the assertions that hold between two characters, the bits from which these lead to an
        end); see `_ASSERTIONS`."""
        kinds = _side(before), "?" if after is None else _side(after)
        if (held := self._held.get(kinds)) is None:
            holding = _union(bit for bit, holds in self.assertions if holds(before, after))
            ending, seen = self.end_bits, 0
            while ending != seen:
                seen = ending
                ending |= _union(bit for bit, _ in self.assertions if bit & holding and self.follows[bit] & ending)
            held = self._held[kinds] = holding, ending
        return held

    def _find_kind(self, character: str) -> tuple[int, bool, bool, bool]:
        is_space = character.isspace()
        return bisect_right(self._breaks, ord(character)), character.isdecimal(), is_space, not is_space and _is_word(character)


def _side(character: str) -> str:
    """The kind of a character for assertions."""
    return character if character in ("", "\n") else "w" if _is_word(character) else "."


def _case_forms(character: str) -> tuple[str, str, str]:
    lower, upper = character.lower(), character.upper()
    return character, lower if len(lower) == 1 else character, upper if len(upper) == 1 else character


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _close(nodes: list[_Node], bits: dict[int, int]) -> list[int]:
    """For each node, the bits that are reached from it without a character or an assertion."""
    closures = [bits.get(index, 0) for index in range(len(nodes))]
    branches = [index for index, node in enumerate(nodes) if node.is_branch]
    is_changed = True
    while is_changed:  # a loop reaches nodes that were added after it
        is_changed = False
        for index in branches:
            closure = _union(closures[each] for each in nodes[index].after)
            is_changed |= closure != closures[index]
            closures[index] = closure
    return closures


@dataclass(slots=True)
class _Builder:
    """Builds the nodes of patterns, each from its end to its beginning."""

    nodes: list[_Node] = field(default_factory=list)
    num_places: int = 0
    readers: set[_Reader] = field(default_factory=set)
    num_entries: int = 0

    def add(self, node: _Node) -> int:
        self.num_places += 2 if node.holds is not None else node.reader is not None
        if self.num_places > MAX_PLACES or len(self.nodes) >= _MAX_NODES:
            raise PatternError(f"has more than {MAX_PLACES} characters, classes and assertions, repetitions written out; shorten it")
        self.nodes.append(node)
        return len(self.nodes) - 1

    def add_sequence(self, items: Iterable[tuple[Any, Any]], after: int, flags: int) -> int:
        """Returns the first node of `items`, which `after` follows."""
        for operation, value in reversed(list(items)):
            after = self._add_item(str(operation), value, after, flags)
        return after

    def _add_item(self, operation: str, value: Any, after: int, flags: int) -> int:
        if operation in _UNSUPPORTED:
            raise PatternError(f"has {_UNSUPPORTED[operation]}, which is not supported; write it without")
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            minimum, maximum, items = value
            return self._add_repeat(minimum, maximum, items, after, flags)
        if operation == "SUBPATTERN":
            _, added, removed, items = value
            _check_flags(added)
            return self.add_sequence(items, after, (flags | added) & ~removed)
        if operation == "BRANCH":
            return self.add(_Node(after=tuple([self.add_sequence(branch, after, flags) for branch in value[1]])))
        if operation == "AT":
            holds, is_multiline = _ASSERTIONS[str(value)], bool(flags & re.MULTILINE)
            return self.add(_Node(holds=lambda one, other: holds(one, other, is_multiline), after=(after,)))
        return self.add(_Node(reader=self._make_reader(operation, value, flags), after=(after,)))

    def _add_repeat(self, minimum: int, maximum: Any, items: Any, after: int, flags: int) -> int:
        if maximum == _parser.MAXREPEAT:
            loop = self.add(_Node())
            body = self.add_sequence(items, loop, flags)
            self.nodes[loop] = _Node(after=(body, after))
            after = loop
        else:
            end = after
            for _ in range(maximum - minimum):
                if (body := self.add_sequence(items, after, flags)) == after:
                    break  # it reads nothing
                after = self.add(_Node(after=(body, end)))
        for _ in range(minimum):
            if (body := self.add_sequence(items, after, flags)) == after:
                break
            after = body
        return after

    def _make_reader(self, operation: str, value: Any, flags: int) -> _Reader:
        reader = _make_reader(operation, value, flags)
        if reader not in self.readers:
            self.readers.add(reader)
            self.num_entries += len(reader.ranges) + len(reader.classes)
            if self.num_entries > MAX_ENTRIES:
                raise PatternError(f"has more than {MAX_ENTRIES} different characters, ranges and classes; shorten it")
        return reader


def _check_flags(flags: int) -> None:
    if flags & ~_FLAGS:
        raise PatternError("has a flag other than i, m, s, u and x; leave it out")


def _make_reader(operation: str, value: Any, flags: int) -> _Reader:
    if operation == "ANY":
        return _Reader(() if flags & re.DOTALL else ((10, 10),), (), is_negated=True)
    if operation in ("LITERAL", "NOT_LITERAL"):
        entries, is_negated = [("LITERAL", value)], operation == "NOT_LITERAL"
    elif operation == "IN":
        entries = [(str(name), each) for name, each in value]
        is_negated = entries[0][0] == "NEGATE"
        entries = entries[is_negated:]
    else:
        raise PatternError("has a construct that is not supported; write it without")
    ranges = tuple([each if name == "RANGE" else (each, each) for name, each in entries if name != "CATEGORY"])
    classes = tuple([str(each).removeprefix("CATEGORY_") for name, each in entries if name == "CATEGORY"])
    return _Reader(ranges, classes, is_negated, bool(flags & re.IGNORECASE))


@lru_cache(maxsize=64)
def _compile(patterns: tuple[str, ...]) -> _Automaton:
    builder, firsts, ends = _Builder(), [], {}
    for pattern in patterns:
        try:
            parsed = _parser.parse(pattern)
            _check_flags(parsed.state.flags)
            ends[end := builder.add(_Node(is_end=True))] = pattern
            firsts.append(builder.add_sequence(parsed, end, parsed.state.flags))
        except (re.error, OverflowError) as error:
            raise PatternError(f"is no regular expression: {error}") from None
        except RecursionError:
            raise PatternError("nests too deeply; write it with fewer groups") from None
    automaton = _Automaton(builder.nodes, firsts, ends)
    if _advance([(automaton.start, 0)], automaton.assertion_bits, automaton.follows)[0][0] & automaton.end_bits:
        raise PatternError("matches an empty text, which would end every response; let it match at least one character")
    return automaton


# A thread: a mask, and where its match begins; the earliest first, with no bit in two masks.
_Threads = list[tuple[int, int]]


def _advance(threads: _Threads, holding: int, follows: dict[int, int]) -> _Threads:
    """The threads with what follows those assertions that hold."""
    seen, advanced = 0, []
    for mask, begin in threads:
        mask &= ~seen
        if waiting := mask & holding:
            seen |= mask
            while waiting:
                bit = waiting & -waiting
                added = follows[bit] & ~seen
                mask |= added
                seen |= added
                waiting = (waiting ^ bit) | (added & holding)
        seen |= mask
        advanced.append((mask, begin))
    return advanced


def _read(threads: _Threads, accepting: int, follows: dict[int, int]) -> tuple[_Threads, int]:
    """The threads after a character that these places accept, and all of their bits."""
    seen, after = 0, []
    for mask, begin in threads:
        if not (live := mask & accepting):
            continue
        if live in follows:  # one bit
            reached = follows[live]
        else:
            reached = 0
            while live:
                bit = live & -live
                reached |= follows[bit]
                live ^= bit
        if reached := reached & ~seen:
            seen |= reached
            after.append((reached, begin))
    return after, seen


def check_patterns(patterns: tuple[str, ...]) -> None:
    """Raise PatternError for patterns that cannot be searched."""
    _compile(patterns)


class RegexSearch:
    """Finds the first place at which one of the patterns ends in a text, and the earliest place at
    which that match begins. `$` holds at the end of the text so far."""

    __slots__ = ("_automaton", "_before", "_reached", "_size", "_threads")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._automaton = _compile(patterns)
        self._before = ""  # the character before the next one
        self._size = 0  # characters of the text
        self._threads: _Threads = []
        self._reached = 0  # the bits of the threads

    def skip(self, added: str) -> None:
        """Read text in which no match may begin or end."""
        self._size += len(added)
        self._before = added[-1:] or self._before
        self._threads, self._reached = [], 0

    def feed(self, added: str) -> tuple[int, int, str] | None:
        """Read more text. Returns (characters from the start of the match to the end of the text,
        characters behind the match, pattern). None: no match."""
        total, automaton, follows = self._size + len(added), self._automaton, self._automaton.follows
        has_assertions, ending = bool(automaton.assertions), automaton.end_bits
        for character in added:
            threads = [*self._threads, (automaton.start, self._size)]
            if has_assertions:
                holding, ending = automaton.find_holding(self._before, character)
                if self._reached & ending:  # this character completes it, as with a word boundary
                    return self._describe(ending, total)
                threads = _advance(threads, holding, follows)
            self._threads, self._reached = _read(threads, automaton.find_accepting(character), follows)
            self._before = character
            self._size += 1
            if has_assertions:
                _, ending = automaton.find_holding(character, None)
            if self._reached & ending:
                return self._describe(ending, total)
        return None

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that may be part of a match."""
        return self._size - self._threads[0][1] if self._threads else 0

    def _describe(self, ending: int, total: int) -> tuple[int, int, str]:
        """The earliest match that is complete; `total`: the size of the text."""
        mask, begin = next(thread for thread in self._threads if thread[0] & ending)
        automaton, bit = self._automaton, mask & ending
        for _ in automaton.assertions:  # each leads to the next, and the last to the end
            if bit & automaton.end_bits:
                break
            bit = _union(follow & ending for each, follow in automaton.follows.items() if each & bit & automaton.assertion_bits)
        bit &= automaton.end_bits
        return total - begin, total - self._size, automaton.ends[bit & -bit]
