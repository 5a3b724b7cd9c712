"""Mutants: plugins with one deliberate bug each, which show that a conformance suite finds bugs.

A file per kind, `tests/testing/mutants/KIND.py`, holds the mutants in `MUTANTS`:

    mutant = MUTANTS = MutantList("attention_backend", reference=PlainAttention, capabilities=...)

    @mutant
    class IgnoresWindow(PlainAttention):
        '''Computes full attention in layers with a sliding window.'''

The docstring is the sentence that says what is wrong. The reference is the correct plugin, which
must pass all checks. `@mutant.survives("reason")` marks a bug that no check can find.

`python -m tests.testing.test_mutants [KIND]` runs the suites and writes the results to
`tests/testing/mutants/KIND.json`; `make docs` makes a table of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from frame.core.interfaces.kinds import KINDS
from frame.core.interfaces.plugin import Anything, PluginRecord
from frame.testing import conformance

C = TypeVar("C", bound=type)

__all__ = ["Mutant", "MutantList", "Outcome", "kill_table", "run_suite"]


@dataclass(frozen=True)
class Mutant:
    """A plugin with one deliberate bug. `make` returns its class."""

    name: str
    kind: str
    make: Callable[[], type]
    sentence: str  # what is wrong
    survives: str = ""  # why no check finds the bug; "": one does
    capabilities: Any = field(default_factory=Anything)
    options: Any = None  # the validated options

    def subject(self) -> conformance.Subject:
        """The class as a suite takes it."""
        record = PluginRecord(self.kind, self.name, f"mutants:{self.name}", KINDS[self.kind].api, self.capabilities)
        return conformance.Subject(record, self.make(), self.options, conformance.Setting())


class MutantList:
    """The mutants of one kind, in the order of their classes. A class decorator adds one."""

    def __init__(self, kind: str, reference: type, capabilities: Any = None, options: Any = None) -> None:
        self._defaults = Mutant("reference", kind, lambda: reference, "", capabilities=capabilities or Anything(), options=options)
        self._found: list[Mutant] = []

    def __call__(self, target: C, survives: str = "", **changes: Any) -> C:
        """Add a class; `changes` are fields of `Mutant`."""
        sentence = " ".join((inspect.getdoc(target) or "").split())
        self._found.append(
            replace(self._defaults, name=target.__name__, make=lambda: target, sentence=sentence, survives=survives, **changes)
        )
        return target

    def survives(self, reason: str) -> Callable[[type], type]:
        """Adds a class whose bug no check finds, and why."""
        return lambda target: self(target, survives=reason)

    def using(self, **changes: Any) -> Callable[[type], type]:
        """Adds a class with other `capabilities` or `options`."""
        return lambda target: self(target, **changes)

    @property
    def reference(self) -> Mutant:
        """The correct plugin."""
        return self._defaults

    def __iter__(self) -> Iterator[Mutant]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Outcome(NamedTuple):
    """The result of one check."""

    check: str
    result: str  # "passed", "failed", "skipped"
    message: str = ""


def run_suite(subject: conformance.Subject, first_failure: bool = False, only: str = "") -> list[Outcome]:
    """All checks of the plugin's kind, those up to the first that fails, or the one of a name."""
    found: list[Outcome] = []
    try:
        for check in conformance.checks(subject.record.kind, subject):
            if only in ("", check.name):
                found.append(_run(check))
            if first_failure and found and found[-1].result == "failed":
                break
    except Exception as error:  # noqa: BLE001 - the plugin may raise where the suite asks it for its cases
        found.append(Outcome("suite", "failed", f"{type(error).__name__}: {error}"))
    return found


def _run(check: conformance.Check) -> Outcome:
    try:
        check.run()
    except conformance.SkipCheck as reason:
        return Outcome(check.name, "skipped", str(reason))
    except Exception as error:  # noqa: BLE001 - a plugin that raises is found
        prefix = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return Outcome(check.name, "failed", f"{prefix}{error}")
    return Outcome(check.name, "passed")


def kill_table(mutants: Iterable[Mutant]) -> dict[str, dict[str, str]]:
    """For each mutant: what is wrong, the first check that fails (""; it survives), and the reason
    why it may survive."""
    found = {}
    for mutant in mutants:
        failed = [outcome.check for outcome in run_suite(mutant.subject(), first_failure=True) if outcome.result == "failed"]
        found[mutant.name] = {"sentence": mutant.sentence, "killed_by": next(iter(failed), ""), "survives": mutant.survives}
    return found
