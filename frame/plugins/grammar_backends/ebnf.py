"""Reads EBNF in the GBNF dialect (`root ::= "a" [0-9]+ other`) and translates it to llguidance's
Lark dialect.

Used by the backend `llguidance`, and by backend packages that need the parsed rules. Knows no
vocabulary and no library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
MAX_DEPTH = 60
MAX_EXPRESSIONS = 2_000
NO_RUN = (-1, -1)  # marks characters outside of a run
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "'": "'", "/": "/", "^": "^"}
HEX = {"x": 2, "u": 4, "U": 8}
NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


Ranges = list[tuple[int, int]]  # of code points, both ends included


class UnsupportedSyntaxError(ValueError):
    """The source uses syntax that this reader does not support; another reader may."""


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All code points outside `ranges`, surrogates excluded."""
    gaps, start = [], 0
    for low, high in sorted([*ranges, SURROGATES]):
        if start < low:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    return [*gaps, (start, LAST)] if start <= LAST else gaps


@dataclass(frozen=True, slots=True)
class Expression:
    """A node of a rule's expression. `kind`: "text", "class", "rule", "sequence", "choice", or
    "repeat" of one child."""

    kind: str
    text: str = ""  # of "text"; of "rule": its name
    ranges: tuple[tuple[int, int], ...] = ()  # of "class"; code points, both ends included
    children: tuple[Expression, ...] = ()
    minimum: int = 0
    maximum: int | None = None

    @property
    def run(self) -> tuple[tuple[int, int], ...]:
        """The ranges of a `[…]+` or `[…]*`; empty for other parts."""
        is_run = self.kind == "repeat" and self.maximum is None and self.minimum < 2 and self.children[0].kind == "class"
        return self.children[0].ranges if is_run else ()


Rules = Mapping[str, Expression]


def read(source: str) -> Rules:
    """Return the rules by name. `root` and all referenced rules exist. Raises
    UnsupportedSyntaxError."""
    rules = _Reader(source).rules()
    expressions = [each for rule in rules.values() for each in _inside(rule)]
    if len(expressions) > MAX_EXPRESSIONS:
        raise UnsupportedSyntaxError(f"more than {MAX_EXPRESSIONS} parts")
    named = {each.text for each in expressions if each.kind == "rule"}
    if "root" not in rules or named - rules.keys():
        raise UnsupportedSyntaxError("a rule is missing")
    return rules


def to_lark(rules: Rules) -> str:
    """Return the grammar in llguidance's Lark dialect. Runs (`[a-z]+`) are one lexeme if that is
    equivalent: fewer parser steps."""
    runs = find_lexemes(rules)  # all other lexemes are single characters, so none is a prefix of another
    numbers = {name: f"rule{number}" for number, name in enumerate(rules)}

    def written(node: Expression) -> str:
        if node.kind == "text":  # by character: of two lexemes with a common prefix the longer one would win
            return " ".join(json.dumps(char, ensure_ascii=False) for char in node.text) or '""'
        if node.kind == "class":
            return f"/{_class(node.ranges)}/"
        if node.kind == "rule":
            return numbers[node.text]
        if node.kind == "repeat":
            if node.run and node.run in runs:
                return f"/{_class(node.run)}+/{'' if node.minimum else '?'}"
            sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.minimum, node.maximum))
            return f"({written(node.children[0])})" + (sign or f"{{{node.minimum},{'' if node.maximum is None else node.maximum}}}")
        inner = [written(each) for each in node.children]
        return f"({' | '.join(inner)})" if node.kind == "choice" else f"({' '.join(inner)})" if inner else '""'

    return "\n".join([f"start: {numbers['root']}", *(f"{numbers[name]}: {written(rule)}" for name, rule in rules.items())])


def find_lexemes(rules: Rules) -> set[tuple[tuple[int, int], ...]]:
    """Return the runs that can be one lexeme. A lexeme matches greedily, so none of its characters
    may come from elsewhere in the grammar, and no run of the same characters may follow it."""
    runs = {node.run for rule in rules.values() for node in _inside(rule) if node.run}
    others: set[tuple[tuple[int, int], ...]] = set(runs)
    for rule in rules.values():
        for node, is_run in _with_runs(rule):
            if node.kind == "text":
                others.add((*((ord(char), ord(char)) for char in node.text), NO_RUN))
            elif node.kind == "class" and not is_run:
                others.add((*node.ranges, NO_RUN))
    apart = {run for run in runs if not any(_meet(run, other) for other in others if other != run)}
    return apart - _followed_by_themselves(rules, apart)


def _followed_by_themselves(rules: Rules, runs: set[tuple[tuple[int, int], ...]]) -> set[tuple[tuple[int, int], ...]]:
    """The runs that the same run may follow: a fixed point over the runs that begin and follow each
    rule."""
    first: dict[str, set[object]] = {name: set() for name in rules}
    after: dict[str, set[object]] = {name: set() for name in rules}
    nullable: dict[str, bool] = dict.fromkeys(rules, False)
    self_following: set[tuple[tuple[int, int], ...]] = set()

    def begins(node: Expression) -> tuple[set[object], bool]:
        if node.kind == "rule":
            return first[node.text], nullable[node.text]
        if node.kind in ("text", "class"):
            return set(), node.kind == "text" and not node.text
        inner = [begins(each) for each in node.children]
        if node.kind == "repeat":
            run = {node.run} if node.run in runs else set()
            return run | inner[0][0], node.minimum == 0 or inner[0][1]
        if node.kind == "choice":
            return set().union(*(each for each, _ in inner)), any(is_nullable for _, is_nullable in inner)
        starts: set[object] = set()
        for each, is_nullable in inner:
            starts |= each
            if not is_nullable:
                return starts, False
        return starts, True

    def visit(node: Expression, follows: set[object]) -> None:
        if node.kind == "rule":
            after[node.text] |= follows
        elif node.kind == "choice":
            for each in node.children:
                visit(each, follows)
        elif node.kind == "repeat":
            if node.run in runs and node.run in follows:
                self_following.add(node.run)
            visit(node.children[0], follows if node.run or node.maximum == 1 else follows | begins(node.children[0])[0])
        elif node.kind == "sequence":
            for each in reversed(node.children):
                visit(each, follows)
                starts, is_nullable = begins(each)
                follows = starts | follows if is_nullable else starts

    before = -1
    while before != (now := _size(first) + _size(after) + sum(nullable.values())):
        before = now
        for name, rule in rules.items():
            starts, nullable[name] = begins(rule)
            first[name] |= starts
            visit(rule, after[name])
    return self_following


