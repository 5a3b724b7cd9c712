"""Seeded generators of the evaluation tasks: recall, copy, reverse, sort, sum and Python
completion.

Each example depends only on (task, seed, index, split). The hash of an example's identity (the
queried key, the multiset of items, the unordered pair of addends) assigns it to a split: one tenth
belongs to `eval` and is never a training question. Other lines of a recall list belong to either
split.

Context lengths are estimates for frame-tiny's tokenizer (`estimate_tokens`). Must not know a
tokenizer or a model.
"""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from frame.entrypoints.tools.eval.words import WORDS, common_word, invented_word, number

Split = Literal["train", "eval"]
Message = dict[str, str]

TASKS: tuple[str, ...] = ("recall", "copy", "reverse", "sort", "sum", "python")
RECALL_BUCKETS: tuple[tuple[int, int], ...] = ((100, 300), (300, 1000), (1000, 2000), (2000, 3000))
HELD_OUT_SHARE = 0.1

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are frame-tiny, a very small language model. Answer with the result only.",
    "Answer briefly.",
)
RECALL_HEADERS = ("Here is a list of keys and values.", "Remember these values.", "These are the current settings:")
RECALL_QUESTIONS = ('What is the value of "{key}"?', 'Which value does "{key}" have?', 'Give the value of "{key}".')
COPY_REQUESTS = ("Copy this text:", "Repeat the following line exactly:", "Write this again:")
REVERSE_REQUESTS = ("Reverse this list:", "Write this list in reverse order:", "Turn this list around:")
SORT_WORD_REQUESTS = ("Sort these words alphabetically:", "Put these words in alphabetical order:")
SORT_NUMBER_REQUESTS = ("Sort these numbers from small to large:", "Put these numbers in ascending order:")
SUM_REQUESTS = ("What is {a} + {b}?", "Compute {a} + {b}.", "Add {a} and {b}.")

