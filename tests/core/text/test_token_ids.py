"""Ids as an array are numpy's own conversion, at a third of its time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frame.core.text.token_ids import as_array


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_it_is_what_numpy_makes_of_the_list(ids: list[int]) -> None:
    found = as_array(ids)
    assert found.dtype == np.int32 and found.flags.writeable
    assert found.tolist() == ids == as_array(tuple(ids)).tolist()


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 10**30])
def test_an_id_beyond_32_bits_is_said(wrong: int) -> None:
    with pytest.raises(OverflowError, match="does not fit in 32 bits"):
        as_array([1, wrong])
