"""Checks of tensors: a result equals or is near another, and a plugin writes to nothing that it may
only read. Used by the conformance suites."""

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


def require_form(result: torch.Tensor, expected: torch.Tensor, what: str, dtype: torch.dtype) -> None:
    assert result.shape == expected.shape, f"{what}: the result's shape is {tuple(result.shape)}, not {tuple(expected.shape)}"
    assert result.dtype == dtype, f"{what}: the result's dtype is {result.dtype}, not {dtype}"


def require_near(result: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float, is_relative: bool = True) -> None:
    """Values are finite and differ by `tolerance` at most, if relative of the largest one."""
    assert torch.isfinite(result).all(), f"{what}: the result is not finite; it was computed with values that are not set"
    error = float((result.double() - expected).abs().max()) if result.numel() else 0.0
    error /= max(float(expected.abs().max()), 1e-9) if is_relative and result.numel() else 1.0
    assert error <= tolerance, f"{what}: largest {'relative ' if is_relative else ''}error {error:.2e}, allowed {tolerance:.0e}"