_TOKEN_RUNS = re.compile(r"[A-Za-z]+|[0-9]|\s+|[^\sA-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its only correct answer; `identity` decides the split."""

    question: str
    answer: str
    identity: str


@dataclass(frozen=True, slots=True)
class Example:
    """One request: chat `messages` with the `expected` answer, or a text `prompt` to complete."""

    task: str
    messages: tuple[Message, ...]
    prompt: str
    expected: str
    max_tokens: int
    context_tokens: int


def estimate_tokens(text: str) -> int:
    """Estimated tokens of text in frame-tiny's tokenizer; within 10 % for recall lists."""
    total = 0
    for run in _TOKEN_RUNS.findall(text):
        total += max(1, round(len(run) / 2.3)) if run.isalpha() else 1
    return total


def is_held_out(task: str, identity: str) -> bool:
    """Whether this identity belongs to the eval split, decided by a hash."""
    digest = hashlib.sha256(f"frame-tiny/{task}/{identity}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def _in_split(task: str, identity: str, split: Split) -> bool:
    return is_held_out(task, identity) == (split == "eval")


# --- recall ---------------------------------------------------------------------------------------


def recall_key(rng: random.Random) -> str:
    """A key: two joined words, an invented word, or a word with a number."""
    kind = rng.randrange(3)
    if kind == 0:
        return f"{common_word(rng)}_{common_word(rng)}"
    if kind == 1:
        return invented_word(rng, 3)
    return f"{common_word(rng)}{number(rng, 2)}"


def recall_value(rng: random.Random) -> str:
    """A value: a number of 3 to 5 digits, an invented word, or a common word."""
    kind = rng.randrange(3)
    if kind == 0:
        return number(rng, rng.randint(3, 5))
    return invented_word(rng, rng.randint(2, 3)) if kind == 1 else common_word(rng)


def recall_pairs(rng: random.Random, tokens: int) -> dict[str, str]:
    """Distinct keys with values: at least four, and about `tokens` tokens as `key=value` lines."""
    pairs: dict[str, str] = {}
    length = 0
    while length < tokens or len(pairs) < 4:
        key, value = recall_key(rng), recall_value(rng)
        if key not in pairs:
            pairs[key] = value
            length += estimate_tokens(f"{key}={value}\n")
    return pairs


def recall_list(rng: random.Random, pairs: dict[str, str]) -> str:
    """The list as text, with its heading line."""
    return "\n".join([rng.choice(RECALL_HEADERS), *(f"{key}={value}" for key, value in pairs.items())])


def recall_question(rng: random.Random, key: str) -> str:
    """One way to ask for the value of `key`."""
    return rng.choice(RECALL_QUESTIONS).format(key=key)


def askable_keys(pairs: dict[str, str], split: Split) -> list[str]:
    """The keys of `pairs` that this split may ask for."""
    return [key for key in pairs if _in_split("recall", key, split)]


def _recall_example(rng: random.Random, split: Split) -> Example:
    low, high = rng.choice(RECALL_BUCKETS)
    target = rng.randint(low, high) - 40  # reserved for heading, question and system prompt
    pairs: dict[str, str] = {}
    keys: list[str] = []
    while not keys:
        pairs = recall_pairs(rng, max(target, 60))
        keys = askable_keys(pairs, split)
    key = rng.choice(keys)
    listing, question = recall_list(rng, pairs), recall_question(rng, key)
    if rng.random() < 0.25:
        messages: tuple[Message, ...] = ({"role": "system", "content": listing}, {"role": "user", "content": question})
    else:
        messages = _chat(rng, f"{listing}\n{question}")
    tokens = sum(estimate_tokens(message["content"]) + 1 for message in messages)
    return Example("recall", messages, "", pairs[key], 24, tokens)


# --- copy, reverse, sort, sum ---------------------------------------------------------------------


def _mixed_item(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return number(rng, rng.randint(1, 4))
    return invented_word(rng, rng.randint(1, 3)) if kind == 1 else common_word(rng)


def _copy_turn(rng: random.Random) -> Turn:
    separator = rng.choice((" ", ",", ", "))
    items = [_mixed_item(rng) for _ in range(rng.randint(4, 24))]
    text = separator.join(items)
    return Turn(f"{rng.choice(COPY_REQUESTS)}\n{text}", text, ",".join(sorted(items)))


def _reverse_turn(rng: random.Random) -> Turn:
    items = [_mixed_item(rng) for _ in range(rng.randint(3, 8))]
    question = f"{rng.choice(REVERSE_REQUESTS)}\n{','.join(items)}"
    return Turn(question, ",".join(reversed(items)), ",".join(sorted(items)))


def _sort_turn(rng: random.Random) -> Turn:
    count = rng.randint(3, 8)
    if rng.random() < 0.5:
        items = rng.sample(WORDS, count)
        request, answer = rng.choice(SORT_WORD_REQUESTS), sorted(items)
    else:
        items = [str(value) for value in rng.sample(range(1000), count)]
        request, answer = rng.choice(SORT_NUMBER_REQUESTS), sorted(items, key=int)
    return Turn(f"{request}\n{','.join(items)}", ",".join(answer), ",".join(sorted(items)))


def _sum_turn(rng: random.Random) -> Turn:
    a, b = int(number(rng, rng.randint(1, 3))), int(number(rng, rng.randint(1, 3)))
    question = rng.choice(SUM_REQUESTS).format(a=a, b=b)
    return Turn(question, str(a + b), f"{min(a, b)}+{max(a, b)}")


_TURNS: dict[str, Callable[[random.Random], Turn]] = {"copy": _copy_turn, "reverse": _reverse_turn, "sort": _sort_turn, "sum": _sum_turn}


def make_turn(task: str, rng: random.Random, split: Split) -> Turn:
    """A question of `task` (copy, reverse, sort or sum) whose identity is in `split`."""
    while True:
        turn = _TURNS[task](rng)
        if _in_split(task, turn.identity, split):
            return turn


def _chat(rng: random.Random, question: str) -> tuple[Message, ...]:
    """The question as a chat; half of the chats have a system prompt."""
    user = {"role": "user", "content": question}
    if rng.random() < 0.5:
        return ({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, user)
    return (user,)


# --- Python completion ----------------------------------------------------------------------------

_VERBS = ("read", "write", "parse", "load", "find", "count", "merge", "split", "check", "build", "update", "remove", "format")
_NOUNS = ("config", "path", "items", "values", "name", "lines", "tokens", "record", "header", "message", "table", "index", "node")
_ARGUMENTS = ("name", "path", "value", "items", "data", "key", "text", "size", "encoding=None", "default=None", "strict=True")
_IMPORTS = ("import os", "import re", "import sys", "import json", "from collections import defaultdict", "from pathlib import Path")


def python_prompt(rng: random.Random) -> str:
    """The beginning of a Python file: imports, then the header of a function or class."""
    imports = "\n".join(sorted(rng.sample(_IMPORTS, rng.randint(1, 3)), key=lambda line: line.startswith("from")))
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    names = rng.sample(_ARGUMENTS, rng.randint(1, 3))
    arguments = ", ".join(sorted(names, key=lambda name: "=" in name))
    if rng.random() < 0.6:
        return f'{imports}\n\n\ndef {verb}_{noun}({arguments}):\n    """{verb.capitalize()} the {noun}."""\n'
    name = verb.capitalize() + noun.capitalize()
    return f'{imports}\n\n\nclass {name}:\n    """{verb.capitalize()} the {noun}."""\n\n    def __init__(self, {arguments}):\n'


# --- examples -------------------------------------------------------------------------------------


def make_example(task: str, seed: int, index: int, split: Split = "eval") -> Example:
    """Example `index` of `task`. The same arguments give the same example on every machine."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
    rng = random.Random(f"{split}/{task}/{seed}/{index}")
    if task == "recall":
        return _recall_example(rng, split)
    if task == "python":
        prompt = python_prompt(rng)
        return Example("python", (), prompt, "", 96, estimate_tokens(prompt))
    turn = make_turn(task, rng, split)
    messages = _chat(rng, turn.question)
    tokens = sum(estimate_tokens(message["content"]) + 1 for message in messages)
    return Example(task, messages, "", turn.answer, 2 * estimate_tokens(turn.answer) + 16, tokens)


def make_examples(task: str, samples: int, seed: int = 0, split: Split = "eval") -> list[Example]:
    """The first `samples` examples of `task` under `seed`."""
    return [make_example(task, seed, index, split) for index in range(samples)]