def _size(sets: Mapping[str, set[object]]) -> int:
    return sum(map(len, sets.values()))


def _inside(node: Expression) -> Iterator[Expression]:
    yield node
    for each in node.children:
        yield from _inside(each)


def _with_runs(node: Expression, is_run: bool = False) -> Iterator[tuple[Expression, bool]]:
    """All parts inside, and whether a run repeats them."""
    yield node, is_run
    for each in node.children:
        yield from _with_runs(each, bool(node.run))


def _meet(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= to and start <= high for low, high in one for start, to in other)


def _class(ranges: tuple[tuple[int, int], ...]) -> str:
    return "[" + "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in ranges) + "]"


class SourceReader:
    """Recursive descent; `at` is the next character's place."""

    def __init__(self, source: str) -> None:
        self.at = 0
        self._source = source

    def _next(self) -> str:
        if self.at >= len(self._source):
            raise UnsupportedSyntaxError("it ends too early")
        self.at += 1
        return self._source[self.at - 1]

    def _take(self, text: str) -> bool:
        is_next = self._source.startswith(text, self.at)
        self.at += len(text) * is_next
        return is_next

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise UnsupportedSyntaxError(f"{text!r} is missing at {self.at}")


class _Reader(SourceReader):
    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._space()
        while self.at < len(self._source):
            name = self._name()
            self._space()
            if not name or name in rules or not self._take("::="):
                raise UnsupportedSyntaxError(f"no rule at {self.at}")
            rules[name] = self._choice(0)
        return rules

    def _choice(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise UnsupportedSyntaxError(f"more than {MAX_DEPTH} parentheses in each other")
        choices = [self._sequence(depth)]
        while self._take("|"):
            choices.append(self._sequence(depth))
        return choices[0] if len(choices) == 1 else Expression("choice", children=tuple(choices))

    def _sequence(self, depth: int) -> Expression:
        elements: list[Expression] = []
        self._space()
        while self.at < len(self._source) and self._source[self.at] not in "|)" and not self._is_rule():
            elements.append(self._repeated(self._atom(depth)))
            self._space()
        return elements[0] if len(elements) == 1 else Expression("sequence", children=tuple(elements))

    def _is_rule(self) -> bool:
        """Whether the next rule begins here."""
        start = self.at
        self._name()
        self._space()
        is_rule = self._source.startswith("::=", self.at)
        self.at = start
        return is_rule

    def _atom(self, depth: int) -> Expression:
        if self._take('"'):
            text = ""
            while not self._take('"'):
                text += self._char()
            return Expression("text", text)
        if self._take("["):
            return self._class()
        if self._take("("):
            node = self._choice(depth + 1)
            self._expect(")")
            return node
        name = self._name()
        if not name:
            raise UnsupportedSyntaxError(f"{self._source[self.at]!r} at {self.at}")
        return Expression("rule", name)

    def _repeated(self, node: Expression) -> Expression:
        for sign, minimum, maximum in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(sign):
                if self._source[self.at : self.at + 1] in ("*", "+", "?", "{"):
                    raise UnsupportedSyntaxError(f"a repeat of a repeat at {self.at}")
                return Expression("repeat", children=(node,), minimum=minimum, maximum=maximum)
        if self._source[self.at : self.at + 1] in ("{", ".", "="):
            raise UnsupportedSyntaxError(f"{self._source[self.at]!r} at {self.at}")
        return node

    def _class(self) -> Expression:
        is_negated = self._take("^")
        listed: Ranges = []
        while not self._take("]"):
            low = ord(self._char())
            high = low
            if self._source[self.at : self.at + 1] == "-" and self._source[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = ord(self._char())
            if high < low or (low < SURROGATES[0] <= high <= LAST):
                raise UnsupportedSyntaxError(f"no range at {self.at}")
            listed.append((low, high))
        ranges = complement(listed if is_negated else complement(listed))
        if not ranges:
            raise UnsupportedSyntaxError("an empty class")
        return Expression("class", ranges=tuple(ranges))

    def _char(self) -> str:
        char = self._next()
        if char != "\\":
            return char
        char = self._next()
        if char in ESCAPES:
            return ESCAPES[char]
        digits = self._source[self.at : self.at + HEX.get(char, 0)]
        self.at += len(digits)
        if not digits or len(digits) != HEX[char] or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise UnsupportedSyntaxError(f"the escape \\{char}")
        code = int(digits, 16)
        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise UnsupportedSyntaxError(f"no character at {self.at}")
        return chr(code)

    def _name(self) -> str:
        start = self.at
        while self.at < len(self._source) and self._source[self.at] in NAME:
            self.at += 1
        return self._source[start : self.at]

    def _space(self) -> None:
        while self.at < len(self._source):
            if self._source[self.at] == "#":
                end = self._source.find("\n", self.at)
                self.at = len(self._source) if end < 0 else end
            elif self._source[self.at].isspace():
                self.at += 1
            else:
                return
