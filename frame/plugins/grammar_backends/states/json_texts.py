"""JSON strings and numbers as regular languages. Used by `schema_language`; knows no schema."""

from __future__ import annotations

from frame.plugins.grammar_backends.ebnf import LAST, SURROGATES, Ranges, complement
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.regular_syntax import characters, literal

SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
ESCAPED: Ranges = [(0, 31), (34, 34), (92, 92), (127, 127)]  # JSON does not require the last
ANY: Ranges = [(0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST)]
BACKSLASH = 1 << 92
DIGITS = sum(1 << byte for byte in b"0123456789")


def character(language: Language, ranges: Ranges) -> Node:
    """One character of these ranges in a JSON string: itself, or its shortest escape where JSON
    requires one."""
    plain = complement([*complement(ranges), *ESCAPED])
    special = sorted({code for low, high in ranges for code in range(low, min(high, 127) + 1) if _is_escaped(code)})
    short = sum(1 << ord(SHORT[code]) for code in special if code in SHORT)
    long = [language.cat(literal(language, f"u00{code // 16}"), _hex(language, code % 16)) for code in special if code not in SHORT]
    escape = language.cat(language.one_byte(BACKSLASH), language.alt([language.one_byte(short), *long]))
    return language.alt([characters(language, plain), escape])


def integers(language: Language, minimum: int | None, maximum: int | None) -> Node:
    """Integers from `minimum` to `maximum`, both included; None: no bound. 0 has no sign."""
    minus = language.one_byte(1 << ord("-"))
    choices = []
    if maximum is None or maximum >= 0:
        choices.append(_naturals(language, max(0, minimum or 0), maximum))
    if minimum is None or minimum < 0:
        nearest = 1 if maximum is None or maximum >= 0 else -maximum
        choices.append(language.cat(minus, _naturals(language, nearest, None if minimum is None else -minimum)))
    return language.alt(choices)


def numbers(language: Language, *, is_signed: bool) -> Node:
    """Any number; `is_signed`: negative ones too."""
    digit = language.one_byte(DIGITS)
    some = language.repeat(digit, 1, None)
    sign = language.repeat(language.one_byte(1 << ord("-")), 0, 1) if is_signed else language.empty
    fraction = language.cat(language.one_byte(1 << ord(".")), some)
    signs = language.repeat(language.one_byte(1 << ord("-") | 1 << ord("+")), 0, 1)
    exponent = language.cat(language.one_byte(1 << ord("e") | 1 << ord("E")), language.cat(signs, some))
    tail = language.cat(language.repeat(fraction, 0, 1), language.repeat(exponent, 0, 1))
    return language.cat(sign, language.cat(_naturals(language, 0, None), tail))


def _is_escaped(code: int) -> bool:
    return any(low <= code <= high for low, high in ESCAPED)


def _hex(language: Language, value: int) -> Node:
    return language.one_byte(sum({1 << ord(digit) for digit in (f"{value:x}", f"{value:X}")}))


def _naturals(language: Language, minimum: int, maximum: int | None) -> Node:
    if maximum is not None and minimum > maximum:
        return language.none
    choices = []
    digits = len(str(minimum))
    for length in range(digits, len(str(maximum)) + 1 if maximum is not None else digits + 1):
        low = str(max(minimum, 10 ** (length - 1) if length > 1 else 0))
        high = str(10**length - 1 if maximum is None else min(maximum, 10**length - 1))
        choices.append(_between(language, low, high))
    if maximum is None:
        first = language.one_byte(DIGITS & ~(1 << ord("0")))
        choices.append(language.cat(first, language.repeat(language.one_byte(DIGITS), digits, None)))
    return language.alt(choices)


def _between(language: Language, low: str, high: str) -> Node:
    """The numbers from `low` to `high`, which have equally many digits."""
    rest = len(low) - 1
    if not low:
        return language.empty
    if set(low) == {"0"} and set(high) == {"9"}:
        return language.repeat(language.one_byte(DIGITS), len(low), len(low))
    first, last = int(low[0]), int(high[0])
    if first == last:
        return language.cat(_digits(language, first, first), _between(language, low[1:], high[1:]))
    middle = language.cat(_digits(language, first + 1, last - 1), language.repeat(language.one_byte(DIGITS), rest, rest))
    lower = language.cat(_digits(language, first, first), _between(language, low[1:], "9" * rest))
    upper = language.cat(_digits(language, last, last), _between(language, "0" * rest, high[1:]))
    return language.alt([lower, middle, upper])


def _digits(language: Language, first: int, last: int) -> Node:
    return language.one_byte(sum(1 << (48 + digit) for digit in range(first, last + 1)))
