"""`TorchCalls`: counts calls of torch, and finds those for which the host waits. Used by the
conformance suites of plugins whose calls must be few and must not wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions and methods that wait for the device.
WAITS = frozenset((
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "is_nonzero", "equal", "allclose", "item", "tolist", "numpy",
    "cpu", "synchronize", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "__iter__",
))  # fmt: skip


class TorchCalls(TorchFunctionMode):
    """Counts calls of torch, and notes those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.waits = 0, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.count += name != "__get__"  # attributes
        if name in WAITS:
            self.waits.add(name)
        elif name in ("__getitem__", "__setitem__"):
            self.waits |= set(_waiting_indices(args))
        elif name == "repeat_interleave" and not (kwargs or {}).get("output_size") and _has_counts(args, kwargs or {}):
            self.waits.add("repeat_interleave without output_size")
        return func(*args, **(kwargs or {}))


def _has_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `repeat_interleave` has its counts in a tensor, whose sum is the size."""
    return (len(args) == 1 and not kwargs) or isinstance(kwargs.get("repeats", args[1] if len(args) > 1 else None), torch.Tensor)


def _waiting_indices(args: Sequence[Any]) -> Iterator[str]:
    """The indices of `x[index]` or `x[index] = value` whose values the host needs."""
    for index in args[1] if isinstance(args[1], tuple) else (args[1],):
        if isinstance(index, torch.Tensor):
            if index.dtype == torch.bool and not (len(args) > 2 and not getattr(args[2], "ndim", 0)):
                yield "an index of booleans"
            elif not index.ndim:
                yield "an index of one number in a tensor"
        elif isinstance(index, slice) and any(isinstance(end, torch.Tensor) for end in (index.start, index.stop, index.step)):
            yield "a slice whose ends are in a tensor"
