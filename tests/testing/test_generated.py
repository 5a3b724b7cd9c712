"""The generator of mutants changes what its operators name, and a suite kills what it makes. The
whole runs are `python -m tests.testing.generated`."""

from __future__ import annotations

import ast

import pytest

from frame.interfaces.kinds import KINDS
from tests.testing import generated

SOURCE = '''
import torch

class Member:
    """A docstring."""

    def compute(self, x, limit=3):
        if x.size(0) < limit:
            self.kept.append(x)
        return torch.sub(x, limit, alpha=2).to(torch.float32)

def help_it(first, second):
    return first

class Other:
    def compute(self, x):
        return x + 1
'''


class Member:
    """Stands for the class of the source."""


def find_sites() -> dict[str, generated.Site]:
    return {str(site): site for site in generated.find_sites(ast.parse(SOURCE), Member)}


def test_operators_find_their_places() -> None:
    assert sorted(find_sites()) == [
        "comparison in compute: `x.size(0) < limit`",
        "dropped argument in compute: `torch.sub(x, limit, alpha=2)`",
        "dropped statement in compute: `self.kept.append(x)`",
        "off by one in compute: `0`",
        "off by one in compute: `2`",
        "stale cache in compute: `compute`",
        "stale cache in help_it: `help_it`",
        "swapped arguments in compute: `torch.sub(x, limit, alpha=2)`",
        "wrong dtype in compute: `torch.float32`",
    ]


@pytest.mark.parametrize(
    ("site", "line"),
    [
        ("comparison in compute: `x.size(0) < limit`", "if x.size(0) <= limit:"),
        ("dropped argument in compute: `torch.sub(x, limit, alpha=2)`", "return torch.sub(x, limit).to(torch.float32)"),
        ("dropped statement in compute: `self.kept.append(x)`", "pass"),
        ("off by one in compute: `2`", "return torch.sub(x, limit, alpha=3).to(torch.float32)"),
        ("stale cache in compute: `compute`", "@keep_first_result"),
        ("swapped arguments in compute: `torch.sub(x, limit, alpha=2)`", "return torch.sub(limit, x, alpha=2).to(torch.float32)"),
        ("wrong dtype in compute: `torch.float32`", "return torch.sub(x, limit, alpha=2).to(torch.float16)"),
    ],
)
def test_operators_change_their_place_alone(site: str, line: str) -> None:
    changed = ast.unparse(generated.change(ast.parse(SOURCE), find_sites()[site])).splitlines()
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    assert [each.strip() for each in changed if each not in plain] == [line]


def test_a_stale_cache_returns_the_first_result() -> None:
    class Adder:
        @generated.keep_first_result
        def add(self, x: list[int]) -> int:
            return sum(x)

    one = Adder()
    assert [one.add([1, 2]), one.add([5, 5]), one.add([1]), Adder().add([4, 4])] == [3, 3, 1, 8]


def test_mutants_of_a_small_member_run() -> None:
    found = generated.run_kind("eviction_policy", sample=2, seed=1)
    assert found["made"] == 2 and found["sites"] >= 2
    assert len(found["survivors"]) < 2, "of two changes of a policy, the suite finds one at least"


def test_members_are_of_kinds_that_exist() -> None:
    assert set(generated.MEMBERS) <= set(KINDS)
