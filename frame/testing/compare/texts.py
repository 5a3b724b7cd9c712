"""Compares two parsers on the same texts, and two grammar backends on the same grammars; and
`Verdict`, the result of any comparison. Used by `frame.testing.compare.plugins`. Must not know a
plugin by name."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.sampling import GRAMMAR_KINDS, GrammarContext
from frame.testing.conformance import SkipCheck
from frame.testing.contexts import PARSER
from frame.testing.parsing.reasoning_parser import find_replies, read_reasoning
from frame.testing.parsing.texts import noise
from frame.testing.parsing.tool_call_parser import ARGUMENTS, PLAIN, find_calls, make_rule, read_calls, read_values
from frame.testing.sampling.grammar_backend import WALKS, write_text
from frame.testing.sampling.grammar_cases import FINITE, JSON_CASES, OPEN, Language, Vocabulary
from frame.testing.sampling.grammar_run import Run, takes_text

if TYPE_CHECKING:
    from frame.core.interfaces.plugin import PluginRecord
    from frame.plugins.registry import Registry

Read = Callable[[Iterable[str]], Any]  # pieces of a text -> what a parser makes of it
Text = tuple[str, Callable[[Any], Read]]  # and how a parser, given its constructor, reads it


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison on one subject, such as a model, found. `problem`: where the two differ;
    `skipped`: why they were not compared."""

    subject: str
    milliseconds: tuple[float, float] = (0.0, 0.0)  # the plugin's, the reference's
    problem: str = ""
    skipped: str = ""
    unit: str = "a step"  # what takes so many milliseconds

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.subject}: skipped: {self.skipped}"
        ours, other = self.milliseconds
        return f"{self.subject}: {self.problem or 'equal'}; {ours:.2f} ms {self.unit}, the reference {other:.2f} ms"


def compare_parsers(record: PluginRecord, reference: PluginRecord, registry: Registry) -> Iterator[Verdict]:
    """Read the same texts with two parsers of one kind, whole and by character: noise, texts
    without marks, and texts that the grammar of either parser allows."""
    make, other = (partial(registry.load(each), PARSER, registry.options(each, {})) for each in (record, reference))
    read, written = (read_calls, _write_calls) if record.kind == "tool_call_parser" else (read_reasoning, _write_replies)

    def plain(make: Any) -> Read:
        return partial(read, make)

    groups: list[tuple[str, list[Text]]] = [
        ("noise", [(text, plain) for text in noise()]),
        ("text without marks", [(text, plain) for text in PLAIN]),
        (f"texts that {reference.name} allows", written(other)),
        (f"texts that {record.name} allows", written(make)),
    ]
    for name, texts in groups:
        if not texts:
            yield Verdict(name, skipped="the parser has no grammar to write them by")
            continue
        seconds, problem = [0.0, 0.0], ""
        for text, reader in texts:
            results = []
            for i, each in enumerate((make, other)):
                began = time.perf_counter()
                results.append(_try(reader(each), text))
                seconds[i] += time.perf_counter() - began
            if results[0] != results[1] and not problem:
                problem = f"differs: {text!r} is read as {results[0]}, by the reference as {results[1]}"
        yield Verdict(name, (1000 * seconds[0] / len(texts), 1000 * seconds[1] / len(texts)), problem, unit="a text")


def _try(read: Read, text: str) -> Any:
    """What a parser makes of a text in one piece and by character; the error that it raises."""
    try:
        return [read([text]), read(text)]
    except Exception as error:  # noqa: BLE001 - a parser may raise any error, and both may raise the same
        return f"{type(error).__name__}: {error}"


def _write_calls(make: Any) -> list[Text]:
    """Texts with calls, alone and within other text. Arguments are compared as values."""

    def read(functions: Sequence[Any], make: Any) -> Read:
        def values(pieces: Iterable[str]) -> Any:
            content, calls = read_calls(make, pieces, functions)
            return content, read_values(calls)

        return values

    texts: list[Text] = []
    for arguments in ARGUMENTS:
        rule = make_rule(arguments)
        reader = partial(read, rule.functions)
        for text in find_calls(make, rule):
            texts += [(text, reader), (f"Hm. {text} So.", reader), (text[: len(text) // 2], reader)]
    return texts


def _write_replies(make: Any) -> list[Text]:
    """Texts with reasoning and an answer."""

    def read(prompt_end: str, may_think: bool, make: Any) -> Read:
        return lambda pieces: read_reasoning(make, pieces, prompt_end, may_think)

    try:
        return [(text, partial(read, prompt_end, may_think)) for text, prompt_end, may_think in find_replies(make)]
    except SkipCheck:
        return []


def compare_grammars(record: PluginRecord, reference: PluginRecord, registry: Registry) -> Iterator[Verdict]:
    """Compare the languages of two grammar backends on the same grammars: each judges known texts,
    and texts drawn from the masks of either. A JSON text counts as taken if one way to write its
    whitespace is."""
    vocabulary = Vocabulary.load()
    context = GrammarContext(vocabulary.tokenizer, vocabulary.size)
    ours, other = (_make_run(each, registry, context, vocabulary) for each in (record, reference))
    for case in (*FINITE, *OPEN, *JSON_CASES):
        missing = [each.name for each, run in ((record, ours), (reference, other)) if case.kind not in run.kinds]
        if missing:
            yield Verdict(case.name, skipped=f"{' and '.join(missing)} has no grammars of the kind {case.kind}")
            continue
        try:
            yield _compare_case(ours, other, case)
        except AssertionError as error:
            yield Verdict(case.name, problem=f"differs: {error}", unit="a text")


def _make_run(record: PluginRecord, registry: Registry, context: GrammarContext, vocabulary: Vocabulary) -> Run:
    target, options = registry.load(record), registry.options(record, {})
    return Run(lambda: target(context, options), getattr(record.capabilities, "kinds", GRAMMAR_KINDS), vocabulary)


def _compare_case(ours: Run, other: Run, case: Language) -> Verdict:
    texts = {text: None for ways in case.valid for text in ways} | dict.fromkeys(case.invalid)
    texts |= dict.fromkeys(text.decode() for text in sorted(case.texts))
    for run in (ours, other):
        drawn = (write_text(run, case, random.Random(seed)) for seed in range(WALKS))
        texts |= dict.fromkeys(text for text in drawn if text is not None)
    seconds, problem = [0.0, 0.0], ""
    for text in texts:
        judged = []
        for i, run in enumerate((ours, other)):
            began = time.perf_counter()
            judged.append(any(takes_text(run, case, way) for way in _ways_to_write(case, text)))
            seconds[i] += time.perf_counter() - began
        if judged[0] != judged[1] and not problem:
            takes = ("refuses", "takes")
            problem = f"differs: it {takes[judged[0]]} {text!r}, the reference {takes[judged[1]]} it"
    count = max(1, len(texts))
    return Verdict(case.name, (1000 * seconds[0] / count, 1000 * seconds[1] / count), problem, unit="a text")


def _ways_to_write(case: Language, text: str) -> list[str]:
    """A text, and where the language is JSON the same value with other whitespace."""
    if not case.kind.startswith("json"):
        return [text]
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    return [text, json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))]
