"""`TorchCalls`: counts calls of torch, and finds those for which the host waits. `unchanged_torch`:
finds changed settings. Used by the conformance suites of plugins that compute with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from frame.testing.conformance import unchanged_process

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


# What a plugin leaves as it is: how it is read and set, and its value during a check.
SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any], Any], ...] = (
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    ("number of threads", torch.get_num_threads, torch.set_num_threads, 2),
    ("mode of gradients", torch.is_grad_enabled, torch.set_grad_enabled, True),
    ("precision of matmuls", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    ("deterministic mode", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False),
    ("seed", torch.initial_seed, torch.manual_seed, 20_041),
)


@contextmanager
def unchanged_torch(what: str) -> Iterator[None]:
    """Raises AssertionError at the end if the body, which the sentence calls `what`, changed
    settings of the process or of torch. Inside, these are torch's own, or values that a plugin has
    no reason to set."""
    with torch.random.fork_rng(devices=[]):
        before = [read() for _, read, _, _ in SETTINGS[:-1]]  # fork_rng restores the seed
        _write([value for *_, value in SETTINGS])
        try:
            with unchanged_process(what):
                yield
            changed = [name for name, read, _, value in SETTINGS if read() != value]
        finally:
            _write(before)
    assert not changed, f"{what} torch's {' and '.join(changed)}"


def _write(values: Sequence[Any]) -> None:
    """Set the first settings where they differ: setting some imports modules."""
    for (_, read, write, _), value in zip(SETTINGS, values, strict=False):
        if read() != value:
            write(value)
