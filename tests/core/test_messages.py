"""Token ids as an array equal numpy's own conversion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frame.core.messages import as_array


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_it_equals_numpy(ids: list[int]) -> None:
    array = as_array(ids)
    assert array.dtype == np.int32 and array.flags.writeable
    assert array.tolist() == ids == as_array(tuple(ids)).tolist()


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 10**30])
def test_an_id_beyond_32_bits_is_refused(wrong: int) -> None:
    with pytest.raises(OverflowError, match="does not fit in 32 bits"):
        as_array([1, wrong])
