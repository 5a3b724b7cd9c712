"""The mutants of each plugin kind, and the recorded results of the suites on them."""

from __future__ import annotations

import importlib
import pkgutil

from frame.core.interfaces.kinds import KINDS
from frame.testing.mutants import MutantList


def kinds() -> list[str]:
    """The kinds with mutants."""
    return [found.name for found in pkgutil.iter_modules(__path__) if found.name in KINDS]


def load_mutants(kind: str) -> MutantList:
    """The mutants of a kind. Raises ModuleNotFoundError for a kind without."""
    found: MutantList = importlib.import_module(f"{__name__}.{kind}").MUTANTS
    return found
