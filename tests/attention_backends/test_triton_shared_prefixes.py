"""Detection of rows with a common prefix in the `triton` backend."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from frame.core.interfaces.batch import HostView
from frame.entrypoints.tools.bench.paged_batches import Rows, lay_out

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

PAGE = 16


def host_of(lengths: list[int], groups: tuple[tuple[int, int], ...], seed: int = 0) -> HostView:
    pages = lay_out(Rows.of(lengths), PAGE, np.random.default_rng(seed), groups=groups)
    return HostView(pages.slots, np.ones(len(lengths), np.int32), np.asarray(lengths, np.int32), pages.table)


def found_groups(lengths: list[int], groups: tuple[tuple[int, int], ...]) -> dict[int, set[int]] | None:
    """Rows by number of shared keys."""
    from frame.attention_backends.triton.shared_prefixes import group_prefixes

    found = group_prefixes(host_of(lengths, groups), len(lengths), PAGE)
    if found is None:
        return None
    keys, place, position, sizes, order = found
    for row in np.flatnonzero(keys):
        assert order[place[row]] == row
        members = order[place[row] - position[row] :][: sizes[row]]
        assert (keys[members] == keys[row]).all()
        assert sorted(position[members]) == list(range(sizes[row]))
    return {int(count): set(np.flatnonzero(keys == count).tolist()) for count in set(keys.tolist()) - {0}}


def test_rows_with_a_common_prefix_are_a_group() -> None:
    assert found_groups([900, 910, 1000, 890, 40], ((4, 50),)) is None  # saves too little
    assert found_groups([1900, 1910, 2000, 1890, 40], ((4, 100),)) == {1600: {0, 1, 2, 3}}
    assert found_groups([1900, 1910, 2000], ((3, 100),)) is None  # too few rows
    assert found_groups([200] * 60, ((60, 10),)) is None  # too short a prefix


def test_every_row_keeps_a_key_of_its_own() -> None:
    assert found_groups([1601, 1700, 1700, 1700], ((4, 100),)) == {1600: {0, 1, 2, 3}}
    assert found_groups([1600, 1700, 1700, 1700], ((4, 100),)) == {1584: {0, 1, 2, 3}}


def test_groups_of_different_lengths() -> None:
    assert found_groups([5000] * 13, ((4, 90), (1, 0), (8, 200))) == {1440: {0, 1, 2, 3}, 3200: set(range(5, 13))}


def test_deeper_groups_win_where_they_save_more() -> None:
    """All rows share 20 pages, and each half of them 250."""
    from frame.attention_backends.triton.shared_prefixes import group_prefixes

    host = host_of([5000] * 16, ((8, 250), (8, 250)))
    host.page_table[host.slots[8:], :20] = host.page_table[host.slots[0], :20]
    found = group_prefixes(host, 16, PAGE)
    assert found is not None
    assert (found[0] == 4000).all()
    assert (found[3] == 8).all()


def test_groups_are_kept_while_the_rows_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from frame.attention_backends.triton import shared_prefixes

    calls = []
    real = shared_prefixes.group_prefixes
    monkeypatch.setattr(shared_prefixes, "group_prefixes", lambda *given: calls.append(0) or real(*given))
    shared = shared_prefixes.SharedPrefixes(torch.device("cpu"), 64)
    host = host_of([1900, 1910, 2000, 1890], ((4, 100),))

    def update(grown: int, rows: int = 4) -> None:
        shared.update_groups(HostView(host.slots, host.query_lens, host.seq_lens + grown, host.page_table), rows, PAGE)

    update(0)
    update(1)
    update(2)
    assert len(calls) == 1
    assert shared.tensor[0, :5].tolist() == [1600] * 4 + [0]
    update(2)  # what another request in one of the slots looks like
    assert len(calls) == 2
    update(3, rows=3)
    assert shared.tensor.any().item() is False
    update(4)
    assert shared.tensor[0, :4].tolist() == [1600] * 4
    host.page_table[host.slots[0], 99] += 1  # another request, longer by one, that shares fewer keys
    update(5)
    assert shared.tensor[0, :4].tolist() == [1584] * 4


def test_rows_share_no_more_than_their_least_lengths() -> None:
    from frame.attention_backends.triton.shared_prefixes import group_prefixes

    host = host_of([1700] * 4, ((4, 100),))
    bounded = replace(host, min_lens=np.array([1585, 1700, 1700, 1700], np.int32))
    for each, keys in ((host, 1600), (bounded, 1584)):
        found = group_prefixes(each, 4, PAGE)
        assert found is not None and (found[0] == keys).all()
