"""Of a product of parameters, the cases that `covering` and `pairwise` keep have every value, and
every pair of values; the others are `exhaustive`."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import cover

pytest_plugins = ("pytester",)

AXES = {"page": (1, 16, 64), "chunk": (16, 64, 512), "overlap": (False, True), "pool": ("large", "tight"), "prefix": ("radix", "none")}
CASES = [frozenset((name, repr(value)) for name, value in zip(AXES, values, strict=True)) for values in product(*AXES.values())]


def list_combinations(cases: list[frozenset[tuple[str, ...]]], strength: int) -> set[frozenset[tuple[str, ...]]]:
    return {frozenset(each) for case in cases for each in combinations(case, strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 3), (2, 12), (5, len(CASES))])
def test_a_product_is_covered_by_few_cases(strength: int, most: int) -> None:
    kept = [CASES[index] for index in cover(CASES, strength)]
    assert list_combinations(kept, strength) == list_combinations(CASES, strength)
    assert len(kept) == len(set(kept)) <= most


def test_combinations_that_no_case_has_are_not_asked_for() -> None:
    """Cases that the author of a test left out, and values in one case alone."""
    cases = [case for case in CASES if not {("page", "1"), ("pool", "'tight'")} <= case]
    cases.append(frozenset({("page", "128"), ("chunk", "16"), ("overlap", "True"), ("pool", "'large'"), ("prefix", "'none'")}))
    kept = cover(cases, 2)
    assert len(cases) - 1 in kept
    assert list_combinations([cases[index] for index in kept], 2) == list_combinations(cases, 2)


def test_cases_with_fewer_parameters_than_the_strength_are_all_kept() -> None:
    one = [frozenset({("name", value)}) for value in "abc"]
    two = [frozenset({("name", value), ("size", size)}) for value in "ab" for size in "123"]
    assert (cover(one, 2), sorted(cover(two, 2))) == ([0, 1, 2], list(range(6)))


SAMPLE = """
import pytest

@pytest.mark.MARK
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize(("c", "d"), [(0, 0), (1, 1), (2, 2)])
def test_product(a, b, c, d): ...

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_unmarked(a, b, c): ...
"""


CONFTEST = """
from tests.covering import mark_exhaustive

def pytest_collection_modifyitems(items):
    mark_exhaustive(items)
"""


@pytest.mark.parametrize(("mark", "kept"), [("pairwise", 10), ("covering", 3)])  # 9 would do for the pairs
def test_the_others_are_exhaustive(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mark: str, kept: int) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each run would import all installed plugins anew
    pytester.makepyfile(SAMPLE.replace("MARK", mark))
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    exhaustive\n    pairwise\n    covering\n")
    pytester.runpytest_inprocess("-m", "not exhaustive").assert_outcomes(passed=kept + 27, deselected=27 - kept)
    pytester.runpytest_inprocess().assert_outcomes(passed=54)
