"""The fake runner of several cache groups notices what a wrong scheduler does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from frame.core.interfaces.cache_groups import PagePool
from frame.testing.fake_runner import FakeRunnerError
from tests.core.scheduling.grouped_rig import GroupedFakeRunner
from tests.testing.test_fake_runner import extend

POOLS = (PagePool("tokens", 8, 2), PagePool("window", 16, 2, 3), PagePool("snapshot", 4, 0))
TOKENS = [3, 1, 4, 1, 5, 9]


def step(number: int, cached: int, count: int, window: list[int], **changes: Any) -> Any:
    """A chunk of `TOKENS` in slot 0; `window`: the pages of the window group, from the first on."""
    values = {
        "group_pages": [np.array([(0, i, page) for i, page in enumerate(window)], np.int32), np.array([[0, 0, 1]], np.int32)],
        "samples": np.array([cached + count == len(TOKENS)]),
        "num_scheduled": np.array([count], np.int32),
        "token_ids": np.array(TOKENS[cached : cached + count], np.int32),
        **({"setups": []} if cached else {}),
        **changes,
    }
    return extend(number, 0, TOKENS, [1, 2, 3], cached, **values)


def make() -> GroupedFakeRunner:
    runner = GroupedFakeRunner(POOLS, 8, 2, 2, 8, 50)
    runner.launch(step(0, 0, 4, [1, 2])).wait()
    return runner


def test_a_window_and_a_state_go_on() -> None:
    assert len(make().launch(step(1, 4, 2, [0, 2, 3])).wait().token_ids) == 1


def test_a_window_page_that_was_freed_too_early() -> None:
    with pytest.raises(FakeRunnerError, match="no window page"):
        make().launch(step(1, 4, 2, [0, 0, 3]))


def test_a_window_page_of_other_tokens() -> None:
    with pytest.raises(FakeRunnerError, match="a wrong token in its window at position 2"):
        make().launch(step(1, 4, 2, [0, 1, 3]))


def test_a_row_that_keeps_every_page() -> None:
    runner = GroupedFakeRunner((POOLS[0], PagePool("window", 64, 1, 1)), 64, 1, 1, 64, 50)
    tokens = list(range(20))
    pages = [np.array([(0, i, i + 1) for i in range(20)], np.int32)]
    first = {"num_scheduled": np.array([19], np.int32), "token_ids": np.arange(19, dtype=np.int32), "samples": np.array([False])}
    runner.launch(extend(0, 0, tokens, list(range(1, 21)), 0, group_pages=pages, **first)).wait()
    with pytest.raises(FakeRunnerError, match="holds 20 tokens of a window of 1"):
        runner.launch(extend(1, 0, tokens, [], 19, setups=[], group_pages=[]))


def test_a_state_of_other_tokens() -> None:
    loads = np.array([[0, 1]], np.int32)
    with pytest.raises(FakeRunnerError, match="a state of other tokens"):
        make().launch(step(1, 4, 2, [0, 2, 3], state_loads=loads))


def test_a_state_that_is_copied_twice() -> None:
    with pytest.raises(FakeRunnerError, match="states are copied to"):
        make().launch(step(1, 4, 2, [0, 2, 3], state_saves=np.array([[1, 2], [1, 2]], np.int32)))
