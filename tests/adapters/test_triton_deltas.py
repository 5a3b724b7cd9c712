"""The sizes of programs that `TritonDeltas` picks; tests/kernels/lora.py checks its products."""

from __future__ import annotations

from itertools import product

import pytest

from tests.interpreter import needs_triton


@needs_triton
@pytest.mark.parametrize("splits", [(4096, 1024, 1024), (14336, 14336), (7,)], ids=str)
@pytest.mark.parametrize("inputs", [33, 2048, 14336])
@pytest.mark.parametrize("shared", [99 << 10, 227 << 10])
def test_sizes_are_powers_of_two_and_fit_shared_memory(shared: int, inputs: int, splits: tuple[int, ...]) -> None:
    from frame.kernels.lora.products import choose_sizes

    for block, max_pages, value_bytes in product((1, 8, 16, 32, 64), (1, 3, 4, 32), (2, 4)):
        sizes = choose_sizes(block, inputs, splits, max_pages, value_bytes, shared)
        numbers = (sizes.splits, sizes.inputs, sizes.columns, sizes.outputs, sizes.gated_outputs)
        assert all(number > 0 and number & (number - 1) == 0 for number in numbers)
        assert sizes.gated_outputs >= 16 and sizes.columns % 16 == 0
        assert (block + sizes.columns) * sizes.inputs * value_bytes * sizes.stages <= shared
