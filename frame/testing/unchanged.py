"""Checks that a plugin writes to nothing that it is given. Used by the conformance suites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

Value = torch.Tensor | np.ndarray


@contextmanager
def unchanged(values: Mapping[str, Value], who: str) -> Iterator[None]:
    """Raises AssertionError at the end if a byte of the values changed inside; `values` by what
    they are called in the sentence."""
    before = {name: _bytes(value) for name, value in values.items()}
    yield
    changed = [name for name, value in values.items() if not torch.equal(_bytes(value), before[name])]
    assert not changed, f"{who} wrote to {' and '.join(changed)}; it may only read what it is given"


def _bytes(value: Value) -> torch.Tensor:
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value.detach()
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
