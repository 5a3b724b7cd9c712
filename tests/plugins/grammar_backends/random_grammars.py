"""Random JSON schemas and regular expressions of finite languages, deterministic by seed."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("id", "name", "état", "tag list", 'quo"ted', "x_1", "Größe", "a-b", "名前", "k")
TEXTS = ("red", "green", "", "two words", 'with "quotes"', "back\\slash", "tab\tand\nline", "ünï", "日本", "😀", "</tag>", "0")
LITERALS = ("a", "Z", "7", "-", "_", "é", "日", " ", "abc", r"\.", r"\+", r"\(", r"\/", r"\[", r"\{", r"\\", "#", '"')
CLASSES = ("[a-z]", "[A-F0-9]", "[^a-z\\s]", r"\d", r"\w", "[xyz]", "[à-ö]", "[-.]", "[^\\x00-\\x7f\\n]")


def schema(seed: int) -> dict[str, Any]:
    """An object schema of bounded answers: all lengths, counts and depths have a most."""
    made = _Schema(random.Random(seed))
    whole = made.object(3)
    return {**whole, "$defs": made.definitions} if made.definitions else whole


class _Schema:
    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers
        self.definitions: dict[str, Any] = {}

    def any(self, depth: int) -> dict[str, Any]:
        leaves = (self.integer, self.text, self.choice, self.boolean, self.constant, self.pattern)
        inner = (self.object, self.array, self.either, self.reference, self.tuple)
        if depth and self.numbers.random() < 0.5:
            return self.numbers.choice(inner)(depth - 1)
        return self.numbers.choice(leaves)()

    def object(self, depth: int) -> dict[str, Any]:
        names = self.numbers.sample(WORDS, self.numbers.randint(1, 4))
        required = [name for name in names if self.numbers.random() < 0.6]
        properties = {name: self.any(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def array(self, depth: int) -> dict[str, Any]:
        minimum = self.numbers.randint(0, 2)
        return {"type": "array", "items": self.any(depth), "minItems": minimum, "maxItems": minimum + self.numbers.randint(0, 3)}

    def tuple(self, depth: int) -> dict[str, Any]:
        items = [self.any(depth) for _ in range(self.numbers.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}

    def either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth) for _ in range(self.numbers.randint(2, 3))]}

    def reference(self, depth: int) -> dict[str, Any]:
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}  # taken, while it is being made
        self.definitions[name] = self.any(depth)
        return {"$ref": f"#/$defs/{name}"}

    def integer(self) -> dict[str, Any]:
        minimum = self.numbers.choice((-1_000_000, -37, -1, 0, 1, 10, 99, 12345))
        return {"type": "integer", "minimum": minimum, "maximum": minimum + self.numbers.choice((0, 1, 9, 90, 1000, 2_000_000))}

    def text(self) -> dict[str, Any]:
        minimum = self.numbers.randint(0, 3)
        return {"type": "string", "minLength": minimum, "maxLength": minimum + self.numbers.randint(0, 12)}

    def choice(self) -> dict[str, Any]:
        values: tuple[Any, ...] = (*TEXTS, 1, -7, True, None, 2.5)
        return {"enum": self.numbers.sample(values, self.numbers.randint(1, 6))}

    def constant(self) -> dict[str, Any]:
        return {"const": self.numbers.choice((*TEXTS, 42, False, None))}

    def boolean(self) -> dict[str, Any]:
        return {"type": self.numbers.choice(("boolean", "null"))}

    def pattern(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self.numbers.choice(("^[a-z]{2,6}$", "^(on|off)$", r"^\d{4}-\d{2}$", "^#[0-9a-f]{6}$"))}


def regex(seed: int) -> str:
    """An expression whose matches have a few hundred characters at most."""
    return _alternatives(random.Random(seed), 3)


def _alternatives(numbers: random.Random, depth: int) -> str:
    return "|".join(_sequence(numbers, depth) for _ in range(numbers.choice((1, 1, 2, 3))))


def _sequence(numbers: random.Random, depth: int) -> str:
    return "".join(_atom(numbers, depth) + _count(numbers) for _ in range(numbers.randint(1, 4)))


def _atom(numbers: random.Random, depth: int) -> str:
    kind = numbers.random()
    if depth and kind < 0.35:
        return f"({numbers.choice(('', '?:'))}{_alternatives(numbers, depth - 1)})"
    return f"(?:{numbers.choice(LITERALS)})" if kind < 0.7 else numbers.choice(CLASSES)


def _count(numbers: random.Random) -> str:
    minimum = numbers.randint(0, 2)
    return numbers.choice(("", "", "", "?", f"{{{minimum + 1}}}", f"{{{minimum},{minimum + numbers.randint(1, 3)}}}"))
