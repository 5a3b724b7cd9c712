"""Picks, of the cases of a parametrised test, few that have every value of every parameter.

The tests' conftest does so for tests marked `covering`, whose other cases run in `make soak`, and
`tests.interpreter` for all that it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def find_cover(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Of the cases of each test, few that have every value of every parameter."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    return {item for each in cases.values() for item in _cover(each)}


def _cover(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of the cases of one test, those that add the most values to the ones before them, and of
    these the one whose other values have been used least."""
    values = {item: _list_values(item) for item in items}
    missing, uses, kept = set[tuple[str, ...]]().union(*values.values()), Counter[tuple[str, ...]](), []
    while missing:
        kept.append(max(items, key=lambda item: (len(values[item] & missing), -sum(uses[value] for value in values[item]))))
        missing -= values[kept[-1]]
        uses.update(values[kept[-1]])
    return kept


def _list_values(item: pytest.Item) -> set[tuple[str, ...]]:
    """Names and values of each parametrisation, and of each fixture's parameter."""
    spec = getattr(item, "callspec", None)
    params: dict[str, Any] = dict(spec.params) if spec else {"": item.nodeid}
    values = set()
    for mark in item.iter_markers("parametrize"):
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        values.add((*names, *(repr(params.pop(name)) for name in names)))
    return values | {(name, repr(value)) for name, value in params.items()}
