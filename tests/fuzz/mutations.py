"""Wrong input made from right input: values of other types, extremes, odd texts, bytes cut and
flipped. Equal seeds give equal inputs."""

# ruff: noqa: E501 - tables
from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

TEXTS = (
    "", " ", "\x00", "\ud800", "\udfff\ud800", "\u202e", "a" * 5000, "🙂" * 50, "é\u0301", "\\", '"', "{{7*7}}", "{% for x in y %}",
    "../../etc/passwd",
    "%n%s", "<|endoftext|>", "<think>", "</tool_call>", "null", "NaN", "-1", "1e999", "file:///etc/passwd", "http://127.0.0.1:1/x", "\r\n\r\n",
    "(a+)+$", "[", "__class__", "data:image/png;base64,AAAA",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 127, 128, 129, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30, 0.0, -0.0, 0.5, 1e-300,
    1e300, -1e300, 1.5, 5e-324,
)  # fmt: skip
OTHERS = (None, True, False, [], {}, [[]], [None], {"": None}, [{}], {"a": {"b": {"c": []}}})


def value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON holds."""
    kind = rng.randrange(6 if depth < 3 else 3)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(OTHERS)
    if kind == 3:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 4:
        return {rng.choice((*TEXTS, "type", "role", "content", "name")): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return nested(rng)


def nested(rng: random.Random) -> Any:
    inner: Any = rng.choice(OTHERS)
    for _ in range(rng.choice((5, 60, 140, 300))):
        inner = [inner] if rng.random() < 0.5 else {"properties": inner}
    return inner


def mutated(rng: random.Random, given: Any) -> Any:
    """`given` with one thing in it changed: replaced, removed, doubled, renamed, or sent deeper."""
    if isinstance(given, dict) and given and rng.random() < 0.85:
        key = rng.choice(list(given))
        result = dict(given)
        act = rng.randrange(10)
        if act < 5:
            result[key] = mutated(rng, given[key])
        elif act < 7:
            result[key] = value(rng)
        elif act == 7:
            del result[key]
        elif act == 8:
            result[rng.choice(TEXTS)] = result.pop(key)
        else:
            result[rng.choice(TEXTS)] = value(rng)
        return result
    if isinstance(given, list) and given and rng.random() < 0.85:
        place = rng.randrange(len(given))
        act = rng.randrange(4)
        if act < 2:
            return [*given[:place], mutated(rng, given[place]), *given[place + 1 :]]
        return [*given[:place], *given[place + 1 :]] if act == 2 else given * rng.choice((2, 40))
    return value(rng)


def dumped(rng: random.Random, body: Any) -> bytes:
    """As JSON: lone surrogates escaped, now and then NaN and infinities, which are none."""
    text = json.dumps(body, ensure_ascii=rng.random() < 0.7)
    return text.encode("utf-8", "surrogatepass")


def spoiled(rng: random.Random, data: bytes) -> bytes:
    """Bytes cut, flipped, doubled, or put in between."""
    acts: tuple[Callable[[], bytes], ...] = (
        lambda: data[: rng.randrange(len(data) + 1)],
        lambda: data + data,
        lambda: rng.randbytes(rng.randrange(64)),
        lambda: _with(data, rng.randrange(len(data) + 1), rng.randbytes(rng.randrange(1, 5))),
        lambda: _with(data, rng.randrange(len(data) + 1), rng.choice((b"\xff", b"\xed\xa0\x80", b"\x00", b"NaN", b"Infinity", b"-", b"1e9999", b"[" * 300))),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.replace(b":", b"", 1),
        lambda: bytes(byte ^ (1 << rng.randrange(8)) if rng.random() < 0.02 else byte for byte in data),
    )  # fmt: skip
    return rng.choice(acts)()


def _with(data: bytes, place: int, piece: bytes) -> bytes:
    return data[:place] + piece + data[place:]
