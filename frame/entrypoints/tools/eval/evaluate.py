"""Evaluates a server or an engine on the seeded tasks: `evaluate` asks an `EvalBackend` and returns
a `Report` of scores by task, and of recall by context length.

Used by `frame eval`. Must not know HTTP, an engine or a tokenizer.
"""

import ast
import asyncio
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from frame.entrypoints.tools.eval.tasks import RECALL_BUCKETS, TASKS, Example, Message, make_examples
from frame.host.progress import Advance, show_progress

_ALLOW_INCOMPLETE_INPUT = 0x4000  # CPython's flag of that name, which only `codeop` exports, undocumented
_PARSE_ONLY = ast.PyCF_ONLY_AST | _ALLOW_INCOMPLETE_INPUT


class EvalBackend(Protocol):
    """An evaluated model: greedy sampling, and text without special tokens."""

    async def complete_chat(self, messages: Sequence[Message], max_tokens: int) -> str:
        """The assistant's next message."""
        ...

    async def complete(self, prompt: str, max_tokens: int) -> str:
        """The continuation of `prompt`, without `prompt` itself."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """One example and the answer. error: the failure of the request, or empty."""

    example: Example
    answer: str
    correct: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """The number of correct answers of one task or context length."""

    name: str
    samples: int
    correct: int
    errors: int

    @property
    def rate(self) -> float:
        """Ratio of correct answers, 0 to 1."""
        return self.correct / self.samples if self.samples else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an evaluation: scores by task, recall by context tokens, and all outcomes."""

    seed: int
    seconds: float
    tasks: list[Score]
    recall_by_length: list[Score]
    outcomes: list[Outcome] = field(repr=False)

    def score(self, task: str) -> float:
        """Ratio of correct answers of `task`, 0 to 1."""
        return next(score.rate for score in self.tasks if score.name == task)

    def failures(self, task: str | None = None) -> list[Outcome]:
        """The outcomes that are not correct, of one task or of all."""
        return [item for item in self.outcomes if not item.correct and task in (None, item.example.task)]

    def to_json(self) -> dict[str, object]:
        """The scores as plain data."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "tasks": {score.name: {**asdict(score), "rate": score.rate} for score in self.tasks},
            "recall_by_length": {score.name: {**asdict(score), "rate": score.rate} for score in self.recall_by_length},
        }

    def table(self) -> str:
        """The scores as a table in text."""
        lines = [f"{'task':<22}{'exact':>8}{'samples':>9}{'errors':>8}"]
        for score in self.tasks:
            lines.append(_table_line(score.name, score))
            if score.name == "recall":
                lines += [_table_line(f"  {part.name} tokens", part) for part in self.recall_by_length if part.samples]
        first_error = next((item.error for item in self.outcomes if item.error), "")
        return "\n".join([*lines, *([f"first error: {first_error}"] if first_error else [])])


def _table_line(name: str, score: Score) -> str:
    return f"{name:<22}{100 * score.rate:>7.1f}%{score.samples:>9}{score.errors:>8}"


def _score(name: str, outcomes: Sequence[Outcome]) -> Score:
    return Score(name, len(outcomes), sum(item.correct for item in outcomes), sum(bool(item.error) for item in outcomes))


def _recall_scores(outcomes: Sequence[Outcome]) -> list[Score]:
    scores = []
    for index, (low, high) in enumerate(RECALL_BUCKETS):
        first, last = index == 0, index == len(RECALL_BUCKETS) - 1
        inside = [
            item
            for item in outcomes
            if item.example.task == "recall"
            and (first or item.example.context_tokens >= low)
            and (last or item.example.context_tokens < high)
        ]
        scores.append(_score(f"{low}-{high}", inside))
    return scores


async def _answer(backend: EvalBackend, example: Example, gate: asyncio.Semaphore, advance: Advance) -> Outcome:
    try:
        return await _ask(backend, example, gate)
    finally:
        advance(1)


async def _ask(backend: EvalBackend, example: Example, gate: asyncio.Semaphore) -> Outcome:
    async with gate:
        try:
            if example.messages:
                answer = await backend.complete_chat(example.messages, example.max_tokens)
            else:
                answer = await backend.complete(example.prompt, example.max_tokens)
        except Exception as error:  # noqa: BLE001 - any exception of a backend counts as a failed request
            return Outcome(example, "", False, f"{type(error).__name__}: {error}")
    return Outcome(example, answer, is_correct(example, answer))


async def evaluate(backend: EvalBackend, tasks: Sequence[str] = TASKS, samples: int = 100, seed: int = 0, concurrency: int = 32) -> Report:
    """Ask `samples` examples of each task, at most `concurrency` at a time, score the answers and
    show the progress. The examples depend only on tasks, samples and seed. A failed request counts
    as not correct."""
    examples = [example for task in tasks for example in make_examples(task, samples, seed)]
    gate = asyncio.Semaphore(concurrency)
    begun = time.perf_counter()
    with show_progress("evaluating", len(examples)) as advance:
        outcomes = list(await asyncio.gather(*(_answer(backend, example, gate, advance) for example in examples)))
    seconds = time.perf_counter() - begun
    by_task = [_score(task, [item for item in outcomes if item.example.task == task]) for task in tasks]
    return Report(seed, seconds, by_task, _recall_scores(outcomes) if "recall" in tasks else [], outcomes)


def is_correct(example: Example, answer: str) -> bool:
    """Whether `reply`, without surrounding white space, is the expected text; of Python, see
    `python_parses`."""
    if example.task == "python":
        return python_parses(example.prompt, answer)
    return answer.strip() == example.expected


def python_parses(prompt: str, completion: str) -> bool:
    """Whether prompt and completion are the beginning of a valid Python file. Both are cut at the
    last line end; while the parser reports an incomplete program (an open bracket or string, a
    header without a block), the last line is dropped. The rest must parse, with a line of the
    completion."""
    lines = (prompt + completion).split("\n")[:-1]
    while True:
        text = "\n".join([*lines, ""])
        if not text[len(prompt) :].strip():
            return False
        error = _syntax_error(text)
        if error is None:
            return True
        if "incomplete input" not in error:
            return False
        lines.pop()


def _syntax_error(text: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown escape in a string is not a syntax error
            compile(text, "completion", "exec", flags=_PARSE_ONLY, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None
