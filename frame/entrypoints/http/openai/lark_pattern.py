"""Translates a Lark grammar without recursion to one regular expression.

Used for the custom tools of the Responses API, whose text is a JSON string that a `pattern`
constrains. Must not know a grammar backend: its library rejects what its expressions do not have,
such as lookahead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_CHARS = 32 * 1024  # of the expression, and of the grammar
MAX_DEPTH = 60  # of rules that refer to rules, and of brackets

_TOKEN = re.compile(
    r"(?P<space>(?:[ \t\r\f]|//[^\n]*|\#[^\n]*)+)|(?P<newline>\n)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)'
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<directive>%[a-z]+)|(?P<number>-?[0-9]+)|(?P<sign>->|\.\.|[]|()[?!*+~:.,{}])"
)
# Lark's module `common`
_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+", "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": r"[+-]?[0-9]+", "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+", "CNAME": "[a-zA-Z_][a-zA-Z_0-9]*", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip
_REPEATS = {"?": "?", "*": "*", "+": "+"}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}

# Its kind, and its value: "pattern" has an expression, "name" a name, "all" and "any" a list of
# expressions, "repeat" an expression and a quantifier.
Expression = tuple[Any, ...]


class LarkError(ValueError):
    """The grammar cannot be translated. One sentence for the client."""


class _Token(NamedTuple):
    kind: str
    text: str


def to_pattern(grammar: str) -> str:
    """The expression that matches the whole texts of the rule `start`. Raises LarkError."""
    if len(grammar) > MAX_CHARS:
        raise LarkError(f"the grammar has {len(grammar)} characters; it may have {MAX_CHARS}")
    reader = _Reader(grammar)
    reader.read()
    if "start" not in reader.rules:
        raise LarkError("the grammar has no rule start; define one")
    writer = _Writer(reader.rules, reader.ignored)
    return f"^(?:{writer.gap}{writer.write(reader.rules['start'], False)})$"


def _tokens(grammar: str) -> Iterator[_Token]:
    """The tokens; a newline only where a definition ends."""
    place, depth, pending = 0, 0, False
    while place < len(grammar):
        match = _TOKEN.match(grammar, place)
        if match is None:
            raise LarkError(f"the grammar has {grammar[place : place + 20]!r}, which is not supported")
        kind, text, place = str(match.lastgroup), match[0], match.end()
        if kind == "newline":
            pending = True
        elif kind != "space":
            if pending and depth == 0 and text != "|":
                yield _Token("newline", "\n")
            pending = False
            depth += (text in "([") - (text in ")]") if kind == "sign" else 0
            yield _Token(kind, text)
    yield _Token("newline", "\n")


class _Reader:
    """Reads definitions. `rules` and terminals share one namespace."""

    def __init__(self, grammar: str) -> None:
        self.rules: dict[str, Expression] = {}
        self.ignored: list[Expression] = []
        self._tokens = [*_tokens(grammar), _Token("end", "")]
        self._place = 0
        self._depth = 0

    def read(self) -> None:
        while self._peek().kind != "end":
            if self._take("newline"):
                continue
            if (directive := self._take("directive")) is not None:
                self._read_directive(directive)
            else:
                self._read_definition()

    def _peek(self) -> _Token:
        return self._tokens[self._place]

    def _take(self, kind: str, *texts: str) -> str | None:
        """The next token's text if it is of this kind, and one of `texts` where there are any."""
        token = self._peek()
        if token.kind != kind or (texts and token.text not in texts):
            return None
        self._place += 1
        return token.text

    def _need(self, kind: str, *texts: str) -> str:
        text = self._take(kind, *texts)
        if text is None:
            raise LarkError(f"the grammar has {self._peek().text!r} where it needs {' or '.join(texts) or f'a {kind}'}")
        return text

    def _read_directive(self, directive: str) -> None:
        if directive == "%ignore":
            self.ignored.append(self._read_choice())
        elif directive == "%import":
            if self._need("name") != "common":
                raise LarkError("the grammar imports from another module than common; write its terminals out")
            listed = self._take("sign", "(") is not None
            if not listed:
                self._need("sign", ".")
            names = [self._need("name")]
            while listed and self._take("sign", ",") is not None:
                names.append(self._need("name"))
            if listed:
                self._need("sign", ")")
            alias = self._need("name") if self._take("sign", "->") is not None else None
            for name in names:
                if name not in _COMMON:
                    raise LarkError(f"the grammar imports common.{name}, which is not supported; write it out")
                self.rules[alias or name] = ("pattern", f"(?:{_COMMON[name]})")
        else:
            raise LarkError(f"the grammar has {directive}, which is not supported")
        self._need("newline")

    def _read_definition(self) -> None:
        self._take("sign", "?", "!")
        name = self._need("name")
        if self._take("sign", ".") is not None:
            self._need("number")  # a priority chooses a tree, not a text
        self._need("sign", ":")
        self.rules[name] = self._read_choice()
        self._need("newline")

    def _read_choice(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise LarkError(f"the grammar has brackets nested deeper than {MAX_DEPTH}")
        options = [self._read_sequence()]
        while self._take("sign", "|") is not None:
            options.append(self._read_sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else ("any", options)

    def _read_sequence(self) -> Expression:
        elements = []
        while (element := self._read_element()) is not None:
            elements.append(self._read_repeat(element))
        if self._take("sign", "->") is not None:
            self._need("name")
        return ("all", elements)

    def _read_element(self) -> Expression | None:
        if (text := self._take("string")) is not None:
            if self._take("sign", "..") is not None:
                return ("pattern", f"[{re.escape(_unquote(text))}-{re.escape(_unquote(self._need('string')))}]")
            return ("pattern", _literal(text))
        if (text := self._take("regex")) is not None:
            body, _, flags = text[1:].rpartition("/")
            body = body.replace(r"\/", "/")
            return ("pattern", f"(?{flags}:{body})" if flags else f"(?:{body})")
        if (text := self._take("name")) is not None:
            return ("name", text)
        if self._take("sign", "(") is not None:
            inner = self._read_choice()
            self._need("sign", ")")
            return inner
        if self._take("sign", "[") is not None:
            inner = self._read_choice()
            self._need("sign", "]")
            return ("repeat", inner, "?")
        return None

    def _read_repeat(self, element: Expression) -> Expression:
        if (sign := self._take("sign", *_REPEATS)) is not None:
            return ("repeat", element, _REPEATS[sign])
        if self._take("sign", "~") is not None:
            low = high = self._need("number")
            if self._take("sign", "..") is not None:
                high = self._need("number")
            return ("repeat", element, f"{{{low},{high}}}")
        return element


class _Writer:
    """Writes expressions with each rule in place of its name."""

    def __init__(self, rules: dict[str, Expression], ignored: list[Expression]) -> None:
        self._rules = rules
        self._open: list[str] = []  # the rules that are being written
        self._num_chars = 0  # written so far, those of inner expressions counted at each level
        self.gap = ""
        if ignored:
            self.gap = f"(?:{'|'.join(self.write(each, True) for each in ignored)})*"

    def write(self, expression: Expression, in_terminal: bool) -> str:
        """The expression. `in_terminal`: nothing is ignored between its parts. Raises LarkError."""
        kind, value = expression[0], expression[1]
        gap = "" if in_terminal else self.gap
        if kind == "pattern":
            text = f"{value}{gap}"
        elif kind == "name":
            text = self._write_name(value, in_terminal)
        elif kind == "all":
            text = "".join(self.write(each, in_terminal) for each in value)
        elif kind == "any":
            text = f"(?:{'|'.join(self.write(each, in_terminal) for each in value)})"
        else:
            text = f"(?:{self.write(value, in_terminal)}){expression[2]}"
        self._num_chars += len(text)
        if len(text) > MAX_CHARS or self._num_chars > MAX_DEPTH * MAX_CHARS:
            raise LarkError(f"the grammar has more than {MAX_CHARS} characters with its rules written out; simplify it")
        return text

    def _write_name(self, name: str, in_terminal: bool) -> str:
        if name not in self._rules:
            raise LarkError(f"the grammar has no rule {name[:60]!r}; define it")
        if name in self._open:
            raise LarkError(f"the rule {name[:60]!r} refers to itself; this server takes grammars without recursion")
        if len(self._open) >= MAX_DEPTH:
            raise LarkError(f"the grammar has rules nested deeper than {MAX_DEPTH}")
        self._open.append(name)
        is_terminal = name.isupper()
        text = self.write(self._rules[name], in_terminal or is_terminal)
        self._open.pop()
        return f"(?:{text}){self.gap}" if is_terminal and not in_terminal else f"(?:{text})"


def _unquote(text: str) -> str:
    body = text.removesuffix("i")[1:-1]
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), body)


def _literal(text: str) -> str:
    body = _unquote(text)
    if not text.endswith("i"):
        return f"(?:{_escape(body)})"
    return "".join(f"[{char.lower()}{char.upper()}]" if char.isalpha() else _escape(char) for char in body)


def _escape(text: str) -> str:
    """The text as an expression, without escapes that only Python knows."""
    return re.sub(r"[][\\^$.|?*+(){}/]", lambda match: "\\" + match[0], text).replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")
