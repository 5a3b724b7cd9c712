"""Texts for the conformance suites of parsers: noise with marks of known models in it, and texts
that a format of a structural tag allows.

A format is drawn byte by byte with xgrammar, or written from its parts. Must not know a parser.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import numpy as np

from frame.interfaces.parsing import Format
from frame.testing.conformance import SkipCheck

TEXTS = 30  # texts of noise
STEPS = 3000  # bytes of a drawn text
THOUGHT = "so 2 is less, ö"  # free text of a written text
MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[f(a=1)]"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", '{"name": "f", "arguments": {"a": 1}}', "<｜tool▁call▁begin｜>"),
    *("<｜tool▁sep｜>", "```json\n", "<｜tool▁call▁end｜>", "<|channel|>", "commentary to=functions.f", "analysis"),
    *("<|message|>", "<|end|>"),
)
CHARACTERS = ("1\r\n2\r3", "4\0 5\x1b[0m\x7f6", "e\u0301 \u212b \ufb01 \u200b7")  # that a filter of text may change: no text changes them
NOISE = "af é日🙂\n<>[]{}()\"'\\|:,="


def draw(form: Format, count: int) -> list[str]:
    """Texts that the format allows, byte by byte at random; those that do not end in time are left
    out. Raises SkipCheck without xgrammar."""
    compiled = _compiled(json.dumps(form))
    texts = []
    for seed in range(count):
        dice, matcher, data = random.Random(seed), _matcher(compiled), bytearray()
        mask = np.zeros((1, 8), np.int32)
        while len(data) < STEPS:
            matcher.fill_next_token_bitmask(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if matcher.is_completed() and (not len(allowed) or dice.random() < 0.5):
                texts.append(data.decode())
                break
            data.append(int(dice.choice(allowed)))
            matcher.accept_token(data[-1])
    return texts


@lru_cache(maxsize=64)
def _compiled(form: str) -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise SkipCheck("xgrammar, which draws texts of a grammar, is not installed") from error
    vocabulary = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)])
    return xgrammar.GrammarCompiler(vocabulary).compile_structural_tag(json.dumps({"type": "structural_tag", "format": json.loads(form)}))


def _matcher(compiled: Any) -> Any:
    import xgrammar

    return xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=False)


def accepts(form: Format, text: str) -> bool:
    matcher = _matcher(_compiled(json.dumps(form)))
    return bool(matcher.accept_string(text) and matcher.is_completed())


def noise() -> list[str]:
    dice = random.Random(0)

    def text() -> str:
        return "".join(dice.choice(MARKS if dice.random() < 0.4 else NOISE) for _ in range(dice.randint(0, 24)))

    return [text() for _ in range(TEXTS)]


def write(form: Any, dice: random.Random) -> str:
    """A text of a format, with `THOUGHT` as free text."""
    kind = form.get("type")
    if kind == "const_string":
        return str(form["value"])
    if kind == "any_text":
        return THOUGHT
    if kind == "tag":
        end = form["end"]
        return form["begin"] + write(form["content"], dice) + (end if isinstance(end, str) else end[0])
    if kind == "sequence":
        return "".join(write(part, dice) for part in form["elements"])
    if kind == "or":
        return write(dice.choice(form["elements"]), dice)
    if kind == "optional":
        return write(form["content"], dice) if dice.random() < 0.6 else ""
    return dice.choice(draw(form, 2) or [""])
