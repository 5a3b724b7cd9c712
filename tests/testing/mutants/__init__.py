"""Mutants: plugins with one deliberate bug each, which show that a conformance suite finds bugs.

A file per kind, `KIND.py`, holds the mutants in `MUTANTS`:

    mutant = MUTANTS = MutantList("attention_backend", reference=PlainAttention, capabilities=...)

    @mutant
    class IgnoresWindow(PlainAttention):
        '''Computes full attention in layers with a sliding window.'''

The docstring is the sentence that says what is wrong. The reference is the correct plugin, which
must pass all checks. `@mutant.survives("reason")` marks a bug that no check can find.

`python -m tests.testing.test_mutants [KIND]` runs the suites and writes the results to `KIND.json`;
`make docs` makes a table of them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from frame.core.interfaces.plugin import Anything, PluginRecord
from frame.interfaces.kinds import KINDS

if TYPE_CHECKING:
    from frame.testing import conformance

C = TypeVar("C", bound=type)


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
        from frame.testing import conformance  # imports pydantic, whose time is not a command's

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

    def each(self, base: type, attribute: str, *bugs: tuple[str, str, Any]) -> None:
        """Adds a class for each (name, what is wrong, value of the attribute)."""
        for name, sentence, value in bugs:
            self(type(name, (base,), {"__module__": base.__module__, "__doc__": sentence, attribute: value}))

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


def kill_table(mutants: Iterable[Mutant]) -> dict[str, dict[str, str]]:
    """For each mutant: what is wrong, the first check that fails (""; it survives), and the reason
    why it may survive."""
    from frame.testing import conformance

    found = {}
    for mutant in mutants:
        failed = [outcome.check for outcome in conformance.run_suite(mutant.subject(), first_failure=True) if outcome.result == "failed"]
        found[mutant.name] = {"sentence": mutant.sentence, "killed_by": next(iter(failed), ""), "survives": mutant.survives}
    return found


def kinds() -> list[str]:
    """The kinds with mutants."""
    return [found.name for found in pkgutil.iter_modules(__path__) if found.name in KINDS]


def load_mutants(kind: str) -> MutantList:
    """The mutants of a kind. Raises ModuleNotFoundError for a kind without."""
    found: MutantList = importlib.import_module(f"{__name__}.{kind}").MUTANTS
    return found
