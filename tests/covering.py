"""Picks, of the cases of a parametrised test, few that have every value of every parameter, or
every pair of values of two parameters.

The tests' conftest does so for tests marked `covering` and `pairwise`, whose other cases run in
`make test-full`, and `tests.interpreter` for all that it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

STRENGTHS = {"covering": 1, "pairwise": 2}  # parameters whose values are combined, by marker


def find_cover(items: Iterable[pytest.Item], strength: int = 1) -> set[pytest.Item]:
    """Of the cases of each test, few that have each combination of values of `strength` parameters
    which any of its cases has; all where a test has no more parameters than that."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    return {each[index] for each in cases.values() for index in cover([_list_values(item) for item in each], strength)}


def cover(cases: Sequence[frozenset[tuple[str, ...]]], strength: int) -> list[int]:
    """Of the cases, those that add the most combinations to the ones before them, and of these the
    one whose other combinations have been used least. -> their indices."""
    held = [frozenset(combinations(sorted(case), min(strength, len(case)))) for case in cases]
    missing, uses, kept = set().union(*held), Counter[tuple[tuple[str, ...], ...]](), list[int]()
    while missing:
        kept.append(max(range(len(held)), key=lambda index: (len(held[index] & missing), -sum(uses[each] for each in held[index]))))
        missing -= held[kept[-1]]
        uses.update(held[kept[-1]])
    return kept


def _list_values(item: pytest.Item) -> frozenset[tuple[str, ...]]:
    """Names and values of each parametrisation, and of each fixture's parameter."""
    spec = getattr(item, "callspec", None)
    params: dict[str, Any] = dict(spec.params) if spec else {"": item.nodeid}
    values = set()
    for mark in item.iter_markers("parametrize"):
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        values.add((*names, *(repr(params.pop(name)) for name in names)))
    return frozenset(values | {(name, repr(value)) for name, value in params.items()})


def mark_exhaustive(items: Iterable[pytest.Item]) -> None:
    """Give `exhaustive` to the cases that `covering` and `pairwise` leave out."""
    for mark, strength in STRENGTHS.items():
        marked = [item for item in items if item.get_closest_marker(mark) and not item.get_closest_marker("soak")]
        kept = find_cover(marked, strength)
        for item in marked:
            if item not in kept:
                item.add_marker("exhaustive")
