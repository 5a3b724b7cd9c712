"""Random and mutated grammars through the compilers' process and a loaded backend: each starts, or
is refused with one sentence."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from frame.config.hardware import Hardware
from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling import Grammar
from frame.core.interfaces.sampling_params import MAX_GRAMMAR_CHARS, SamplingParams
from frame.core.messages import Finish, Generate
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.grammar_process import GRACE, GrammarProcess, load_backend
from frame.plugins.loader import load_registry
from frame.structured_output.grammar_compiler import GrammarCompiler, GrammarSettings
from frame.structured_output.jump_forward import LookaheadGrammar
from tests.fuzz.mutations import TEXTS, mutated, spoiled
from tests.plugins.grammar_backends import random_grammars

FIRST, ROUNDS = int(os.environ.get("FRAME_FUZZ_FIRST", "2")), int(os.environ.get("FRAME_FUZZ_ROUNDS", "10"))  # 2,000 each
SECONDS = 1.0  # that one grammar may take
STEPS = 6  # tokens drawn from a grammar that compiles
MAX_MASK_LENGTH = 4.0  # seconds of CPU; the engine ends such a request, but it cannot cut the mask short
MAX_LENGTH = 600  # characters of a sentence
EBNFS = (
    'root ::= "a" root | "b"',
    'root ::= object\nobject ::= "{" (pair ("," pair)*)? "}"\npair ::= [a-z]+ ":" value\nvalue ::= object | [0-9]{1,3}',
    'root ::= [^"\\\\]* "\\n" (x | y)?\nx ::= "\\u00e9"\ny ::= ("t" | "f"){2,5}',
)
TAGS = (
    {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}},
    {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {}}}}},
)
PIECES = (
    *"()[]{}*+?|^$\\\"-,\n",
    *("::=", "root", "{1,100000}", "{0,}", "(?=a)", "(?!", "(?P<x>", "\\1"),
    *("\\p{L}", "[z-a]", "[]", "(a*)*", "((((", "\\u12", "$ref", "#/$defs/x", "é", "\U0001f642"),
)  # fmt: skip


def source(rng: random.Random) -> tuple[str, str]:
    """(kind, text): something right, most of it changed."""
    kind = rng.choice(("json_schema", "json_schema", "regex", "regex", "ebnf", "choice", "structural_tag", "json_object"))
    seed = rng.randrange(10**6)
    if kind in ("regex", "ebnf"):
        text = random_grammars.regex(seed) if kind == "regex" else rng.choice(EBNFS)
        for _ in range(rng.choice((0, 1, 2, 4))):
            text = bent(rng, text)
        return kind, text
    given: Any = {"json_schema": lambda: random_grammars.schema(seed), "choice": lambda: ["yes", *rng.sample(TEXTS, 3)]}.get(
        kind, lambda: rng.choice(TAGS)
    )()
    if kind == "json_object":
        return kind, ""
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        given = mutated(rng, given)
    text = json.dumps(given)
    if kind == "choice":  # only texts come so far, none of them empty
        texts = [each for each in given if isinstance(each, str) and each] if isinstance(given, list) else []
        return kind, json.dumps([each.encode("utf-8", "replace").decode() for each in texts or "a"])
    return kind, bent(rng, text) if rng.random() < 0.2 else text


def bent(rng: random.Random, text: str) -> str:
    if rng.random() < 0.3:
        return spoiled(rng, text.encode()).decode("utf-8", "replace")
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.choice((0, 0, 1, 3)))
    return text[:start] + rng.choice((*PIECES, text[:start][-20:] * 3)) + text[end:]


class Attack:
    """Grammars, one after another, as an engine would have them."""

    def __init__(self, name: str) -> None:
        given = {"sampling": {"grammar": name, "grammar_timeout": SECONDS, "grammar_memory": 256 << 20}}
        self.resolved = prepare(FrameConfig.model_validate(given), Hardware(cpu_cores=1, memory_bytes=8 << 30)).resolved
        registry = load_registry(installed=False)
        settings = GrammarSettings(registry.get("grammar_backend", name).capabilities.kinds, cache_bytes=0)
        self.compiler = GrammarCompiler(lambda: load_backend(self.resolved, registry), settings, lambda: GrammarProcess(self.resolved))
        self.words = -(-self.resolved.model.vocab_size // 32)
        self.ask("first", "regex", "a+")  # the process has to start

    def ask(self, rid: str, kind: str, text: str, patience: float = 2 * (SECONDS + GRACE) + 90) -> Grammar | Finish:
        """What becomes of it. The patience includes another process's start."""
        given: Any = {"choice": lambda: tuple(json.loads(text)), "json_object": lambda: True}.get(kind, lambda: text)()
        assert self.compiler.hold_request(Generate(rid=rid, token_ids=[5], params=SamplingParams(**{kind: given})))
        deadline = time.monotonic() + patience
        while not (ready := self.compiler.take_ready()):
            assert time.monotonic() < deadline, ("no answer", kind, text)
            time.sleep(0.0005)
        return ready[0][1]

    def one(self, rng: random.Random) -> str:
        kind, text = source(rng)
        while len(text) > MAX_GRAMMAR_CHARS:  # no engine meets these
            kind, text = source(rng)
        outcome = self.ask("r", kind, text)
        if isinstance(outcome, Finish):
            assert (outcome.code, outcome.param) == ("invalid_grammar", kind), outcome
            check(outcome.error or "", kind, text)
            return "slow" if "takes longer" in str(outcome.error) else "ended" if "crashes the" in str(outcome.error) else "refused"
        return self.draw(rng, LookaheadGrammar(outcome), kind, text)

    def draw(self, rng: random.Random, grammar: Grammar, kind: str, text: str) -> str:
        mask = np.empty(self.words, np.int32)
        try:
            for _ in range(STEPS):
                since = time.thread_time()
                is_limited = grammar.fill_mask(mask)
                assert time.thread_time() - since < MAX_MASK_LENGTH, ("a mask took too long", kind, text)
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() if is_limited else []
                if not allowed:
                    break
                assert grammar.accept_token(rng.choice(allowed)), ("an allowed token was refused", kind, text)
        except ValueError as error:
            check(f"invalid grammar: {error}", kind, text)
            return "too much work"
        return "begun"


def check(sentence: str, kind: str, text: str) -> None:
    what = (sentence, kind, text[:3000])
    assert sentence.startswith("invalid grammar: ") and "\n" not in sentence and len(sentence) < MAX_LENGTH, what
    assert "Traceback" not in sentence and "object at" not in sentence and "site-packages" not in sentence, what


def attack(name: str, seed: int, count: int) -> Counter[str]:
    for library in ("xgrammar", "llguidance") if name == "combined" else (name,):
        pytest.importorskip(library)
    made = Attack(name)
    try:
        found = Counter(made.one(random.Random(f"{seed}-{number}")) for number in range(count))
        assert not isinstance(made.ask("last", "regex", "(yes|no)!"), Finish)  # it is well after all that
        assert name == "llguidance" or not isinstance(made.ask("last", "structural_tag", json.dumps(TAGS[0])), Finish)
    finally:
        made.compiler.close()
    print(name, seed, dict(found))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "combined"])
def test_grammars(name: str) -> None:
    found = attack(name, 1, 40)
    assert found["begun"] > 8 and found["refused"] > 8, found


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "combined"])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
def test_grammars_for_long(name: str, seed: int) -> None:
    attack(name, seed, 2000)
