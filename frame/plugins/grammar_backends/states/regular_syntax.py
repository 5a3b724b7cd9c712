"""Reads the part of regular-expression syntax that all dialects share into `Language` nodes over
UTF-8.

Supported: literals, escapes of punctuation and of control characters, `.`, classes, groups, `|`, `*
+ ? {m,n}` (lazy too), `^` and `$` around the whole. Other syntax (look-around, references, flags,
`\\p`, word boundaries, negated shorthands) raises UnsupportedSyntaxError. Knows no vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from frame.plugins.grammar_backends.ebnf import SURROGATES, Ranges, SourceReader, UnsupportedSyntaxError, complement
from frame.plugins.grammar_backends.states.regular import Language, Node

MAX_COUNT = 1_000_000
MAX_DEPTH = 100
MAX_LENGTH = 10_000  # characters of an expression or text
Character = Callable[[Language, Ranges], Node]

DIGITS: Ranges = [(48, 57)]
WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
SPACE: Ranges = [(9, 13), (32, 32)]
SHORTHANDS = {"d": DIGITS, "w": WORD, "s": SPACE}
CONTROLS = {"n": 10, "r": 13, "t": 9}
PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ ")


def read(language: Language, pattern: str, character: Character | None = None) -> Node:
    """Return the texts that match as a whole. `character`: writes one character of some ranges.
    Raises UnsupportedSyntaxError."""
    if len(pattern) > MAX_LENGTH:
        raise UnsupportedSyntaxError(f"more than {MAX_LENGTH} characters")
    reader = _Reader(language, pattern, character or characters)
    node = reader.alternatives(0)
    if reader.at != len(pattern):
        raise UnsupportedSyntaxError(f"{pattern[reader.at]!r} at {reader.at}")
    return node


def literal(language: Language, text: str) -> Node:
    """Return the language of one text. Raises UnsupportedSyntaxError for a long one."""
    if len(text) > MAX_LENGTH:
        raise UnsupportedSyntaxError(f"more than {MAX_LENGTH} characters")
    return language.cat_all([language.one_byte(1 << byte) for byte in text.encode()])


def literals(language: Language, texts: Iterable[str]) -> Node:
    """Return the language of several texts, with shared prefixes merged. Raises
    UnsupportedSyntaxError for a long text."""
    words = sorted({text.encode() for text in texts})
    if any(len(word) > MAX_LENGTH for word in words):
        raise UnsupportedSyntaxError(f"more than {MAX_LENGTH} characters")
    return _words(language, words, 0)


def _words(language: Language, words: list[bytes], depth: int) -> Node:
    """The language of sorted words from byte `depth` on, up to which they are equal."""
    if not words:
        return language.none
    first, last, end = words[0], words[-1], depth
    while end < len(first) and first[end] == last[end]:
        end += 1
    by_byte: dict[int, list[bytes]] = {}
    for word in words[len(first) == end :]:
        by_byte.setdefault(word[end], []).append(word)
    node = language.alt([language.empty] * (len(first) == end) + [_words(language, each, end) for each in by_byte.values()])
    for byte in reversed(first[depth:end]):
        node = language.cat(language.one_byte(1 << byte), node)
    return node


def characters(language: Language, ranges: Ranges) -> Node:
    """One character of these ranges, as UTF-8."""
    sequences = [sequence for low, high in ranges for sequence in _sequences(low, high)]
    bytes_of = (language.cat_all([language.one_byte((1 << (high + 1)) - (1 << low)) for low, high in each]) for each in sequences)
    return language.alt(bytes_of)


class _Reader(SourceReader):
    def __init__(self, language: Language, pattern: str, character: Character) -> None:
        super().__init__(pattern)
        self._character = character
        self._language = language

    def alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise UnsupportedSyntaxError(f"more than {MAX_DEPTH} groups in each other")
        choices = [self._sequence(depth)]
        while self._take("|"):
            choices.append(self._sequence(depth))
        if len(choices) > 1 and self._is_anchored():
            raise UnsupportedSyntaxError("an anchor and alternatives without a group around them")
        return self._language.alt(choices)

    def _is_anchored(self) -> bool:
        return self._source.startswith("^") or self._source.endswith("$")

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.at < len(self._source) and self._source[self.at] not in "|)":
            parts.append(self._quantified(self._atom(depth)))
        node = self._language.empty
        for part in reversed(parts):
            node = self._language.cat(part, node)
        return node

    def _atom(self, depth: int) -> Node:
        char = self._next()
        if char == "(":
            if self._take("?"):
                self._expect(":")
            node = self.alternatives(depth + 1)
            self._expect(")")
            return node
        if char == "[":
            return self._character(self._language, self._class())
        if char == ".":
            return self._character(self._language, complement([(10, 10)]))
        if char == "\\":
            escaped = self._escape()
            return self._character(self._language, escaped if isinstance(escaped, list) else [(escaped, escaped)])
        if (char == "^" and self.at == 1) or (char == "$" and self.at == len(self._source)):
            return self._language.empty
        if char in "*+?{}]^$":
            raise UnsupportedSyntaxError(f"{char!r} at {self.at - 1}")
        return self._character(self._language, [(ord(char), ord(char))])

    def _quantified(self, node: Node) -> Node:
        char = self._source[self.at : self.at + 1]
        if char not in ("*", "+", "?", "{"):
            return node
        self.at += 1
        minimum, maximum = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char) or self._counts()
        self._take("?")  # lazy quantifiers match the same texts
        if self._source[self.at : self.at + 1] in ("*", "+", "?", "{"):
            raise UnsupportedSyntaxError(f"a quantifier of a quantifier at {self.at}")
        return self._language.repeat(node, minimum, maximum)

    def _counts(self) -> tuple[int, int | None]:
        minimum = self._number()
        maximum: int | None = minimum
        if self._take(","):
            maximum = None if self._source[self.at : self.at + 1] == "}" else self._number()
        self._expect("}")
        if maximum is not None and maximum < minimum:
            raise UnsupportedSyntaxError("counts in the wrong order")
        return minimum, maximum

    def _number(self) -> int:
        start = self.at
        while self._source[self.at : self.at + 1] in tuple("0123456789"):
            self.at += 1
        digits = self._source[start : self.at]
        if not digits or len(digits) > 7 or int(digits) > MAX_COUNT:
            raise UnsupportedSyntaxError(f"no count at {start}")
        return int(digits)

    def _class(self) -> Ranges:
        is_negated = self._take("^")
        ranges: Ranges = []
        while not self._take("]"):
            low = self._class_member()
            if isinstance(low, list):
                ranges += low
                continue
            high: int | Ranges = low
            if self._source[self.at : self.at + 1] == "-" and self._source[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self._class_member()
            if isinstance(high, list) or high < low:
                raise UnsupportedSyntaxError(f"no range at {self.at}")
            parts = ((low, min(high, SURROGATES[0] - 1)), (max(low, SURROGATES[1] + 1), high))  # without surrogates
            ranges += [part for part in parts if part[0] <= part[1]] if low < SURROGATES[0] <= high else [(low, high)]
        if not ranges:
            raise UnsupportedSyntaxError("an empty class")
        return complement(ranges) if is_negated else ranges

    def _class_member(self) -> int | Ranges:
        char = self._next()
        if char == "\\":
            return self._escape()
        if char == "[" or self._source[self.at - 1 : self.at + 1] in ("&&", "--", "~~"):  # set operations of some dialects
            raise UnsupportedSyntaxError(f"{char!r} in a class")
        return ord(char)

    def _escape(self) -> int | Ranges:
        char = self._next()
        if char in SHORTHANDS:
            return list(SHORTHANDS[char])
        if char in CONTROLS:
            return CONTROLS[char]
        if char in PUNCTUATION:
            return ord(char)
        if char in ("x", "u"):
            digits = self._source[self.at : self.at + (2 if char == "x" else 4)]
            self.at += len(digits)
            if len(digits) == (2 if char == "x" else 4) and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                code = int(digits, 16)
                if not SURROGATES[0] <= code <= SURROGATES[1]:
                    return code
        raise UnsupportedSyntaxError(f"the escape \\{char}")


def _sequences(low: int, high: int) -> list[list[tuple[int, int]]]:
    """Split a range of code points into sequences of byte ranges of their UTF-8 form."""
    for edge in (0x7F, 0x7FF, 0xFFFF):
        if low <= edge < high:
            return _sequences(low, edge) + _sequences(edge + 1, high)
    first, last = chr(low).encode(), chr(high).encode()
    for i in range(1, len(first)):
        rest = (1 << (6 * i)) - 1  # the code points that the last i bytes count
        if (low & ~rest) != (high & ~rest):
            if low & rest:
                return _sequences(low, low | rest) + _sequences((low | rest) + 1, high)
            if high & rest != rest:
                return _sequences(low, (high & ~rest) - 1) + _sequences(high & ~rest, high)
    return [list(zip(first, last, strict=True))]
